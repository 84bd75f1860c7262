"""The kernels for small maps against float64, in triton's interpreter, as test_triton holds the packed ones to it."""

import pytest
import torch

from aaconv.attention import eager, triton_backend, triton_plan, triton_tiles
from support.fused_laws import (
    assert_a_batch_is_its_images,
    assert_as_good_as_eager,
    output_and_gradients,
    random_inputs,
    rising_inputs,
)
from support.interpreter import run_interpreted

INTERPRETED = triton_backend.INTERPRETED
PARTS = 2
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes test_in_the_interpreter starts")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers", "small_kernels"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]

SHAPES = [  # batch, height, width, heads, key depth, value depth
    (1, 1, 1, 1, 20, 1),
    (2, 1, 7, 2, 20, 3),
    (1, 5, 11, 2, 20, 3),
    (1, 7, 7, 8, 20, 6),
    (2, 8, 8, 1, 20, 8),
    (1, 13, 14, 1, 20, 3),
    (1, 14, 14, 1, 20, 3),
    (1, 16, 16, 1, 20, 4),
    (2, 5, 6, 2, 12, 6),
    (1, 7, 6, 2, 16, 4),
    (1, 8, 3, 2, 32, 8),
    (1, 9, 3, 2, 24, 8),
    (1, 10, 9, 1, 24, 14),
    (1, 9, 12, 1, 1, 7),
    (1, 6, 7, 1, 28, 3),
]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels of all plans."""
    names, launcher = [], triton_plan.Plan._launcher
    monkeypatch.setattr(
        triton_plan.Plan, "_launcher", lambda plan, name, heads: names.append(name) or launcher(plan, name, heads)
    )
    return names


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # slots beyond the map's edge may overflow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_match_float64(shape, dtype, launched):
    assert_as_good_as_eager(random_inputs(*shape), dtype, shape[3], shape[4])
    assert launched == list(triton_plan.SMALL_KERNELS)


@interpreted
@pytest.mark.parametrize("forward", [True, False])
def test_either_kernel_goes_with_the_packed_ones(forward, launched, monkeypatch):
    monkeypatch.setattr(triton_plan, "SMALL_KERNELS", (triton_plan.SMALL_KERNELS[0 if forward else 1],))
    assert_as_good_as_eager(random_inputs(1, 7, 9, 2, 20, 3), torch.float16, 2, 20)
    assert "pack" in launched
    assert triton_plan.SMALL_KERNELS[0] in launched


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of weights that are done again
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table", [1, 2])
def test_few_heads_with_large_relative_logits(table, dtype, launched, monkeypatch):
    """The packed backward takes the log-sum-exp of a forward that rounds relative logits as `pack` does."""
    monkeypatch.setattr(triton_plan, "SMALL_KERNELS", triton_plan.SMALL_KERNELS[:1])
    inputs = random_inputs(2, 5, 6, 2, 20, 3)
    inputs[0][..., :40] = 1
    inputs[table][:] = 1000 / 20**0.5
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 2, 20)
    fused = output_and_gradients(triton_backend.attend, inputs, dtype, 2, 20)
    assert launched[:2] == [triton_plan.SMALL_KERNELS[0], "pack"]
    keys, values = slice(40, 80), slice(80, None)  # those of the queries are products with a large table
    for part in (keys, values):
        error = (fused[1] - exact[1])[..., part].abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * exact[1][..., part].abs().max()


@interpreted
@pytest.mark.parametrize("queries", [16, 32, 64])
@pytest.mark.parametrize("keys", [16, 32, 64])
def test_tiles_change_nothing_but_the_speed(queries, keys, monkeypatch):
    for name in triton_plan.SMALL_KERNELS:
        monkeypatch.setitem(triton_tiles.TILES, name, lambda of: triton_tiles.Tile(queries, keys, 2, 1))
    assert_as_good_as_eager(random_inputs(1, 11, 9, 2, 20, 3), torch.float16, 2, 20)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of weights that are done again
@pytest.mark.parametrize("shift", [-300, -60, -40, 40, 60, 300])
def test_bfloat16_with_logits_far_from_zero(shift):
    """If a sum of the weights is too small or too large, a program does its queries again."""
    qkv, *rest = random_inputs(1, 5, 6, 2, 20, 3)
    qkv[..., :80] *= 0.3
    qkv[..., :40] += abs(shift) ** 0.5 * 20**-0.25
    qkv[..., 40:80] += (shift > 0 or -1) * abs(shift) ** 0.5 * 20**-0.25
    assert_as_good_as_eager((qkv, *rest), torch.bfloat16, 2, 20)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first attempt overflows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "rise"), [(8, 40), (4, 2)])
def test_logits_may_rise_far_above_those_of_the_first_keys(width, rise, dtype):
    assert_as_good_as_eager(rising_inputs(1, 9, width, 1, 20, 3, rise=rise), dtype, 1, 20)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_query_that_is_done_again_takes_its_tiles_with_it():
    """Logits of one query of hundreds: the program's other queries come out as well as before."""
    qkv, *rest = random_inputs(1, 9, 9, 1, 20, 3)
    qkv[0, 4, 4, :20] *= 100
    assert_as_good_as_eager((qkv, *rest), torch.bfloat16, 1, 20)


