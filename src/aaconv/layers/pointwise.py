"""1x1 convolutions as matrix products over channels_last memory: less for the host to do, and for torch's compiler."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import has_hooks


def project_in(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x) with the channels last: [batch, channels, height, width] -> [batch, height, width, out channels]."""
    if is_plain(conv) and on_gpu(x) and x.is_contiguous(memory_format=torch.channels_last):
        return F.linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias)
    return conv(x).permute(0, 2, 3, 1)


def project_out(conv: nn.Module, x: Tensor) -> Tensor:
    """conv of channels that come last: [batch, height, width, channels] -> [batch, out channels, height, width]."""
    if is_plain(conv) and on_gpu(x):
        return F.linear(x, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)
    return conv(x.permute(0, 3, 1, 2))


def is_plain(conv: nn.Module) -> bool:
    """Whether it does nothing but convolve: nobody has put another module in its place, or watches it."""
    return type(conv) is nn.Conv2d and not has_hooks(conv)


def on_gpu(x: Tensor) -> bool:
    """On a CPU the convolution is as fast, and keeps its last bits."""
    return x.is_cuda
