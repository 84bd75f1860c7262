"""Maps halved and enlarged by kernels over channels_last memory, where nothing is compiled.

torch's average over a channels_last map takes five to ten times what its bytes take, autocast makes float32 of bilinear
interpolation, and its gradient is scattered by atomic additions. These compute in float32, give the dtype that they
got, and gather. All four are linear, each the gradient of another, so that gradients can be differentiated again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.torch_state import is_one_of_many, someone_looks_on
from ..attention.triton_backend import DTYPES, why_not_here
from ..attention.triton_launch import INTERPRETED, Launcher, device_of

ELEMENTS, MOST_CHANNELS, WARPS = 1024, 128, 4
"""Of a program: elements, channels of a pixel, and warps. A thread has eight elements, 16 bytes of half precision."""
LONGEST = 2**14
"""Pixels of a side: products of two sides are counted in int32."""

Size = tuple[int, int]


def can_resample(x: Tensor, size: Size | None = None) -> bool:
    """Whether the kernels take this map [batch, channels, height, width], to make one of another size of it."""
    if someone_looks_on(x) or not (x.is_cuda or INTERPRETED):
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and _takes(x.shape, x.dtype, x.device, size)


@functools.lru_cache(maxsize=1024)
def _takes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, size: Size | None) -> bool:
    sides = (*shape[2:], *(size or ()))
    if dtype not in DTYPES or not all(shape) or max(sides) > LONGEST or shape[0] * max(sides) ** 2 >= 2**31 - ELEMENTS:
        return False
    return why_not_here(torch.empty(0, dtype=dtype, device=device)) is None


def halve(x: Tensor) -> Tensor:
    """F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)."""
    return _Halve.apply(x) if torch.is_grad_enabled() and x.requires_grad else _halve(x)


def enlarge(x: Tensor, size: Size) -> Tensor:
    """F.interpolate(x, size, mode="bilinear")."""
    return _Enlarge.apply(x, size) if torch.is_grad_enabled() and x.requires_grad else _run("enlarge", x, size)


def enlarge_into(out: Tensor, x: Tensor) -> None:
    """enlarge without gradients, written to `out` [batch, channels, height, width], which may be channels of a wider
    channels_last map."""
    _run("enlarge", x, (out.shape[2], out.shape[3]), out)


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[2], x.shape[3]
        return _halve(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not _can_gather(grad):
            return _gradient_by_torch(_halve_by_torch, grad, ctx.size)
        if torch.is_grad_enabled():  # create_graph=True
            return _HalveBackward.apply(grad, ctx.size)
        return _run("halve_backward", grad, ctx.size)


class _HalveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, size: Size) -> Tensor:
        return _run("halve_backward", grad, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not _can_gather(grad):
            return _halve_by_torch(grad), None
        return halve(grad.contiguous(memory_format=torch.channels_last)), None


class _Enlarge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Size) -> Tensor:
        ctx.size = x.shape[2], x.shape[3]
        return _run("enlarge", x, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not _can_gather(grad):
            resize = functools.partial(_resize_by_torch, size=(grad.shape[2], grad.shape[3]))
            return _gradient_by_torch(resize, grad, ctx.size), None
        if torch.is_grad_enabled():
            return _EnlargeBackward.apply(grad, ctx.size), None
        return _run("enlarge_backward", grad, ctx.size), None


class _EnlargeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, size: Size) -> Tensor:
        ctx.size = grad.shape[2], grad.shape[3]
        return _run("enlarge_backward", grad, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not _can_gather(grad):
            return _resize_by_torch(grad, ctx.size), None
        return enlarge(grad.contiguous(memory_format=torch.channels_last), ctx.size), None


def _can_gather(grad: Tensor) -> bool:
    """Whether the kernels take a gradient; whatever its strides are, it is made fit."""
    return not someone_looks_on(grad) and not is_one_of_many(grad) and grad.dtype in DTYPES


def _gradient_by_torch(function: Callable[[Tensor], Tensor], grad: Tensor, size: Size) -> Tensor:
    """The gradient of a linear function of a map of that size, which can be differentiated again where one asks."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = torch.zeros((*grad.shape[:2], *size), dtype=grad.dtype, device=grad.device, requires_grad=True)
        return torch.autograd.grad(function(x), x, grad, create_graph=again)[0]


def _halve_by_torch(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)


def _resize_by_torch(x: Tensor, size: Size) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def _halve(x: Tensor) -> Tensor:
    return _run("halve", x, ((x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2))


def _run(name: str, x: Tensor, size: Size, out: Tensor | None = None) -> Tensor:
    """The kernel's result for a map x [batch, channels, height, width]: [batch, channels, *size] in its dtype."""
    if (stride := pixel_stride(x)) is None:
        x, stride = x.contiguous(memory_format=torch.channels_last), x.shape[1]
    out_stride = x.shape[1] if out is None else pixel_stride(out)
    assert out_stride is not None
    call = _call(name, x.shape, size, stride, out_stride, x.dtype, x.get_device())
    if out is None:
        out = x.new_empty_strided(call.shape, call.strides)
    with device_of(x):
        call.launcher((x, out), call.scalars)
    return out


def pixel_stride(x: Tensor) -> int | None:
    """How far apart the pixels of a map [batch, channels, height, width] are in memory, channels side by side; None if
    it is not the same from each to the next."""
    (batch, channels, height, width), (image, channel, row, column) = x.shape, x.stride()
    if width == 1:
        column = row if height > 1 else image if batch > 1 else channels
    regular = (height == 1 or row == width * column) and (batch == 1 or image == height * width * column)
    return column if regular and (channels == 1 or channel == 1) and column >= channels else None


class _Call(NamedTuple):
    """A kernel with its scalars, and the shape of its result, channels_last."""

    launcher: Launcher
    scalars: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _call(
    name: str, shape: tuple[int, ...], size: Size, stride: int, out_stride: int, dtype: torch.dtype, device: int
) -> _Call:
    """A kernel for one kind of map. `dtype` and `device`: it is compiled for them."""
    from . import kernels

    batch, channels, height, width = shape
    at_once = min(MOST_CHANNELS, 1 << (channels - 1).bit_length())
    rows, columns = (height, width) if name == "halve_backward" else size
    pixels, at_a_time = batch * rows * columns, ELEMENTS // at_once
    constants = {"CHANNELS": channels, "STRIDE": stride, "OUT_STRIDE": out_stride}
    constants |= {"PIXELS": at_a_time, "AT_ONCE": at_once, "num_warps": WARPS}
    scalars: tuple[int, ...] = (pixels, height, width, *size)
    if name == "enlarge_backward":  # of a map twice as large as the result four rows took something of each of its own
        scalars += (-(-2 * height // size[0]), -(-2 * width // size[1]))
    programs = -(-pixels // at_a_time) * -(-channels // at_once)
    strides = (size[0] * size[1] * channels, 1, size[1] * channels, channels)
    return _Call(Launcher(getattr(kernels, name), programs, constants), scalars, (batch, channels, *size), strides)
