"""What holds of halved and enlarged maps, on any device."""

import functools

import torch
import torch.nn.functional as F

from aaconv.layers import resampling

HALVED = [(1, 1), (2, 2), (7, 7), (8, 6), (2, 14), (1, 3), (5, 2), (9, 16)]
RESIZED = [
    ((7, 7), (14, 14)),
    ((4, 5), (7, 10)),
    ((1, 3), (1, 5)),
    ((1, 1), (3, 2)),
    ((5, 6), (5, 6)),
    ((6, 9), (3, 4)),
    ((3, 5), (17, 11)),
    ((2, 13), (5, 40)),
]
CHANNELS = [1, 3, 8, 24, 130]


def in_turn(sizes):
    """Every size with two numbers of channels."""
    return [(size, CHANNELS[(2 * place + more) % len(CHANNELS)]) for place, size in enumerate(sizes) for more in (0, 1)]


def halve_by_torch(x):
    """Over contiguous memory: of channels_last maps on a GPU torch 2.11 has wrong gradients (its issue 188344)."""
    return F.avg_pool2d(x.contiguous(), 3, 2, 1, count_include_pad=False)


def resize_by_torch(x, size):
    return F.interpolate(x, size=size, mode="bilinear")


def assert_halves(size, channels, dtype, device="cpu", **layout):
    _compare(resampling.halve, halve_by_torch, _map(channels, size, dtype, device), **layout)


def assert_enlarges(old, new, channels, dtype, device="cpu", **layout):
    ours, torchs = (functools.partial(resize, size=new) for resize in (resampling.enlarge, resize_by_torch))
    _compare(ours, torchs, _map(channels, old, dtype, device), **layout)


def _map(channels, size, dtype, device):
    x = torch.randn(2, channels, *size, dtype=torch.float64).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def _compare(ours, torchs, x, slots=False):
    """Output and gradient at most twice as far from float64 as torch's in the same dtype, or as far as one rounding.
    slots: the gradient is that of channels of a wider map."""
    exact = torchs(x.double())
    wide = torch.randn(len(x), x.shape[1] + 8 * slots, *exact.shape[2:], dtype=torch.float64).to(x.device, x.dtype)
    grad = wide.contiguous(memory_format=torch.channels_last)[:, 8 * slots :]
    truth, found, allowed = (
        (_output_and_gradient(function, one, grad)) for function, one in ((torchs, x.double()), (ours, x), (torchs, x))
    )
    for wanted, got, theirs in zip(truth, found, allowed, strict=True):
        assert got.dtype == x.dtype
        assert got.is_contiguous(memory_format=torch.channels_last)
        error, most = ((one - wanted).abs().max() for one in (got, theirs))
        assert error <= max(2 * most, torch.finfo(x.dtype).eps * wanted.abs().max())


def _output_and_gradient(function, x, grad):
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    with torch.no_grad():
        assert torch.equal(function(x), out)
    return out.detach(), *torch.autograd.grad(out, leaf, grad.to(x.dtype))
