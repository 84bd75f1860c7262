"""Resizing by products is torch's resizing, with the same gradient every time."""

import pytest
import torch
import torch.nn.functional as F

from aaconv.resizing import resize

SIZES = [((7, 7), (14, 14)), ((4, 5), (7, 10)), ((1, 3), (1, 5)), ((5, 6), (5, 6)), ((6, 9), (3, 4))]


@pytest.mark.parametrize(("old", "new"), SIZES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_values_and_gradients_are_torchs(old, new, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *old, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    ours, torchs = resize(x, new), F.interpolate(x, new, mode="bilinear")
    grad = torch.randn_like(torchs)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad)[0] for out in (ours, torchs)))
    with torch.no_grad():
        assert torch.equal(resize(x, new), torchs)


def test_bfloat16_is_as_good_as_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 14, 14, dtype=torch.bfloat16)
    exact = F.interpolate(x.double(), (28, 28), mode="bilinear")
    ours = resize(x.requires_grad_(), (28, 28))
    assert ours.dtype == torch.bfloat16
    torchs = F.interpolate(x, (28, 28), mode="bilinear")
    assert (ours - exact).abs().max() <= 2 * (torchs - exact).abs().max()


def test_no_atomic_addition_in_the_compiled_gradient():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(1, 4, 6, 6, requires_grad=True)
    compiled = torch.compile(lambda x: resize(x, (12, 12)).square().sum())

    def gradient():
        compiled(x).backward()

    _, code = run_and_get_code(gradient)
    assert len(code) == 2
    assert not any("atomic_add" in part for part in code)


def test_exports_with_any_size_where_gradients_are_enabled():
    class Resized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)

        def forward(self, x):
            return resize(self.convolution(x), x.shape[2:])

    height, width = (torch.export.Dim(name, min=8, max=64) for name in ("height", "width"))
    network, x = Resized(), torch.randn(1, 3, 21, 18)
    program = torch.export.export(network, (torch.randn(1, 3, 12, 16),), dynamic_shapes=({2: height, 3: width},))
    torch.testing.assert_close(program.module()(x), network(x))
