"""The fused backend: torch operators around the kernels of triton_kernels.py.

No quadratic tensor, no copies: the packed projection is read by its strides, the gradient written packed. Saved for
the backward: the inputs, the output and the log-sum-exp. No atomics, so every result is the same bits every time.
Products of bfloat16 and float16 accumulate in float32; those of float32 run in full float32 if
torch.get_float32_matmul_precision() is "highest" (torch's default), else in TF32.
"""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import eager, triton_wide, triton_window
from .torch_state import constant_to_compilers, is_transformed, someone_looks_on
from .triton_launch import H200, INTERPRETED, device_of, gpu_at
from .triton_plan import GROUP, Plan, ceil_div, is_wide, key_parts, padded, plan_for, power_below, sum_names
from .triton_window import WindowPlan, plan_windows
from .windows import Window

HAS_TRITON = importlib.util.find_spec("triton") is not None
MAX_DEPTH = 128
MAX_SIDE = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> str | None:
    """None if the kernels can take these arguments, else the reason."""
    if reason := why_not_here(qkv):
        return reason
    if qkv.dtype not in DTYPES:
        return f"dtype {qkv.dtype} is not one of bfloat16, float16, float32"
    key_depth, value_depth = key_channels // num_heads, qkv.shape[3] // num_heads - 2 * key_channels // num_heads
    if window is not None:
        return triton_window.why_not(qkv.shape, key_depth, value_depth, window)
    depth = max(key_depth, value_depth)
    if depth > MAX_DEPTH:
        return f"a head of {depth} channels is larger than {MAX_DEPTH}"
    if max(qkv.shape[1], qkv.shape[2]) > MAX_SIDE:
        return f"a map of {qkv.shape[1]} x {qkv.shape[2]} is larger than {MAX_SIDE} x {MAX_SIDE}"
    if is_wide(key_depth, value_depth, qkv.dtype, rel_h is not None):
        return None
    shared = _abilities(qkv.device.index or 0)[2] if qkv.device.type == "cuda" else H200.shared_memory
    # What `pack` holds: the factors of the tails and those of the columns, padded to powers of two.
    row = padded(key_depth) * qkv.dtype.itemsize
    tails = ceil_div(qkv.shape[1], GROUP) * key_parts(key_depth)[2]
    if tails > power_below(0.6 * shared / row) or ceil_div(qkv.shape[2], 8) * 8 > power_below(0.3 * shared / row):
        return f"a map of {qkv.shape[1]} x {qkv.shape[2]} with heads of {depth} channels needs too much shared memory"
    return None


def why_not_here(tensor: Tensor) -> str | None:
    """The reason why no kernel can run where this tensor is, if there is one."""
    if not HAS_TRITON:
        return "triton is not installed"
    # Before the sizes: torch.export would take a question about a symbolic size for a bound on it.
    if tensor.device.type != "cuda" and not INTERPRETED:
        return f"device {tensor.device.type} is not cuda (TRITON_INTERPRET=1 interprets the kernels on the cpu)"
    if is_transformed():
        return "transforms of torch.func and forward-mode derivatives do not go through the kernels"
    if torch.version.hip:
        return "the kernels are for NVIDIA GPUs"
    if tensor.device.type != "cuda" and tensor.dtype == torch.bfloat16:
        return "triton's interpreter has no products of bfloat16"
    if tensor.device.type == "cuda":
        major, minor, _ = _abilities(tensor.device.index or 0)
        if major < 8:
            return f"compute capability {major}.{minor} is below 8.0"
    return None


def attend(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    height, width = qkv.shape[1:3]
    sizes = height, num_heads, key_channels, () if window is None else window.numbers
    if someone_looks_on(qkv, rel_h, rel_w):
        # Three dimensions: torch's compiler takes a fourth for an image's and lays it out channels_last, with a copy.
        out, _ = torch.ops.aaconv.attend_2d.default(qkv.flatten(1, 2), rel_h, rel_w, *sizes)
        return out.unflatten(1, (height, width))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv, rel_h, rel_w)):
        return _Attend.apply(qkv, rel_h, rel_w, *sizes)
    return forward(qkv, rel_h, rel_w, *sizes)[0]


