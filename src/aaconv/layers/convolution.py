"""The convolution beside the attention: with fewer output channels than it was made with, or computed with more."""

import copy
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..attention.torch_state import is_captured, stream_of
from .tracing import compiles_gradient

Conv = TypeVar("Conv", bound=nn.Conv1d | nn.Conv2d)

ALIGNED = 32
"""Channels that a GPU's convolutions like to come in multiples of."""
TILE = 128
"""Channels that they compute together, where there are many: a few more in the last tile take no longer."""


def check_made(conv: nn.Conv1d | nn.Conv2d) -> None:
    """A ValueError where the weights of the convolution are not there yet."""
    if is_lazy(conv.weight):
        raise ValueError("the convolution is lazy: its weights are not made yet; run a forward first")


def check_own_weights(conv: nn.Conv1d | nn.Conv2d) -> None:
    """A ValueError where the weights of the convolution are not its own."""
    own = dict(conv.named_parameters(recurse=False))
    for name in ("weight", "bias"):
        if name not in own and getattr(conv, name) is not None:
            raise ValueError(
                f"the convolution computes its {name} from other parameters (parametrized, normalised or pruned), "
                f"which cannot be cut to fewer channels; make that permanent first, as "
                f"torch.nn.utils.parametrize.remove_parametrizations does, or pass combine='add', which cuts nothing"
            )


def first_channels(conv: Conv, channels: int) -> Conv:
    """A copy of the convolution with its first output channels only, the first of every group where it has groups."""
    kept = torch.arange(conv.out_channels, device=conv.weight.device).view(conv.groups, -1)
    kept = kept[:, : channels // conv.groups].flatten()
    shortened = copy.deepcopy(conv)
    with torch.no_grad():
        for name, parameter in list(shortened.named_parameters(recurse=False)):
            if parameter.shape[:1] == (conv.out_channels,):
                setattr(shortened, name, nn.Parameter(parameter[kept], requires_grad=parameter.requires_grad))
        for name, buffer in list(shortened.named_buffers(recurse=False)):
            if buffer.shape[:1] == (conv.out_channels,):
                setattr(shortened, name, buffer[kept])
    shortened.out_channels = channels
    return shortened


def likes_more_channels(conv: nn.Module, channels: int) -> TypeGuard[nn.Conv2d]:
    """Whether GPUs would do so many output channels as fast as those that it has, or faster."""
    return (
        type(conv) is nn.Conv2d  # not one that makes its weights, such as a parametrized or quantized one
        and not must_be_called(conv)
        and conv.groups == 1
        and channels % ALIGNED == 0
        and (conv.out_channels % ALIGNED != 0 or _few_more_in_a_tile(conv.out_channels, channels))
    )


def must_be_called(module: nn.Module) -> bool:
    """Whether somebody watches the module, or has put another in the place of its forward, so that what it does must
    not be done without it."""
    return "forward" in module.__dict__ or has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the module's own forward or backward.

    torch has no public way to ask: hooks are kept in `_forward_hooks`, `_forward_pre_hooks`, `_backward_hooks` and
    `_backward_pre_hooks`.
    """
    own = module.__dict__
    return any((own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]))


def _few_more_in_a_tile(there: int, wanted: int) -> bool:
    return 8 * (wanted - there) <= wanted and (there - 1) // TILE == (wanted - 1) // TILE


def convolve_around(conv: nn.Conv2d, x: Tensor, attended: Tensor) -> Tensor:
    """cat([conv(x), attended], 1) without its copy: the convolution has all channels, with weights of zero where
    `attended` is then written."""
    slots = attended.shape[1]
    weight = F.pad(conv.weight, (0, 0) * (conv.weight.dim() - 1) + (0, slots))
    bias = None if conv.bias is None else F.pad(conv.bias, (0, slots))
    padding: str | int | tuple[int, ...] = conv.padding
    if conv.padding_mode != "zeros":
        x, padding = F.pad(x, _sides(conv), mode=conv.padding_mode), 0
    result = F.conv2d(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups)
    if compiles_gradient(result, attended):
        return Fill.apply(result, attended.to(result.dtype).expand(len(result), slots, *result.shape[2:]))
    result.narrow(1, conv.out_channels, slots).copy_(attended)
    return result


class Fill(torch.autograd.Function):
    """Writes `attended` over the last channels of what was convolved with weights of zero there.

    In compiled training a copy into channels is a pass over all of them, and so is its gradient, which is zero there.
    Taken as_strided they are written in place; and the gradient of these channels may go into the convolution's as it
    is: it meets weights of zero, and what it would make of these is cut off with them. Without gradients the compiler
    fuses the copy with what follows, and one kernel more would lose.
    """

    @staticmethod
    def forward(ctx: Any, convolved: Tensor, attended: Tensor) -> Tensor:
        ctx.first, strides = convolved.shape[1] - attended.shape[1], convolved.stride()
        if not convolved.is_contiguous(memory_format=torch.channels_last):
            # The compiler may lay out the convolution anew, as channels_last, and would still write by these strides.
            return torch.slice_scatter(convolved, attended, 1, ctx.first)
        # detach: of what wants a gradient, torch takes contiguous memory alone.
        return torch.as_strided_scatter(convolved.detach(), attended, attended.shape, strides, ctx.first * strides[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[:, ctx.first :]


def convolve_without_gradient(conv: nn.Conv2d, x: Tensor, attended: Tensor) -> Tensor:
    """convolve_around where nothing is recorded: the weights with zeros after them are kept, and filled by one copy,
    which casts them for autocast, too. What is kept stays where it is until the convolution is called on another device
    or stream, or is deleted."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    slots, channels = attended.shape[1], conv.out_channels
    key = (slots, dtype, conv.weight.device, stream_of(conv.weight), tuple(conv.weight.shape))
    known = _widened.setdefault(conv, {})
    if key not in known:
        with torch.inference_mode(False):  # else only that mode could fill them again
            bias = None if conv.bias is None else torch.zeros(channels + slots, dtype=dtype, device=conv.weight.device)
            known.clear()
            known[key] = make_widened(conv.weight, slots, dtype), bias
    weight, bias = known[key]
    weight[:channels].copy_(conv.weight)
    if bias is not None and conv.bias is not None:
        bias[:channels].copy_(conv.bias)
    result = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation)
    result.narrow(1, channels, slots).copy_(attended)
    return result


