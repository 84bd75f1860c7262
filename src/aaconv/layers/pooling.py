"""Feature maps made smaller by averages and larger by bilinear interpolation, with gradients that compile well."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.torch_state import is_captured, someone_looks_on, stream_of
from .resampling import can_resample, enlarge, enlarge_into, halve
from .tracing import compiles_gradient, is_exporting, is_known


def average(x: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """F.avg_pool2d of [batch, channels, height, width]; an odd window is centred, and its padding does not count."""
    if (window, stride) == ((3, 3), (2, 2)):
        if can_resample(x):
            return halve(x)
        if compiles_gradient(x):
            return Halve.apply(x)
    padding = [length // 2 if length % 2 else 0 for length in window]
    if any(padding) and torchs_gradient_may_be_wrong(x):
        ordered = x.clone(memory_format=torch.contiguous_format)
        pooled = F.avg_pool2d(ordered, window, stride, padding, count_include_pad=False)
        return pooled.contiguous(memory_format=torch.channels_last)
    return F.avg_pool2d(x, window, stride, padding, count_include_pad=False)


def torchs_gradient_may_be_wrong(x: Tensor) -> bool:
    """Whether the gradient of a padded average of this map may be: not compiled, torch 2.11 gives wrong ones, silently,
    for maps on a GPU that it takes for channels_last, whole ones or parts of such (its issue 188344). Compiled they are
    right, but not by compilers that run torch's own gradients (backend="aot_eager"); nothing is done about those."""
    channels_first = x.stride(1) > x.stride(3)
    return x.is_cuda and torch.is_grad_enabled() and not channels_first and not torch.compiler.is_compiling()


class Halve(torch.autograd.Function):
    """The average over 3 x 3 at every other pixel. It does not ask whether sides are even: where sizes change, every
    answer would be compiled anew.

    What torch's compiler makes of avg_pool2d's gradient takes 60 to 210 instructions an element on a GPU, most of them
    to find the windows that it was in; this takes 20 to 30, and is fused with what follows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sides = x.shape[2:]
        return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (batch, channels, height, width), (rows_in, columns_in) = grad.shape, ctx.sides
        grads = grad.permute(0, 2, 3, 1)  # channels last: so will be what the compiler has to store in between
        shares = grads * (_share(height, rows_in, grad)[:, None] * _share(width, columns_in, grad))[..., None]
        shares = F.pad(shares, (0, 0, 0, 1, 0, 1)).contiguous()  # of each pixel of a window; none beyond the last one
        # as_strided: the compiler stores what that is taken of, and finds the windows by their place. Computed where it
        # is needed, the sum is too long to be fused with what follows, and is stored instead, four times as large.
        image, row, column, _ = shares.stride()
        size, strides = (batch, height, 1, width, 1, channels), (image, row, row, column, column, 1)
        here, right, below, across = (
            shares.as_strided(size, strides, place) for place in (0, column, row, row + column)
        )
        # An even pixel was in one window, an odd one also in the next.
        odd = torch.arange(2, device=grad.device) == 1
        odd_row, odd_column = odd[:, None, None, None], odd[:, None]
        pixels = here + torch.where(odd_column, right, 0) + torch.where(odd_row, below, 0)
        pixels = pixels + torch.where(odd_row & odd_column, across, 0)
        pixels = pixels.reshape(batch, 2 * height, 2 * width, channels)
        return pixels[:, :rows_in, :columns_in].to(grad.dtype).permute(0, 3, 1, 2)


def _share(windows: int, length: int, like: Tensor) -> Tensor:
    """[windows]: one by the pixels of each that are within the map."""
    window = torch.arange(windows, device=like.device)
    outside = (window == 0).int() + (2 * window + 1 >= length).int()
    return (3 - outside).to(torch.promote_types(like.dtype, torch.float32)).reciprocal()


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """F.interpolate(x, size, mode="bilinear"): [batch, channels, h, w] -> [batch, channels, *size].

    Where a kernel of resampling.py does not take it and a gradient is wanted, it is two products instead. The gradient
    of torch's is scattered by atomic additions, which are slow, most of all compiled, and add up in another order every
    time. Not in a network that is exported or traced: there the products' shapes would bind a width that was declared
    free.
    """
    wants_gradient = torch.is_grad_enabled() and x.requires_grad
    # Without gradients the calls before a capture compiled the kernel for the output's strides (resize_into), not for
    # these, and a graph that is captured can compile nothing.
    if can_resample(x, size) and (wants_gradient or not is_captured(x)):
        return enlarge(x, size)
    if not wants_gradient or is_exporting() or torch.jit.is_tracing():
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    if compiles_gradient(x):
        return Enlarge.apply(x, size)
    batch, channels, height, width = x.shape
    rows = _weights(height, size[0], x) @ x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    result = _weights(width, size[1], x) @ rows.reshape(batch * size[0], width, channels)
    return result.reshape(batch, *size, channels).permute(0, 3, 1, 2)


class Enlarge(torch.autograd.Function):
    """Bilinear interpolation with a gradient that compiles well: twice as large, each element gathers what it gave, in
    float32 and one kernel; else it is two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
        ctx.sides = x.shape[2:]
        found = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        # Autocast makes float32 of it. Not cast where that does nothing: torch 2.11's compiler then has one tensor for
        # two, and gives the gradient to the other.
        return found if found.dtype == x.dtype else found.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (batch, channels, *size), (height, width) = grad.shape, ctx.sides
        grads = grad.permute(0, 2, 3, 1)
        if is_known(2 * height == size[0]) and is_known(2 * width == size[1]):
            found = _gather_doubled(_gather_doubled(grads.to(torch.promote_types(grad.dtype, torch.float32)), 1), 2)
            return found.to(grad.dtype).permute(0, 3, 1, 2), None
        rows = _weights(height, size[0], grad).mT @ grads.reshape(batch, size[0], size[1] * channels)
        found = _weights(width, size[1], grad).mT @ rows.reshape(batch * height, size[1], channels)
        return found.reshape(batch, height, width, channels).permute(0, 3, 1, 2), None


