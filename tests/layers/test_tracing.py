"""Whether a network is exported is known, whoever asks."""

import pytest
import torch
from torch.autograd import forward_ad

from aaconv import AAConv2d
from aaconv.layers.convolution import convolve_around
from aaconv.layers.pooling import average, resize
from aaconv.layers.tracing import is_exporting


class Asks(torch.nn.Module):
    def forward(self, x):
        return x + 1 if is_exporting() else x + 2


@pytest.mark.parametrize("strict", [False, True])
def test_only_an_export_is_an_export(strict):
    network, x = Asks(), torch.zeros(2)
    program = torch.export.export(network, (x,), strict=strict).module()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    assert [one(x)[0].item() for one in (network, compiled, program)] == [2, 2, 1]


CONV = torch.nn.Conv2d(3, 4, 3, padding=1).double()
ATTENTION = {"num_heads": 2, "key_channels": 8, "value_channels": 8, "size": (2, 2), "backend": "eager"}
OPERATIONS = {
    "enlarged": lambda x: resize(x, (8, 8)),
    "halved": lambda x: average(x, (3, 3), (2, 2)),
    "around": lambda x: convolve_around(CONV, x.sin(), x.cos()),
    "layer": AAConv2d(3, 16, 3, stride=2, **ATTENTION).double(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_transforms_that_are_compiled_give_what_they_give_otherwise(operation):
    """They would pass by the functions that give the compiler its gradients: wrong, without a word."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def loss(x):
        return operation(x).sin().sum()

    def penalty(x):
        return torch.func.grad(loss)(x).square().sum()

    by_image = torch.func.vmap(torch.func.grad(lambda one: loss(one[None])))
    for transformed in (torch.func.grad(penalty), by_image):
        compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), transformed(x))


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="compiled, torch 2.11 refuses forward mode here")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_forward_mode_that_is_compiled_gives_what_it_gives_otherwise(operation):
    def along(x):
        with forward_ad.dual_level():
            change = operation(forward_ad.make_dual(x.clone().requires_grad_(), x.cos()))
            return forward_ad.unpack_dual(change).tangent.detach()

    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(along, backend="aot_eager")(x), along(x))
