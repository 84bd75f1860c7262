"""What GPUs do where the convolution is left with an odd number of channels."""

import pytest
import torch

from aaconv import AAConv2d
from aaconv.layers.convolution import convolve_around, likes_more_channels


def make_layer(**options):
    return AAConv2d(6, 64, 3, num_heads=2, key_channels=8, value_channels=8, size=5, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
def test_convolving_around_is_concatenating(stride, bias, padding_mode):
    layer = make_layer(stride=stride, bias=bias, padding_mode=padding_mode)
    assert likes_more_channels(layer.conv, layer.out_channels)
    x = torch.randn(2, 6, 5, 7, requires_grad=True)
    whole = layer(x)
    filled = convolve_around(layer.conv, x, layer(x)[:, -layer.value_channels :])
    torch.testing.assert_close(filled, whole)
    seed = torch.randn_like(whole)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(whole, leaves, seed)
    for ours, theirs in zip(torch.autograd.grad(filled, leaves, seed), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_convolution_with_hooks_or_weights_it_makes_is_called():
    normalised, hooked, hooked_backwards = make_layer(), make_layer(), make_layer()
    torch.nn.utils.parametrizations.weight_norm(normalised.conv)
    hooked.conv.register_forward_hook(lambda *_: None)
    hooked_backwards.conv.register_full_backward_pre_hook(lambda *_: None)
    for layer in (normalised, hooked, hooked_backwards):
        assert not likes_more_channels(layer.conv, layer.out_channels)


@pytest.mark.parametrize(
    ("convolved", "channels", "liked"),
    [(232, 256, True), (288, 320, True), (256, 320, False), (64, 128, False), (20, 24, False)],
)
def test_channels_are_made_up_where_they_cost_nothing(convolved, channels, liked):
    assert likes_more_channels(torch.nn.Conv2d(4, convolved, 3), channels) == liked
