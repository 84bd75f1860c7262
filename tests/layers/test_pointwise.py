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
