"""FLOPs of single operations as the paper counts them: the rules of the TensorFlow 1.x profiler, for ATen operations.

Convolutions and 2-D matrix products: two per multiply-add. Bias, add, subtract, multiply, divide: 1 per output element.
Mean and sum: 1 per input element. Pooling: the kernel area per output element. Softmax: 5 per element. Normalisation,
activations, resizing and moving data: 0. Batched matrix products: 0 too, so Q K^T and A V are missing from the paper's
figures; here they are kept apart, and the true count adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BYTES_PER_MAP_ELEMENT = 2  # the paper stores attention maps as bfloat16
aten = torch.ops.aten


@dataclass
class Ops:
    """FLOPs in the paper's count, those of batched products, and the bytes of attention maps."""

    flops: int = 0
    batched_flops: int = 0
    map_bytes: int = 0

    def __iadd__(self, other: Ops) -> Ops:
        self.flops += other.flops
        self.batched_flops += other.batched_flops
        self.map_bytes += other.map_bytes
        return self


def attention_ops(
    height: int,
    width: int,
    *,
    num_heads: int,
    key_channels: int,
    value_channels: int,
    relative_lengths: Sequence[int],
    share_heads: bool,
    keys: int | None = None,
) -> Ops:
    """The paper's listing from q, k, v to the heads' outputs, for one image.

    Scaling q, Q K^T, softmax, A V, and for each axis with a relative table (of 2 length - 1 rows) its logits and adding
    them. A table shared by the heads makes these a 2-D product, one per head a batched one. keys: so many that a pixel
    sees, all of them without a window.
    """
    n = height * width
    keys = n if keys is None else keys
    maps = num_heads * n * keys
    ops = Ops(n * key_channels + 5 * maps, 2 * n * keys * (key_channels + value_channels), BYTES_PER_MAP_ELEMENT * maps)
    for length in relative_lengths:
        relative_logits = 2 * n * key_channels * (2 * length - 1)
        ops += Ops(flops=maps)
        ops += Ops(flops=relative_logits) if share_heads else Ops(batched_flops=relative_logits)
    return ops


def _convolution(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Ops:
    transposed = args[3]
    positions = x if transposed else out
    return Ops(2 * positions.numel() * math.prod(weight.shape[1:]) + (0 if bias is None else out.numel()))


def _matmul(out: Tensor, a: Tensor, b: Tensor, **_: Any) -> Ops:
    return Ops(2 * out.numel() * a.shape[-1])


def _add_matmul(out: Tensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Ops:
    return Ops(2 * out.numel() * a.shape[-1] + out.numel())


def _batched_matmul(out: Tensor, a: Tensor, b: Tensor, **_: Any) -> Ops:
    return Ops(batched_flops=2 * out.numel() * a.shape[-1])


def _add_batched_matmul(out: Tensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Ops:
    return Ops(flops=out.numel(), batched_flops=2 * out.numel() * a.shape[-1])


def _pooling(out: Tensor | tuple[Tensor, ...], x: Tensor, kernel: list[int], *_: Any, **__: Any) -> Ops:
    pooled = out if isinstance(out, Tensor) else out[0]
    return Ops(pooled.numel() * kernel[0] * kernel[-1])


def _per_input(out: Any, x: Tensor, *_: Any, **__: Any) -> Ops:
    return Ops(x.numel())


def _per_output(out: Tensor, *_: Any, **__: Any) -> Ops:
    return Ops(out.numel() if out.is_floating_point() else 0)


def _softmax(out: Tensor, *_: Any, **__: Any) -> Ops:
    """[..., n, m] is taken for attention maps, [batch, classes] is not."""
    return Ops(5 * out.numel(), map_bytes=BYTES_PER_MAP_ELEMENT * out.numel() if out.dim() > 2 else 0)


def _by_name(rule: Callable[..., Ops], names: str) -> dict[object, Callable[..., Ops]]:
    return {getattr(aten, name): rule for name in names.split()}


SLIDING = _by_name(_convolution, "convolution") | _by_name(_pooling, "avg_pool2d max_pool2d_with_indices")
"""The operations that fail where their window finds no pixel."""

RULES = (
    SLIDING
    | _by_name(_per_output, "add add_ sub sub_ rsub mul mul_ div div_ maximum minimum pow pow_")
    | _by_name(_per_input, "mean sum _adaptive_avg_pool2d adaptive_max_pool2d")
    | _by_name(_softmax, "_softmax _safe_softmax")
    | _by_name(_matmul, "mm")
    | _by_name(_add_matmul, "addmm")
    | _by_name(_batched_matmul, "bmm")
    | _by_name(_add_batched_matmul, "baddbmm")
)
"""ATen operation -> rule(output, *arguments); whatever is not here is free."""
