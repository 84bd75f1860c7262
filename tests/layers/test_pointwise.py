"""1x1 convolutions as matrix products."""

import pytest
import torch
from torch import nn

from aaconv.layers import pointwise


@pytest.fixture
def products(monkeypatch):
    """As compiled for a GPU."""
    monkeypatch.setattr(pointwise, "compiled_for_gpu", lambda x: True)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_convolutions(bias):
    conv = nn.Conv2d(5, 7, 1, bias=bias).double()
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    torch.testing.assert_close(pointwise.project_in(conv, x), conv(x).permute(0, 2, 3, 1))
    torch.testing.assert_close(pointwise.project_out(conv, x.permute(0, 2, 3, 1)), conv(x))


@pytest.mark.usefixtures("products")
def test_a_convolution_that_is_watched_or_replaced_is_called():
    conv, seen = nn.Conv2d(5, 7, 1), []
    conv.register_forward_hook(lambda *_: seen.append("hook"))
    x = torch.randn(1, 5, 2, 2).to(memory_format=torch.channels_last)
    pointwise.project_in(conv, x)
    pointwise.project_out(conv, x.permute(0, 2, 3, 1))
    assert seen == ["hook", "hook"]

    class Other(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    other = Other(5, 7, 1)
    torch.testing.assert_close(pointwise.project_in(other, x).permute(0, 3, 1, 2), other(x))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("gpu", "compiling", "exporting", "expected"),
    [(True, True, False, True), (False, True, False, False), (True, False, False, False), (True, True, True, False)],
)
def test_products_are_for_networks_compiled_for_a_gpu(gpu, compiling, exporting, expected, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(pointwise, "is_exporting", lambda: exporting)
    x = torch.zeros(1)
    assert pointwise.compiled_for_gpu(x.as_subclass(OnGpu) if gpu else x) is expected
