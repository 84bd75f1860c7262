"""What torch's tracers do at the moment, and what they are not to look into."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx

from ..attention.torch_state import constant_to_compilers, is_in_transform


@constant_to_compilers
def is_exporting() -> bool:
    """torch.compiler.is_exporting(), asked before anything is traced: to the compiler of torch 2.11 every compilation
    is an export."""
    return torch.compiler.is_exporting()


def compiles_gradient(*tensors: Tensor) -> bool:
    """Whether an autograd.Function of ours may say what compilers make of a gradient by these tensors. Not where one of
    torch.func's transforms is compiled as well, or forward mode: these pass by what such a function computes forward,
    so that a gradient of a gradient would be wrong without a word. So it is where backend="eager" leaves the
    differentiation to torch, which cannot be asked here; other backends refuse a second one. An export has no
    gradients."""
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return wanted and torch.compiler.is_compiling() and not is_exporting() and not is_in_transform()


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds for all that is compiled, without a guard: where sizes may change, no."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # which takes half a second to import

    return statically_known_true(condition)


def leaf(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A module's forward that torch.fx does not look into: one call in a traced network, as of a module of torch.nn.

    For forwards that ask for shapes, devices or gradients, which symbols do not have.
    """

    @wraps(forward)
    def traced(self: Any, input: Tensor) -> Tensor:
        if not isinstance(input, fx.Proxy):
            return forward(self, input)
        path = input.tracer.path_of_module(self)
        if not path:
            raise ValueError(f"torch.fx does not look into {type(self).__name__}: trace a network that contains it")
        return input.tracer.create_proxy("call_module", path, (input,), {})

    return traced
