"""combine="add": attention on top of a whole convolution, behind a gate per output channel that starts at zero."""

from typing import Any

import torch
from torch import Tensor

from .tracing import is_exporting


def add_gated(convolved: Tensor, attended: Tensor, gate: Tensor, *, training: bool) -> Tensor:
    """convolved + gate * attended: [batch, channels, ...], the same and [channels] -> [batch, channels, ...].

    Unless in training, a channel whose gate is zero is `convolved` to the bit, its -0.0 too, and even where attention
    overflows; the gate has its gradient all the same. In training an overflow must not be hidden: a gradient scaler
    looks for it.
    """
    if convolved.shape[1] != len(gate):
        raise ValueError(
            f"the convolution gives {convolved.shape[1]} channels, the gate is made for {len(gate)}: channels can be "
            f"masked (torch.nn.utils.prune on the layer's conv), but not taken out of the convolution alone"
        )
    gate = gate.to(convolved.dtype).view(-1, *[1] * (convolved.dim() - 2))
    total = torch.addcmul(convolved, attended.to(convolved.dtype), gate)
    if training:
        return total
    exact = torch.where(gate == 0, convolved, total)
    # torch.jit.trace traces with gradients and checks without: both must be one graph.
    if is_exporting() or not (torch.is_grad_enabled() or torch.jit.is_tracing()):
        return exact
    return _with_gradient_of(total, exact)


def _with_gradient_of(differentiable: Tensor, value: Tensor) -> Tensor:
    """`value` to the bit, with the gradient of the other: -0.0 is what changes no number that it is added to."""
    nothing = -(differentiable.detach() - differentiable).nan_to_num(0.0)
    return value.detach() + nothing


def take_original_keys(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: what it calls `weight` and `bias`, as the network did before it was augmented, are
    those of the layer's `conv`."""
    for name in module.conv.state_dict():
        if prefix + name in state_dict:
            state_dict.setdefault(f"{prefix}conv.{name}", state_dict.pop(prefix + name))
