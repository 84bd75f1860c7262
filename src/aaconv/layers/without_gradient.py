"""A whole layer where no gradient is wanted and nothing is compiled, with as little of the host's time as can be.

The convolution makes all channels of the output, and the last step of the attention writes its own into it: nothing is
concatenated or copied. One kernel casts all weights, but for a convolution's that is channels-first (kept_weights).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import choose_in_advance, triton_backend
from ..attention.torch_state import is_captured, modules_are_watched, someone_looks_on
from . import at_once
from .branch import AttentionBranch
from .convolution import likes_more_channels
from .kept_weights import KeptWeights, drop_kept_weights, kept_weights
from .pointwise import is_plain
from .pooling import resize_into

CHANNELS_LAST = torch.channels_last


def concatenate_without_gradient(layer: AttentionBranch, out_channels: int, x: Tensor) -> Tensor | None:
    """cat([conv(x), attention(x)], 1) of x [batch, channels, height, width]: [batch, out_channels, height', width'], or
    None where it must be done part by part."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or modules_are_watched():
        return None
    if not at_once.on_gpu(x):
        drop_kept_weights(layer)  # it may have come from a GPU
        return None
    modules, own = layer._modules, layer._parameters  # each as an attribute takes as long as an operation's checks
    conv, qkv, project = modules.get("conv"), modules.get("qkv"), modules.get("project")
    if conv is None or qkv is None or project is None or not is_plain(qkv) or not is_plain(project):
        return None
    if not likes_more_channels(conv, out_channels) or conv.padding_mode != "zeros":
        return None
    if layer.window is not None or own.get("temperature", x) is not None or own.get("gate", x) is not None:
        return None
    weights = conv.weight, qkv.weight, project.weight
    size = layer.geometry.attention_size(x.shape[2], x.shape[3])
    tables = layer.fitted_tables(*size)
    if any(weight.get_device() != x.get_device() for weight in weights):
        return None  # torch says it best
    if someone_looks_on(x, *weights, conv.bias, qkv.bias, project.bias, *tables) or not _is_in_order(x):
        return None
    dtype = at_once.working_dtype(x, *weights)
    if dtype not in at_once.HALF or not _takes_bias(conv, x):
        return None
    shape = x.shape[0], *size, qkv.out_channels
    if choose_in_advance(x, shape, dtype, *tables, layer.num_heads, layer.key_channels, layer.backend) != "triton":
        return None
    kept = kept_weights(layer, weights, project.out_channels, dtype)
    if kept is None:
        return None
    out = _convolve(conv, kept, x)
    if out.shape[2:] != layer.geometry.output_size(x.shape[2], x.shape[3]):
        return None  # somebody has changed the convolution: the parts say what does not fit
    _attend_into(out, layer, kept, x, tables, (qkv.bias, project.bias))
    return out


def _is_in_order(x: Tensor) -> bool:
    """Whether all that is done is kernels over channels_last memory. Not inside a CUDA graph: what is kept would be the
    graph's."""
    return bool(x.shape[0]) and x.is_contiguous(memory_format=CHANNELS_LAST) and not is_captured(x)


def _takes_bias(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether torch's convolution takes the bias as it is: not of another dtype, unless autocast casts it."""
    return conv.bias is None or conv.bias.dtype == conv.weight.dtype or torch.is_autocast_enabled(x.device.type)


def _convolve(conv: nn.Conv2d, kept: KeptWeights, x: Tensor) -> Tensor:
    """The convolution with channels of zeros behind it, channels_last."""
    bias = conv.bias
    if bias is not None:
        bias = F.pad(bias.to(kept.conv.dtype), (0, len(kept.conv) - len(bias)))
    out = F.conv2d(x, kept.conv, bias, conv.stride, conv.padding, conv.dilation)
    return out.contiguous(memory_format=CHANNELS_LAST)


def _attend_into(
    out: Tensor,
    layer: AttentionBranch,
    kept: KeptWeights,
    x: Tensor,
    tables: tuple[Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """Write the attention branch into the last channels of `out`."""
    encoded = layer.position.encode(layer.geometry.pool(x)[0])
    encoded = (encoded if encoded.dtype == out.dtype else encoded.to(out.dtype)).contiguous(memory_format=CHANNELS_LAST)
    batch, channels, height, width = encoded.shape
    count, slots, stride = batch * height * width, kept.project.shape[1], out.shape[1]
    # A view each by as_strided: permute and reshape would be two.
    qkv = _linear(encoded.as_strided((count, channels), (channels, 1)), kept.qkv, biases[0])
    qkv = qkv.view(batch, height * width, -1)
    attended = triton_backend.forward(qkv, *tables, height, layer.num_heads, layer.key_channels)[0].view(count, -1)
    if not layer.downsample:
        place = out.as_strided((count, slots), (stride, 1), out.storage_offset() + stride - slots)
        _linear(attended, kept.project, biases[1], out=place)
        return
    attended = _linear(attended, kept.project, biases[1])
    strides = (height * width * slots, 1, width * slots, slots)
    resize_into(out.narrow(1, stride - slots, slots), attended.as_strided((batch, slots, height, width), strides))


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, matrix, out=out)
    return torch.addmm(bias.to(x.dtype), x, matrix, out=out)