@interpreted
def test_small_weights_count_beside_a_large_one():
    """The first key has nearly all of the weight; the others, 2**-17 of it each, are a tenth of a percent together."""
    qkv, rel_h, rel_w, grad = random_inputs(1, 12, 12, 1, 20, 1)
    qkv[..., :40] = 0
    qkv[..., :20] = 1
    qkv[0, 0, 0, 20:40] = 17 * 0.6931 / 20**0.5
    qkv[..., 40] = 3
    qkv[0, 0, 0, 40] = 0
    inputs = (qkv, rel_h * 0, rel_w * 0, grad)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 1, 20)[0]
    fused = output_and_gradients(triton_backend.attend, inputs, torch.float16, 1, 20)[0]
    torch.testing.assert_close(fused.double(), exact, rtol=0.02, atol=0)


@interpreted
@pytest.mark.parametrize("layout", ["channels_first", "sliced", "expanded"])
def test_any_strides_of_the_projection(layout):
    qkv, rel_h, rel_w, _ = (t.half() for t in random_inputs(2, 2, 5, 1, 20, 3))
    if layout == "channels_first":
        strided = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    elif layout == "sliced":
        strided = torch.zeros(2, 3, 7, qkv.shape[3] + 3, dtype=qkv.dtype)[:, 1:, 2:, 3:]
        strided.copy_(qkv)
    else:
        qkv = qkv[:1].expand(2, -1, -1, -1).contiguous()
        strided = qkv[:1].expand(2, -1, -1, -1)
    grads = []
    for one in (strided, qkv):
        leaf = one.detach().requires_grad_()
        out = triton_backend.attend(leaf, rel_h, rel_w, num_heads=1, key_channels=20)
        out.square().sum().backward()
        grads.append((out, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@interpreted
def test_float32_tables_with_a_half_precision_projection():
    inputs = random_inputs(1, 3, 4, 2, 20, 3)
    qkv, rel_h, rel_w, grad = inputs[0].half(), inputs[1].float(), inputs[2].float(), inputs[3].half()
    rel_h.requires_grad_()
    triton_backend.attend(qkv, rel_h, rel_w, num_heads=2, key_channels=40).backward(grad)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 2, 20)[2]
    assert rel_h.grad.dtype == torch.float32
    torch.testing.assert_close(rel_h.grad.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@interpreted
def test_a_batch_is_its_images():
    assert_a_batch_is_its_images(random_inputs(6, 5, 9, 2, 20, 3), torch.float16, 2, 20, parts=3)


@interpreted
def test_an_empty_batch():
    inputs = random_inputs(0, 3, 4, 2, 20, 3)
    out, grad_qkv, grad_h, grad_w = output_and_gradients(triton_backend.attend, inputs, torch.float16, 2, 20)
    assert (out.shape, grad_qkv.shape) == ((0, 3, 4, 6), (0, 3, 4, 86))
    assert not grad_h.any()
    assert not grad_w.any()


@interpreted
def test_without_gradients_as_with_them():
    qkv, rel_h, rel_w, _ = (t.half() for t in random_inputs(2, 7, 5, 2, 20, 3))
    sizes = {"num_heads": 2, "key_channels": 40}
    with torch.no_grad():
        out = triton_backend.attend(qkv, rel_h, rel_w, **sizes)
    assert torch.equal(out, triton_backend.attend(qkv.requires_grad_(), rel_h, rel_w, **sizes))