def make_widened(weight: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Zeros for so many more output channels than the weight of a convolution has, channels_last."""
    shape = (weight.shape[0] + slots, *weight.shape[1:])
    return torch.zeros(shape, dtype=dtype, device=weight.device).to(memory_format=torch.channels_last)


_widened: WeakKeyDictionary[nn.Module, dict[tuple, tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()


def can_reuse_weights(conv: nn.Conv2d, x: Tensor, attended: Tensor) -> bool:
    """Whether convolve_without_gradient may be called. Not inside a CUDA graph: what it keeps would be the graph's. Nor
    where it would cast what torch refuses: without autocast dtypes must agree."""
    weights = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
    return (
        conv.padding_mode == "zeros"
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, attended, *weights)))
        and not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not is_captured(x)
        and (torch.is_autocast_enabled(x.device.type) or all(weight.dtype == x.dtype for weight in weights))
    )


def _sides(conv: nn.Conv2d) -> list[int]:
    """The pixels that it adds left, right, above and below, as F.pad takes them."""
    if conv.padding == "valid":
        return [0, 0, 0, 0]
    if conv.padding == "same":
        totals = [dilation * (kernel - 1) for kernel, dilation in zip(conv.kernel_size, conv.dilation, strict=True)]
    else:
        assert not isinstance(conv.padding, str)
        totals = [2 * padding for padding in conv.padding]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
