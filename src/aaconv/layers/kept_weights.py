"""A layer's three weights in the dtype that it computes in, in memory that is kept from call to call.

They are copied anew in every call: whether a weight has changed cannot be asked, since what is written through
`weight.data` leaves no trace. One kernel copies all three, or both projections' where the weight of the convolution is
channels-first: torch turns that one over. What is kept is the memory, and the views of it, until the layer is called
without gradients on another device (`layer.cpu()` alone frees nothing), or is deleted.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..attention.torch_state import stream_of
from ..attention.triton_launch import Launcher, device_of
from .convolution import make_widened

BLOCK = 4096
"""Elements that a program of four warps copies: 16 bytes of half precision per thread, four times."""

Weights = tuple[Tensor, Tensor, Tensor]
"""Of the convolution, and of the projections before and behind the attention."""


class KeptWeights:
    """Of one layer: `conv` [channels + slots, in channels, kernel], the weights of the slots zero, and the projections
    as matrices for products from the right, `qkv` and `project` [in channels, out channels]."""

    def __init__(self, weights: Weights, slots: int, dtype: torch.dtype) -> None:
        conv, *projections = weights
        with torch.inference_mode(False):  # else only that mode could fill them again
            self.conv = make_widened(conv, slots, dtype)
            self._rows = [torch.empty(one.shape[:2], dtype=dtype, device=one.device) for one in projections]
            self.qkv, self.project = (rows.t() for rows in self._rows)
        self._in_order = conv.is_contiguous(memory_format=torch.channels_last)
        self._sizes = (conv.numel() if self._in_order else 0, *(one.numel() for one in projections))
        self._programs = sum(-(-size // BLOCK) for size in self._sizes)
        self._launcher: Launcher | None = None

    def fill(self, weights: Weights) -> None:
        """Copy the weights as they are now."""
        if self._launcher is None:
            from . import kernels

            self._launcher = Launcher(kernels.cast_three, self._programs, {"BLOCK": BLOCK, "num_warps": 4})
        with device_of(self.conv):
            self._launcher((*weights, self.conv, *self._rows), self._sizes)
        if not self._in_order:
            self.conv[: len(weights[0])].copy_(weights[0])


def kept_weights(layer: nn.Module, weights: Weights, slots: int, dtype: torch.dtype) -> KeptWeights | None:
    """Those of the layer, with the weights as they are now; None where the kernel cannot read them. Other dtypes,
    devices, streams, shapes or layouts get other memory."""
    kind = slots, dtype, stream_of(weights[0]), *map(_kind, weights)
    known = _kept.get(layer)
    if known is None or known[0] != kind:
        readable = weights[1].is_contiguous() and weights[2].is_contiguous()
        known = _kept[layer] = kind, KeptWeights(weights, slots, dtype) if readable else None
    if known[1] is not None:
        known[1].fill(weights)
    return known[1]


def drop_kept_weights(layer: nn.Module) -> None:
    """Free the memory that the layer has, if it has some."""
    if _kept:
        _kept.pop(layer, None)


_kept: WeakKeyDictionary[nn.Module, tuple[tuple, KeptWeights | None]] = WeakKeyDictionary()


def _kind(weight: Tensor) -> tuple[Any, ...]:
    return weight.dtype, weight.get_device(), weight.shape, weight.stride()
