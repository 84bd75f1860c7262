"""attend_decomposed: attention with a bias of two parts, one for the row and one for the column of a key."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import eager, sdpa, triton_decomposed_backend


class Form(NamedTuple):
    """How a backend does it, and why it cannot."""

    why_not: Callable[..., str | None]
    attend: Callable[..., Tensor]


FORMS = {
    "triton": Form(triton_decomposed_backend.why_not, triton_decomposed_backend.attend),
    "sdpa": Form(sdpa.why_not_decomposed, sdpa.attend_decomposed),
    "eager": Form(lambda *inputs: None, eager.attend_decomposed),
}
"""Every backend by name, fastest first."""


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUMBERS = (float, int, torch.SymFloat, torch.SymInt, Real)
LAYOUTS = {
    "q": "batch, heads, queries, depth",
    "k": "batch, heads, keys, depth",
    "v": "batch, heads, keys, value depth",
    "rows": "batch, heads, queries, height",
    "columns": "batch, heads, queries, width",
}


def check_floating(name: str, tensor: Tensor) -> None:
    """A ValueError for what is not a tensor of real numbers with a point that can be computed with."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        if tensor.is_floating_point():
            known = "bfloat16, float16, float32 or float64"
            raise ValueError(f"{name} must be {known}, got {tensor.dtype}; try {name}.to(torch.bfloat16)")
        raise ValueError(f"{name} must be floating-point, got {tensor.dtype}; try {name}.float()")


def shown(value: Any) -> str:
    """What was given, on one line of an error."""
    text = repr(value)
    return f"a {type(value).__name__}" if isinstance(value, Tensor) or len(text) > 60 or "\n" in text else text


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale that was given, if it is a number, or that of the depth."""
    if scale is None:
        return q.shape[3] ** -0.5
    if isinstance(scale, Tensor):
        raise ValueError("scale must be None or a finite number, got a Tensor; try q * scale, and scale=1.0")
    number = isinstance(scale, NUMBERS) and not isinstance(scale, bool)
    # A compiler's number may be a symbol, and to compare it would fix its value.
    if not number or not (torch.compiler.is_compiling() or -math.inf < scale < math.inf):
        raise ValueError(f"scale must be None or a finite number, got scale={shown(scale)}")
    return scale


def check(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> None:
    """A ValueError that names what does not fit."""
    check_floating("q", q)
    batch_and_heads, dtype, device = q.shape[:2], q.dtype, q.device
    for name, tensor in (("q", q), ("k", k), ("v", v), ("rows", rows), ("columns", columns)):
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            check_floating(name, tensor)
        if tensor.dim() != 4:
            heads = f"; try {name}.unsqueeze(1) for one head" if tensor.dim() == 3 else ""
            raise ValueError(f"{name} must be [{LAYOUTS[name]}], got shape {list(tensor.shape)}{heads}")
        if tensor.shape[:2] != batch_and_heads:
            raise ValueError(
                f"{name} must have the batch and heads of q, {list(batch_and_heads)}, got shape {list(tensor.shape)}"
                f"{_repeated(name, tensor, q)}"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on the device of q, {device}, got {tensor.device}; try {name}.to({str(device)!r})"
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have the dtype of q, {dtype}, got {tensor.dtype}; try {name}.to({dtype})")
    if q.shape[3] < 1:
        raise ValueError(f"q must have a depth of at least 1, got shape {list(q.shape)}")
    if k.shape[3] != q.shape[3]:
        way = "try k.transpose(2, 3)" if k.shape[2] == q.shape[3] else "only v may have another"
        raise ValueError(f"k must have the depth of q, {q.shape[3]}, got shape {list(k.shape)}; {way}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(
            f"v must have as many keys as k, {k.shape[2]}, got shape {list(v.shape)}; a key before the map, such as a "
            f"class token, needs a value, too"
        )
    for name, tensor in (("rows", rows), ("columns", columns)):
        if tensor.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} must have as many queries as q, {q.shape[2]}, got shape {list(tensor.shape)}; a query "
                f"without a place, such as a class token, has zeros"
            )
    height, width = rows.shape[3], columns.shape[3]
    if height * width > k.shape[2]:
        raise ValueError(
            f"k must have the {height} x {width} = {height * width} keys of the map that rows and columns are for, "
            f"and may have more before them, got {k.shape[2]} keys; rows and columns must be as long as the keys' map "
            f"is high and wide"
        )


def _repeated(name: str, tensor: Tensor, q: Tensor) -> str:
    """The way out for one that is shared by images or heads."""
    (batch, heads), (batches, all_heads) = tensor.shape[:2], q.shape[:2]
    if batch in (1, batches) and heads in (1, all_heads):
        return f"; try {name}.expand({batches}, {all_heads}, -1, -1)"
    if batch == batches and heads and all_heads % heads == 0:
        return f"; try {name}.repeat_interleave({all_heads // heads}, dim=1)"
    return ""