def forward(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """qkv [batch, pixels, 2*dk + dv], or its pixels as height and width, rel_h ([heads,] 2*height - 1, dk / heads) and
    rel_w alike, of any dtype -> the output [batch, pixels, dv], or with height and width, and the log-sum-exp
    [batch * heads, 2, pixels] in two parts."""
    plan, qkv, (rel_h, rel_w) = _prepare(qkv, rel_h, rel_w, height, num_heads, key_channels, window)
    out = qkv.new_empty((*qkv.shape[:-1], plan.value_channels))
    lse = qkv.new_empty((plan.image_heads, 2, plan.pixels), dtype=torch.float32)
    with device_of(qkv):
        if plan.is_wide:
            sizes = height, num_heads, key_channels
            triton_wide.forward(_with_pixels(qkv), rel_h, rel_w, *sizes, _with_pixels(out), lse)
        else:
            plan.program(qkv, {"qkv": qkv, "rel_h": rel_h, "rel_w": rel_w, "out": out, "lse": lse})
    return out, lse


def backward(
    grad_out: Tensor,
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    out: Tensor,
    lse: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv, packed, and of the tables, one after the other (empty if there are none)."""
    plan, read, tables = _prepare(qkv, rel_h, rel_w, height, num_heads, key_channels, window, backward=True)
    grad_out = grad_out.contiguous()
    grad_qkv, grad_tables = _empty_backward(qkv, rel_h, rel_w)
    if plan.is_wide:
        sizes = height, num_heads, key_channels
        grad_out, read, out, into = map(_with_pixels, (grad_out, read, out, grad_qkv))
        with device_of(qkv):
            triton_wide.backward(grad_out, read, *tables, out, lse, *sizes, into, grad_tables)
        return grad_qkv, grad_tables
    with device_of(qkv):
        tensors = {"qkv": read, "rel_h": tables[0], "rel_w": tables[1], "out": out, "lse": lse}
        tensors |= {"grad_out": grad_out, "grad_qkv": grad_qkv, sum_names(plan.sums)[-1]: grad_tables}
        plan.program(read, tensors)
    return grad_qkv, grad_tables


def _prepare(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
    *,
    backward: bool = False,
) -> tuple[Plan | WindowPlan, Tensor, tuple[Tensor, Tensor]]:
    """The plan, and the tensors as the kernels take them; without tables any tensor stands for them."""
    (batch, *sides, channels), strides = qkv.shape, qkv.stride()
    apart, beside = strides[-2:]
    # Pixels the same distance apart, channels side by side; inside an image the kernels count in int32.
    in_order = len(sides) == 1 or strides[1] == sides[1] * apart
    pixels = math.prod(sides)
    if window:  # whose kernels count images, too, by their pixels
        in_order = in_order and (batch == 1 or strides[0] == pixels * apart)
    if beside != 1 or not in_order or pixels * apart + channels >= 2**31:
        qkv = qkv.contiguous()
        strides, apart = qkv.stride(), channels
    full = qkv.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if rel_h is None or rel_w is None:
        tables, dimensions = (qkv, qkv), 0
    else:
        rel_w = rel_w if rel_w.dtype == rel_h.dtype else rel_w.to(rel_h.dtype)
        tables, dimensions = (rel_h.contiguous(), rel_w.contiguous()), rel_h.dim()
    kind = ((batch, pixels, channels), (strides[0], apart, 1), qkv.dtype, dimensions, tables[0].dtype)
    device = qkv.get_device() if qkv.is_cuda else None
    sizes = height, num_heads, key_channels, full, backward, device
    plan = plan_windows(*kind, *sizes, tuple(window)) if window else plan_for(*kind, *sizes)
    return plan, qkv, tables


def _with_pixels(image: Tensor) -> Tensor:
    """[batch, pixels, channels] of a map with or without height and width."""
    return image if image.dim() == 3 else image.flatten(1, 2)


def _empty_forward(qkv: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor]:
    batch, *pixels, channels = qkv.shape
    out = qkv.new_empty((batch, *pixels, channels - 2 * key_channels))
    return out, qkv.new_empty((batch * num_heads, 2, math.prod(pixels)), dtype=torch.float32)


def _empty_backward(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None) -> tuple[Tensor, Tensor]:
    if rel_h is None or rel_w is None:
        return qkv.new_empty(qkv.shape), qkv.new_empty(0, dtype=torch.float32)
    *heads, length, depth = rel_h.shape
    shape = (*heads, length + rel_w.shape[-2], depth)
    return qkv.new_empty(qkv.shape), rel_h.new_empty(shape, dtype=torch.float32)  # a sum of many: rounded afterwards


def _fake_forward(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    return _empty_forward(qkv, num_heads, key_channels)


def _fake_backward(
    grad_out: Tensor,
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    out: Tensor,
    lse: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    return _empty_backward(qkv, rel_h, rel_w)


def _differentiable_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, through the reference: the kernels have no second derivative."""
    (qkv, rel_h, rel_w, *_), (height, num_heads, key_channels, window) = ctx.saved_tensors, ctx.sizes
    inputs = (qkv, rel_h, rel_w)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    sizes = {"num_heads": num_heads, "key_channels": key_channels, "window": Window.of_numbers(window)}
    out = eager.attend(_with_pixels(qkv).unflatten(1, (height, -1)), rel_h, rel_w, **sizes).view_as(grad_out)
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    of_inputs = (next(grads) if any(tensor is one for one in wanted) else None for tensor in inputs)
    return *of_inputs, *[None] * len(ctx.sizes)


def gradients(
    grad_out: Tensor, qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, out: Tensor, lse: Tensor, *sizes: Any
) -> tuple[Tensor | None, ...]:
    """Those of all arguments of `forward`, by the kernels."""
    return _of_inputs(rel_h, rel_w, *backward(grad_out, qkv, rel_h, rel_w, out, lse, *sizes))


def _of_inputs(
    rel_h: Tensor | None, rel_w: Tensor | None, grad_qkv: Tensor, grad_tables: Tensor
) -> tuple[Tensor | None, ...]:
    """What a backward returns for the inputs of the forward."""
    if rel_h is None or rel_w is None:
        return grad_qkv, None, None, None, None, None, None
    rows = rel_h.shape[-2]
    grad_h, grad_w = grad_tables.narrow(-2, 0, rows), grad_tables.narrow(-2, rows, rel_w.shape[-2])
    if not rel_h.dtype == rel_w.dtype == grad_tables.dtype:
        grad_h, grad_w = grad_h.to(rel_h.dtype), grad_w.to(rel_w.dtype)
    return grad_qkv, grad_h, grad_w, None, None, None, None


class _Attend(torch.autograd.Function):
    """The operator without what torch wraps around one: the same kernels, and the same gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        qkv, rel_h, rel_w, *ctx.sizes = inputs
        out, lse = forward(*inputs)
        ctx.save_for_backward(qkv, rel_h, rel_w, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable_gradients(ctx, grad_out)
        return gradients(grad_out, *ctx.saved_tensors, *ctx.sizes)


class _Dispatched(torch.autograd.Function):
    """The same through operators, for those who look on."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        qkv, rel_h, rel_w, *ctx.sizes = inputs
        out, lse = attend_forward(*inputs)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(qkv, rel_h, rel_w, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return _differentiable_gradients(ctx, grad_out)
        qkv, rel_h, rel_w, out, lse = ctx.saved_tensors
        return _of_inputs(rel_h, rel_w, *attend_backward(grad_out, qkv, rel_h, rel_w, out, lse, *ctx.sizes))


def _with_gradients(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),  # left out by the dispatcher where it is empty
) -> tuple[Tensor, Tensor]:
    inputs = qkv, rel_h, rel_w, height, num_heads, key_channels, window
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs[:3]):
        return _Dispatched.apply(*inputs)
    return attend_forward(*inputs)


# Not torch.library.custom_op: what that wraps around a call takes longer than the call. And not register_autograd: the
# operator with gradients is one, attend_2d, and the one that compiled graphs call another, so that no call of theirs
# goes through Python twice.
_library = torch.library.Library("aaconv", "FRAGMENT")
_inputs = "Tensor qkv, Tensor? rel_h, Tensor? rel_w, "
_sizes = "SymInt height, int num_heads, int key_channels, int[] window=[]) -> (Tensor, Tensor)"
for _schema, _kernels, _fake in (
    (f"attend_2d({_inputs}{_sizes}", forward, _fake_forward),
    (f"attend_2d_forward({_inputs}{_sizes}", forward, _fake_forward),
    (f"attend_2d_backward(Tensor grad_out, {_inputs}Tensor out, Tensor lse, {_sizes}", backward, _fake_backward),
):
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _kernels, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aaconv::{_name}", _fake, lib=_library)
_library.impl("attend_2d", _with_gradients, "Autograd")
attend_forward = torch.ops.aaconv.attend_2d_forward.default
attend_backward = torch.ops.aaconv.attend_2d_backward.default


@register_flop_formula([torch.ops.aaconv.attend_2d, torch.ops.aaconv.attend_2d_forward])
def _forward_flops(
    qkv_shape: Sequence[int],
    rel_h_shape: Sequence[int] | None,
    rel_w_shape: Sequence[int] | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
    **kwargs: Any,
) -> int:
    """Multiplications and additions of q k^T, p v and the relative logits of every row and column that is seen."""
    batch, pixels, channels = qkv_shape
    seen = Window.of_numbers(window)
    rows, columns = (height, pixels // height) if seen is None else seen.keys(height, pixels // height)
    relative = 0 if rel_h_shape is None else key_channels * (rows + columns)
    return 2 * batch * pixels * (rows * columns * (channels - key_channels) + relative)


@register_flop_formula(torch.ops.aaconv.attend_2d_backward)
def _backward_flops(
    grad: Sequence[int],
    qkv_shape: Sequence[int],
    rel_h_shape: Sequence[int] | None,
    rel_w_shape: Sequence[int] | None,
    out: Sequence[int],
    lse: Sequence[int],
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int] = (),
    **kwargs: Any,
) -> int:
    """Two products for each of the forward's, without the recomputed logits."""
    return 2 * _forward_flops(qkv_shape, rel_h_shape, rel_w_shape, height, num_heads, key_channels, window)


@constant_to_compilers
def _abilities(index: int) -> tuple[int, int, int]:
    """Compute capability, and the bytes of shared memory that a program may have."""
    return gpu_at(index)[:3]
