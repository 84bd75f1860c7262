"""The compiled kernels for heads of many channels and for biases of two parts."""

import functools

import pytest
import torch

from aaconv.attention import attend_2d, attend_decomposed, triton_backend
from support import decomposed_laws, fused_laws

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDE_SHAPES = [  # batch, height, width, heads, key depth, value depth
    (1, 64, 64, 2, 64, 64),  # these: SAM, BoTNet
    (1, 64, 64, 1, 80, 80),
    (3, 14, 14, 12, 64, 64),
    (2, 14, 14, 4, 128, 128),
    (2, 28, 28, 2, 96, 96),
    (1, 5, 7, 2, 64, 40),
    (1, 6, 33, 1, 40, 80),
    (1, 9, 70, 1, 48, 64),
    (1, 1, 1, 1, 64, 64),
    (1, 128, 3, 1, 112, 33),
    (2, 3, 128, 3, 65, 128),
    (1, 100, 90, 1, 64, 64),  # these two: gradients of the tables that no program holds
    (1, 128, 40, 1, 128, 128),
]
HALVES = [torch.bfloat16, torch.float16]
random_inputs = functools.partial(fused_laws.random_inputs, device="cuda")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_wide_heads_match_float64(shape, dtype):
    for tables in ("shared", "per head"):
        inputs = random_inputs(*shape, tables)
        fused_laws.assert_as_good_as_eager(inputs, dtype, shape[3], shape[4])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*decomposed_laws.GENERAL_SHAPES, (2, 2, 200, 28, 28, 1, 64, 64)], ids=str)
def test_the_general_form_matches_float64(shape, dtype):
    decomposed_laws.assert_as_good_as_eager(decomposed_laws.random_inputs(*shape, device="cuda"), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_time_the_same_bits(dtype):
    inputs = random_inputs(2, 14, 14, 4, 64, 64)
    first, *others = (fused_laws.output_and_gradients(triton_backend.attend, inputs, dtype, 4, 64) for _ in range(3))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))


def test_logits_far_from_zero():
    inputs = fused_laws.rising_inputs(1, 14, 14, 2, 64, 64, rise=4, device="cuda")
    for dtype in HALVES:
        fused_laws.assert_as_good_as_eager(inputs, dtype, 2, 64)


def test_compiled_and_in_a_graph_of_torch():
    qkv, rel_h, rel_w, _ = (tensor.bfloat16() for tensor in random_inputs(2, 14, 14, 4, 64, 64))
    compiled = torch.compile(attend_2d, fullgraph=True)
    sizes = {"num_heads": 4, "key_channels": 256}
    torch.testing.assert_close(compiled(qkv, rel_h, rel_w, **sizes), attend_2d(qkv, rel_h, rel_w, **sizes))
    general = [tensor.bfloat16() for tensor in decomposed_laws.random_inputs(1, 2, 9, 4, 5, 1, 64, 64, device="cuda")]
    compiled = torch.compile(attend_decomposed, fullgraph=True)
    torch.testing.assert_close(compiled(*general[:5]), attend_decomposed(*general[:5]))


def test_another_size_does_not_compile_anew():
    """Sizes and strides are arguments of the kernels: only their divisibility by 16 is not."""
    from aaconv.attention import triton_decomposed_kernels

    def attend(height):
        q, k, v, rows, columns, _ = decomposed_laws.random_inputs(1, 2, 64, height, 32, 0, 64, 64, device="cuda")
        attend_decomposed(*(tensor.bfloat16() for tensor in (q, k, v, rows, columns)), backend="triton")

    attend(32)
    caches = triton_decomposed_kernels.attend_decomposed_forward.device_caches
    before = sum(len(cache[0]) for cache in caches.values())
    for height in (48, 64, 80, 96):
        attend(height)
    assert sum(len(cache[0]) for cache in caches.values()) - before <= 1
