"""The attention branch as one function, where nothing is compiled: both projections, and the attention between them.

For autograd it is one node instead of seven. The projections are matrix products over channels_last memory, which take
the host half as long to start as convolutions; nothing is copied, and weights get their gradients in their own dtype.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention import choose_in_advance, eager, triton_backend
from ..attention.torch_state import modules_are_watched, someone_looks_on
from .pointwise import is_plain

HALF = (torch.bfloat16, torch.float16)
_PRODUCTS_CAST = hasattr(torch.ops.aten.mm, "dtype")


def attend_at_once(
    x: Tensor,
    qkv: nn.Module,
    project: nn.Module,
    fit_tables: Callable[[], tuple[Tensor | None, Tensor | None]],
    num_heads: int,
    key_channels: int,
    backend: str | None,
) -> Tensor | None:
    """project(attend_2d(qkv(x))) of x [batch, channels, height, width], or None where it must be done part by part."""
    if torch.compiler.is_compiling() or not on_gpu(x) or not x.shape[0] or modules_are_watched():
        return None
    if not is_plain(qkv) or not is_plain(project):
        return None
    weights = qkv.weight, qkv.bias, project.weight, project.bias
    if someone_looks_on(x, *weights) or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    tensors = x, *weights, *fit_tables()
    if someone_looks_on(*tensors[-2:]):
        return None
    *_, rel_h, rel_w = tensors
    dtype = working_dtype(x, qkv.weight, project.weight)
    if dtype not in HALF:  # float32 convolutions and products differ in what they round
        return None
    shape = x.shape[0], x.shape[2], x.shape[3], qkv.out_channels
    if choose_in_advance(x, shape, dtype, rel_h, rel_w, num_heads, key_channels, backend) != "triton":
        return None
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _AtOnce.apply(*tensors, dtype, num_heads, key_channels)
    return _forward(*tensors, dtype, num_heads, key_channels)[0]


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def working_dtype(x: Tensor, *weights: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes in, if it is on, else the one that they all have; None if there is none."""
    device, dtypes = x.device.type, {x.dtype, *(weight.dtype for weight in weights)}
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) if dtypes <= {torch.float32, *HALF} else None
    return x.dtype if len(dtypes) == 1 else None


def _forward(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    dtype: torch.dtype,
    num_heads: int,
    key_channels: int,
) -> tuple[Tensor, ...]:
    """The output [batch, channels, height, width], and what a backward needs beside the tables."""
    batch, _, height, width = x.shape
    pixels = _by_pixel(x if x.dtype == dtype else x.to(dtype))
    matrices = _matrix(qkv_weight, dtype), _matrix(weight, dtype)
    qkv = _linear(pixels, matrices[0], qkv_bias).view(batch, height * width, -1)
    out, lse = triton_backend.forward(qkv, rel_h, rel_w, height, num_heads, key_channels)
    attended = _linear(out.view(pixels.shape[0], -1), matrices[1], bias)
    return attended.view(batch, height, width, -1).permute(0, 3, 1, 2), pixels, *matrices, qkv, out, lse


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.dtype, ctx.num_heads, ctx.key_channels = inputs
        result, *saved = _forward(*inputs)
        ctx.save_for_backward(*tensors, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted, tensors = ctx.needs_input_grad, ctx.saved_tensors  # once: checkpointing gives them no second time
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable_gradients(ctx, tensors[:7], grad)
        x, qkv_weight, qkv_bias, weight, bias, rel_h, rel_w, pixels, qkv_matrix, matrix, qkv, out, lse = tensors
        grad = _by_pixel(grad)  # channels of a larger map, mostly: a product takes them as they are
        grads: list[Tensor | None] = [None] * len(wanted)
        if wanted[3]:
            grads[3] = _weight_gradient(grad, out.view(len(grad), -1), weight)
        if wanted[4] and bias is not None:
            grads[4] = grad.sum(0, dtype=bias.dtype)
        grad_out = torch.mm(grad, matrix).view_as(out)
        sizes = x.shape[2], ctx.num_heads, ctx.key_channels
        grads_of_attention = triton_backend.gradients(grad_out, qkv, rel_h, rel_w, out, lse, *sizes)
        grads[5:7] = grads_of_attention[1:3]
        grad_qkv = cast(Tensor, grads_of_attention[0]).view(len(grad), -1)
        if wanted[0]:
            grad_x = torch.mm(grad_qkv, qkv_matrix).view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
            grads[0] = grad_x if grad_x.dtype == x.dtype else grad_x.to(x.dtype)
        if wanted[1]:
            grads[1] = _weight_gradient(grad_qkv, pixels, qkv_weight)
        if wanted[2] and qkv_bias is not None:
            grads[2] = grad_qkv.sum(0, dtype=qkv_bias.dtype)
        return tuple(grads)


def _differentiable_gradients(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, through the reference: the kernels have no second derivative."""
    x, qkv_weight, qkv_bias, weight, bias, rel_h, rel_w = tensors
    pixels, sizes = _by_pixel(x.to(ctx.dtype)), {"num_heads": ctx.num_heads, "key_channels": ctx.key_channels}
    qkv = _linear(pixels, _matrix(qkv_weight, ctx.dtype), qkv_bias).view(len(x), *x.shape[2:], -1)
    out = eager.attend(qkv, rel_h, rel_w, **sizes).flatten(0, 2)
    result = _linear(out, _matrix(weight, ctx.dtype), bias).view(*qkv.shape[:3], -1).permute(0, 3, 1, 2)
    wanted = [place for place, tensor in enumerate(tensors) if tensor is not None and ctx.needs_input_grad[place]]
    found = torch.autograd.grad(result, [tensors[place] for place in wanted], grad, create_graph=True)
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for place, one in zip(wanted, found, strict=True):
        grads[place] = one
    return tuple(grads)


def _by_pixel(x: Tensor) -> Tensor:
    """[batch, channels, height, width] -> [pixels, channels], a view where the channels come last in memory."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, in] of a 1x1 convolution."""
    return (weight if weight.dtype == dtype else weight.to(dtype)).flatten(1)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.t())


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """grad^T x for a weight [out, in, 1, 1]: in its dtype at once where products can."""
    if _PRODUCTS_CAST and grad.is_cuda and weight.dtype == torch.float32:
        return torch.mm(grad.t(), x, out_dtype=torch.float32).view(weight.shape)
    return torch.mm(grad.t(), x).to(weight.dtype).view(weight.shape)
