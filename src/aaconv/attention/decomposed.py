"""attend_decomposed: attention with a bias of two parts, one for the row and one for the column of a key."""

from collections.abc import Callable
from typing import NamedTuple

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


def check_floating(name: str, tensor: Tensor) -> None:
    """A ValueError for what is not a tensor of real numbers with a point."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating-point, got {tensor.dtype}; try {name}.float()")


def check(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> None:
    """A ValueError that names what does not fit."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("rows", rows), ("columns", columns)):
        check_floating(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, number, depth], got shape {list(tensor.shape)}")
        if tensor.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have the batch and heads of q, {list(q.shape[:2])}, got shape {list(tensor.shape)}"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"{name} must be on the device of q, {q.device}, got {tensor.device}; try {name}.to({str(q.device)!r})"
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}; try {name}.to({q.dtype})"
            )
    if q.shape[3] < 1:
        raise ValueError(f"q must have a depth of at least 1, got shape {list(q.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the depth of q, {q.shape[3]}, got shape {list(k.shape)}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v must have as many keys as k, {k.shape[2]}, got shape {list(v.shape)}")
    for name, tensor in (("rows", rows), ("columns", columns)):
        if tensor.shape[2] != q.shape[2]:
            raise ValueError(f"{name} must have as many queries as q, {q.shape[2]}, got shape {list(tensor.shape)}")
    height, width = rows.shape[3], columns.shape[3]
    if height * width > k.shape[2]:
        raise ValueError(
            f"k must have the {height} x {width} = {height * width} keys of the map that rows and columns are for, "
            f"and may have more before them, got {k.shape[2]} keys"
        )
