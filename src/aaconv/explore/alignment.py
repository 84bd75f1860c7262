"""Where on the image the cells of an attention map lie.

A padded 3x3 convolution with stride 2 centres its output pixel i on pixel 2 i, not between 2 i and 2 i + 1: after four
of them cell i looks at pixel 16 i, half a cell up and left of an even division of the image. Other networks cut the
image into patches and divide it evenly. So it is measured: a copy of the network in which every convolution averages,
and nothing else moves anything, tells by its gradient which pixels a cell is made of.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..layers.aaconv import AAConv2d
from ..layers.families_2d import Packed
from ..layers.families_decomposed import MultiScale
from .accelerated import accelerated


def cell_shifts(model: nn.Module, images: Tensor, names: list[str]) -> dict[str, tuple[float, float]]:
    """How far the cells of each layer's map lie down and right of an even division of images [1, 3, H, W], in pixels.

    Layers with maps of one size are taken to be alike. (0, 0) where the copy does not tell.
    """
    seen: dict[str, Tensor] = {}
    # Attention over patches: SAM's divide the image evenly; MViTv2's, which overlap, are drawn as if they did.
    patches = Packed, MultiScale
    convolutional = [name for name in names if not isinstance(accelerated(model.get_submodule(name)), patches)]
    if not convolutional:
        return dict.fromkeys(names, (0.0, 0.0))
    try:
        twin = _averaging(model)
        for name in convolutional:
            twin.get_submodule(name).register_forward_pre_hook(
                lambda module, inputs, name=name: seen.update({name: _map_of(module, inputs[0])})
            )
        pixels = torch.ones_like(images[:1], requires_grad=True)
        with torch.enable_grad():
            twin(pixels)
        by_size: dict[torch.Size, tuple[float, float]] = {}
        for pooled in seen.values():
            if pooled.shape[-2:] not in by_size:
                by_size[pooled.shape[-2:]] = _shift(pooled, pixels)
    except RuntimeError:  # a network that cannot run as a copy is drawn evenly
        return dict.fromkeys(names, (0.0, 0.0))
    return {name: by_size[seen[name].shape[-2:]] if name in seen else (0.0, 0.0) for name in names}


def _map_of(module: nn.Module, x: Tensor) -> Tensor:
    """What the module attends over: [1, channels, height, width]."""
    return module.geometry.pool(x)[0] if isinstance(module, AAConv2d) else x


def _averaging(model: nn.Module) -> nn.Module:
    """A copy whose convolutions and poolings average, whose norms do nothing, and whose attention gives zeros."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for module in list(twin.modules()):
        if isinstance(module, nn.Conv2d):
            module.weight.fill_(1 / module.weight[0].numel())
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters() if module.affine else module.reset_running_stats()
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool2d):  # among equal pixels it would choose the first
                mean = nn.AvgPool2d(child.kernel_size, child.stride, child.padding, child.ceil_mode, False)
                setattr(module, name, mean)
    for module in twin.modules():
        if isinstance(module, AAConv2d):
            module.project.weight.zero_()
    return twin


def _shift(pooled: Tensor, pixels: Tensor) -> tuple[float, float]:
    """Of the cell in the middle: the centre of the pixels that weigh at least half as much as the heaviest."""
    cell = [length // 2 for length in pooled.shape[-2:]]
    total = pooled[0, :, cell[0], cell[1]].sum()
    if not total.requires_grad:
        return 0.0, 0.0
    (gradient,) = torch.autograd.grad(total, pixels, retain_graph=True)
    weight = gradient[0].abs().sum(0)
    weight = torch.where(weight >= weight.max() / 2, weight, 0)
    if not weight.sum() > 0:
        return 0.0, 0.0
    shifts = []
    for axis, index in enumerate(cell):
        length = pixels.shape[2 + axis]
        centre = (weight.sum(1 - axis) * torch.arange(length)).sum() / weight.sum()
        stride = length / pooled.shape[2 + axis]
        even = stride * (index + 0.5) - 0.5
        # To half pixels, which is what strides and paddings make; never more than a cell off.
        shifts.append(max(-stride, min(stride, round(2 * float(centre - even)) / 2)))
    return shifts[0], shifts[1]
