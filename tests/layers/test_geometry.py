"""Where the pixels of the attention map lie: over those of the convolution's output."""

import pytest
import torch
import torch.nn.functional as F

from aaconv.layers.geometry import Axis, Geometry
from support.small_layers import small


def test_strided_attention_is_centred_where_the_convolution_is():
    """An average over the window of the output pixel: moving the input by the stride moves the output by one pixel."""
    layer = small(kernel_size=3, stride=2, padding=0, position="none")
    x = torch.randn(1, 6, 9, 9)
    pooled, _ = layer.geometry.pool(x)
    torch.testing.assert_close(pooled[..., 1, 1], x[..., 2:5, 2:5].mean((-1, -2)))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (4, 4, 0), (4, 2, 1)])
def test_an_even_kernel_averages_the_pixels_of_its_stride(kernel, stride, padding):
    layer = small(kernel_size=kernel, stride=stride, padding=padding)
    x = torch.randn(1, 6, 8, 12)
    pooled, _ = layer.geometry.pool(x)
    torch.testing.assert_close(pooled, F.avg_pool2d(x, stride))


@pytest.mark.parametrize(
    ("axis", "window"),
    [
        (Axis(), (0, 0, 1)),
        (Axis(3, 1, 1), (0, 0, 1)),
        (Axis(3, 2, 1), (0, 0, 3)),
        (Axis(5, 3, 2), (0, 0, 3)),  # an odd stride averages as many pixels
        (Axis(5, 5, 2), (0, 0, 5)),
        (Axis(3, 4, 1), (0, 0, 5)),  # an even one with an odd kernel one more, to have a middle
        (Axis(1, 2, 0), (0, 0, 3)),
        (Axis(3, 1, 0), (-1, -1, 1)),
        (Axis(3, 1, 2, dilation=2), (0, 0, 1)),
        (Axis(4, 1, 1), (0, -1, 1)),  # of an odd number of pixels the one that is left is cut behind
        (Axis(2, 1, 1), (1, 0, 1)),  # or added before
        (Axis(4, 2, 1), (0, 0, 2)),
        (Axis(7, 2, 0, pads_to_same=True), (0, 0, 3)),
    ],
    ids=str,
)
def test_windows(axis, window):
    assert axis.window == window


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_windows_lie_over_those_of_the_convolution(kernel, stride, padding, dilation):
    """A window is centred where the convolution's is, or half a pixel before it where that lies between two."""
    axis = Axis(kernel, stride, padding, dilation)
    x = torch.zeros(1, 1, 1, 31, requires_grad=True)
    place = {"stride": (1, stride), "padding": (0, padding), "dilation": (1, dilation)}
    convolved = F.conv2d(x, torch.ones(1, 1, 1, kernel), **place)
    pooled, size = Geometry(Axis(), axis).pool(x)
    assert tuple(pooled.shape[-2:]) == tuple(size) == tuple(convolved.shape[-2:])
    assert axis.output_length(31) == convolved.shape[-1]
    centres = []
    for result in (convolved, pooled):
        (weight,) = torch.autograd.grad(result[0, 0, 0, result.shape[-1] // 2], x)
        centres.append(((weight.flatten() * torch.arange(31)).sum() / weight.sum()).item())
    between = dilation * (kernel - 1) % 2 and stride % 2
    assert centres[1] - centres[0] == pytest.approx(-0.5 if between else 0, abs=1e-4)
