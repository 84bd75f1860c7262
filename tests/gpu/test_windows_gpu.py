"""The compiled kernels of local attention."""

import pytest
import torch

from aaconv import AAConv2d
from aaconv.attention import attend_2d, triton_backend
from aaconv.attention.windows import make_window
from support.window_laws import Case, assert_as_good_as_eager, random_case

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CASES = [
    Case(56, 56, make_window(13), 8, 20, 3),
    Case(28, 30, make_window(7), 4, 32, 32),
    Case(33, 20, make_window((32, 5)), 2, 64, 64),
    Case(40, 41, make_window(8, 4, 2), 2, 20, 3, "per head"),
    *(random_case(seed, most=30, largest_window=16) for seed in (1, 8, 15)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_match_float64(case, dtype):
    assert_as_good_as_eager(case, dtype, "cuda")


def test_every_time_the_same_bits():
    case = Case(56, 56, make_window(7), 8, 20, 3, batch=8)
    inputs = case.inputs("cuda")
    first, *others = (case.run(triton_backend.attend, inputs, torch.bfloat16) for _ in range(3))
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))


def test_memory_is_linear_and_four_times_the_input():
    def peak(side):
        qkv = torch.randn(16, side, side, 8 * 43, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.randn(25, 20, device="cuda", requires_grad=True) for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend_2d(qkv, *tables, num_heads=8, key_channels=160, window=13).float().sum().backward()
        return (torch.cuda.max_memory_allocated() - before) / (qkv.numel() * qkv.itemsize)

    peak(56)
    assert peak(112) <= 4


@pytest.mark.slow
def test_a_compiled_layer_gives_what_it_gives():
    torch.manual_seed(0)
    layer = AAConv2d(64, 64, 3, num_heads=2, window=7).cuda().bfloat16()
    image = torch.randn(2, 64, 20, 24, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(image), layer(image), rtol=0.05, atol=0.05)
