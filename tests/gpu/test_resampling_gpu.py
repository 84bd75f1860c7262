"""The compiled kernels that halve and enlarge maps, and layers that use them."""

import pytest
import torch

from aaconv import AAConv2d
from aaconv.layers import resampling
from aaconv.layers.pooling import average, resize
from support.resampling_laws import HALVED, RESIZED, assert_enlarges, assert_halves, in_turn

pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halved_maps_match_float64(dtype):
    for size, channels in [*in_turn(HALVED), ((56, 56), 128), ((28, 29), 100)]:
        assert_halves(size, channels, dtype, "cuda")
    assert_halves((28, 28), 8, dtype, "cuda", slots=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_enlarged_maps_match_float64(dtype):
    for (old, new), channels in [*in_turn(RESIZED), (((14, 14), (28, 28)), 8), (((31, 3), (100, 7)), 24)]:
        assert_enlarges(old, new, channels, dtype, "cuda")
    assert_enlarges((14, 14), (28, 28), 8, dtype, "cuda", slots=True)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels of a wider map": lambda x: torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last)[
        :, : x.shape[1]
    ],
    "part of a larger map": lambda x: torch.cat([x, x], 3).contiguous(memory_format=torch.channels_last)[
        ..., : x.shape[3]
    ],
}


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("channels", [1, 16])
def test_gradients_of_a_layer_do_not_depend_on_the_memory_format(stride, channels):
    sizes = {"size": 14 // stride, "num_heads": 2, "key_channels": 40, "value_channels": 6}
    layer = AAConv2d(channels, 32, 3, stride, **sizes).double().cuda()
    x, found = torch.randn(2, channels, 14, 14, dtype=torch.float64, device="cuda"), {}
    for name, laid_out in LAYOUTS.items():
        leaf = laid_out(x).detach().requires_grad_()
        (found[name],) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, found["contiguous"], msg=lambda text, name=name: f"{name}: {text}")


def test_every_time_the_same_bits():
    x = torch.randn(8, 24, 28, 28, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    found = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        out = resampling.enlarge(resampling.halve(leaf), (28, 28))
        found.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    for other in found[1:]:
        assert all(torch.equal(one, again) for one, again in zip(found[0], other, strict=True))


def test_autocast_makes_no_float32_of_a_resized_map():
    x = torch.randn(2, 8, 7, 7, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        assert resize(x, (14, 14)).dtype == torch.bfloat16
        assert average(x, (3, 3), (2, 2)).dtype == torch.bfloat16


def test_more_than_two_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 15 GiB")
    x = torch.zeros(41, 256, 256, 1024, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    x[-1, :, -3:, -3:] = 8.0
    halved = resampling.halve(x)
    assert (halved[-1, :, -1, -1] == 8).all()
    assert not halved[:-1].any()
    assert not halved[-1, :, :-2].any()