def _gather_doubled(grads: Tensor, dimension: int) -> Tensor:
    """What the elements of a line gave to one of twice their number: 3/4 to both of their own, 1/4 to those beside."""
    length = grads.shape[dimension]
    first = 2 * torch.arange(length // 2, device=grads.device)
    near = grads.index_select(dimension, first) + grads.index_select(dimension, first + 1)
    before, after = (first - 1).clamp(min=0), (first + 2).clamp(max=length - 1)  # an edge gives its own once more
    far = grads.index_select(dimension, before) + grads.index_select(dimension, after)
    return 0.75 * near + 0.25 * far


def resize_into(out: Tensor, x: Tensor) -> None:
    """out = resize(x, ...) without gradients, [batch, channels, height, width], channels of a channels_last map."""
    size = out.shape[2], out.shape[3]
    if can_resample(x, size):
        enlarge_into(out, x)
    else:
        out.copy_(resize(x, size))


def _weights(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: what each new place takes of the old ones. Kept where nobody traces: they take 20 operations."""
    if someone_looks_on(like) or is_captured(like):
        return _make_weights(old, new, like.dtype, like.device)
    with torch.inference_mode(False):  # else no gradient could be recorded with them
        return _kept_weights(old, new, like.dtype, like.device, stream_of(like))


def _make_weights(old: int, new: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    one_hot = torch.eye(old, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return F.interpolate(one_hot[None], size=new, mode="linear", align_corners=False)[0].mT.to(dtype)


@functools.lru_cache(maxsize=64)
def _kept_weights(old: int, new: int, dtype: torch.dtype, device: torch.device, stream: int | None) -> Tensor:
    return _make_weights(old, new, dtype, device)
