"""The fused backend of attend_decomposed: a torch operator around the decomposed kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import eager
from . import triton_decomposed as decomposed
from .torch_state import someone_looks_on
from .triton_backend import MAX_DEPTH, MAX_SIDE, why_not_here
from .triton_launch import device_of

DTYPES = (torch.bfloat16, torch.float16)


def why_not(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> str | None:
    """None if the kernels can take these arguments, else the reason."""
    if reason := why_not_here(q):
        return reason
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not one of bfloat16, float16"
    if (depth := max(q.shape[3], v.shape[3])) > MAX_DEPTH:
        return f"a head of {depth} channels is larger than {MAX_DEPTH}"
    if v.shape[3] < 1:
        return "values without channels"
    height, width = rows.shape[3], columns.shape[3]
    if min(height, width) < 1:
        return f"a map of {height} x {width} has no keys"
    if max(height, width) > MAX_SIDE:
        return f"a map of {height} x {width} is larger than {MAX_SIDE} x {MAX_SIDE}"
    if (leading := k.shape[2] - height * width) > decomposed.MOST_LEADING:
        return f"{leading} keys before the map are more than {decomposed.MOST_LEADING}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """[batch, heads, queries, depth] ... -> [batch, heads, queries, value depth]."""
    inputs = q, k, v, rows, columns
    if someone_looks_on(*inputs):
        return attend_forward(*inputs, scale)[0]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Attend.apply(*inputs, scale)
    return _forward(*inputs, scale)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _empty_forward(q, v)
    height, width = rows.shape[3], columns.shape[3]
    with device_of(q):
        parts = _aligned(q), _aligned(k), _aligned(v)
        into = out if decomposed.is_aligned(out) else decomposed.pad_depth(out)
        decomposed.forward(*parts, *_biases(q, rows, columns), height, width, scale, (into, lse))
        if into is not out:
            out.copy_(into[..., : out.shape[3]])
    return out, lse


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    height, width = rows.shape[3], columns.shape[3]
    with device_of(q):
        parts = _aligned(q), _aligned(k), _aligned(v)
        grads = _empty_contiguous(parts[0]), _empty_contiguous(parts[1]), _empty_contiguous(parts[2])
        biases = _biases(q, rows, columns)
        grad_rows, grad_columns = decomposed.backward(
            _aligned(grad_out), *parts, *biases, _aligned(out), lse, height, width, scale, grads
        )
    grad_q, grad_k, grad_v = (
        grad[..., : part.shape[3]].contiguous() for grad, part in zip(grads, (q, k, v), strict=True)
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_rows.view(rows.shape).to(rows.dtype),
        grad_columns.view(columns.shape).to(columns.dtype),
    )


def _biases(q: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """[batch * heads, queries, ...] as the kernels take them."""
    by_row, by_column = (bias.to(q.dtype).contiguous().flatten(0, 1) for bias in (rows, columns))
    return by_row, by_column


def _aligned(part: Tensor) -> Tensor:
    return part if decomposed.is_aligned(part) else decomposed.pad_depth(part)


def _empty_contiguous(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _empty_forward(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, of which the heads of a query lie side by side, and the log-sum-exp in two parts."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((batch * heads, 2, queries), dtype=torch.float32)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _empty_forward(q, v)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    return tuple(map(_empty_contiguous, (q, k, v, rows, columns)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, out, lse)


def _gradients(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        return _differentiable_gradients(ctx, grad_out)
    return *attend_backward(grad_out, *ctx.saved_tensors, ctx.scale), None


def _differentiable_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, through the reference: the kernels have no second derivative."""
    inputs = q, k, v, rows, columns = ctx.saved_tensors[:5]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    out = eager.attend_decomposed(q, k, v, rows, columns, ctx.scale)
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return *(next(grads) if tensor.requires_grad else None for tensor in inputs), None


class _Attend(torch.autograd.Function):
    """The operator without what torch wraps around one: the same kernels, and the same gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable_gradients(ctx, grad_out)
        saved_and_scale = (*ctx.saved_tensors, ctx.scale)
        return *_backward(grad_out, *saved_and_scale), None


_library = torch.library.Library("aaconv", "FRAGMENT")
_library.define(
    "attend_decomposed(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attend_decomposed_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, "
    "Tensor out, Tensor lse, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attend_decomposed", _forward, "CompositeExplicitAutograd")
_library.impl("attend_decomposed_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("aaconv::attend_decomposed", _fake_forward, lib=_library)
torch.library.register_fake("aaconv::attend_decomposed_backward", _fake_backward, lib=_library)
torch.library.register_autograd("aaconv::attend_decomposed", _gradients, setup_context=_save, lib=_library)
attend_forward = torch.ops.aaconv.attend_decomposed.default
attend_backward = torch.ops.aaconv.attend_decomposed_backward.default


@register_flop_formula(torch.ops.aaconv.attend_decomposed)
def _forward_flops(
    q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Multiplications and additions of q k^T and p v."""
    batch, heads, queries, depth = q_shape
    return 2 * batch * heads * queries * k_shape[2] * (depth + v_shape[3])


@register_flop_formula(torch.ops.aaconv.attend_decomposed_backward)
def _backward_flops(
    grad: Sequence[int],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """Two products for each of the forward's, without the recomputed logits."""
    return 2 * _forward_flops(q_shape, k_shape, v_shape)
