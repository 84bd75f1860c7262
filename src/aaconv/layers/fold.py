"""A batch norm behind an AAConv layer, folded into it: for inference, as torch.nn.utils.fusion does."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .aaconv import AAConvNd


def fold_batch_norm(layer: AAConvNd, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm) -> AAConvNd:
    """A copy of the layer that computes norm(layer(x)); both in eval mode.

    The convolution's weights and biases are scaled by the norm as torch.nn.utils.fusion.fuse_conv_bn_eval does it.
    Attention is scaled in its gate (combine="add"), or in the rows of its projection, which then has a bias.
    """
    _check(layer, norm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    folded = copy.deepcopy(layer)
    scale = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight)
    shift = (0 if norm.bias is None else norm.bias) - norm.running_mean * scale
    with torch.no_grad():
        first = 0 if layer.conv is None else layer.conv.out_channels
        if folded.conv is not None:
            _scale(folded.conv, scale[:first], shift[:first])
        if folded.gate is not None:
            folded.gate.mul_(scale)
        else:
            _scale(folded.project, scale[first:], shift[first:])
    return folded


def _scale(conv: nn.Conv1d | nn.Conv2d, scale: Tensor, shift: Tensor) -> None:
    """conv(x) * scale + shift, for each output channel."""
    nothing, one = torch.zeros_like(scale), torch.ones_like(scale)
    conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, nothing, one, 0.0, scale, shift)


def _check(layer: AAConvNd, norm: nn.Module) -> None:
    if layer.training or norm.training:
        raise ValueError("a batch norm is folded in eval mode: call eval() on the layer and on the norm first")
    if not isinstance(norm, _NORMS) or norm.running_mean is None:
        raise ValueError(f"only a batch norm with running statistics can be folded, got {type(norm).__name__}")
    if type(norm).forward not in _KNOWN:
        raise ValueError(
            f"{type(norm).__name__} does more than a batch norm: put what it does besides behind the layer"
        )
    if norm.num_features != layer.out_channels:
        raise ValueError(f"the layer has {layer.out_channels} channels, the batch norm {norm.num_features}")


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_KNOWN = {kind.forward for kind in _NORMS}
