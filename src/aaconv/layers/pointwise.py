"""1x1 convolutions as matrix products over channels_last memory, in compiled networks.

There a product takes the host half as long to start as a convolution. Not compiled it is the other way round: torch
makes views and transposes of it, 66 operations in a training step of the layer where convolutions have 39.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import must_be_called
from .tracing import is_exporting


def project_in(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x) with the channels last: [batch, channels, height, width] -> [batch, height, width, out channels]."""
    if compiled_for_gpu(x) and is_plain(conv) and x.is_contiguous(memory_format=torch.channels_last):
        return F.linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias)
    return conv(x).permute(0, 2, 3, 1)


def project_out(conv: nn.Module, x: Tensor) -> Tensor:
    """conv of channels that come last: [batch, height, width, channels] -> [batch, out channels, height, width]."""
    if compiled_for_gpu(x) and is_plain(conv):
        return F.linear(x, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)
    return conv(x.permute(0, 3, 1, 2))


def is_plain(conv: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is a product of matrices and no more: nobody has put another module in its place, or watches it."""
    if type(conv) is not nn.Conv2d or must_be_called(conv):
        return False
    return (conv.kernel_size, conv.stride, conv.padding, conv.groups) == ((1, 1), (1, 1), (0, 0), 1)


def compiled_for_gpu(x: Tensor) -> bool:
    return x.is_cuda and torch.compiler.is_compiling() and not is_exporting()
