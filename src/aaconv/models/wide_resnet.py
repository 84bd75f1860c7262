"""The Wide-ResNet of table 1 of the paper; aa_wide_resnet.py has its names.

"Wide Residual Networks", Zagoruyko and Komodakis 2016, arXiv:1605.07146, as the AutoAugment code builds them (Cubuk et
al. 2018, arXiv:1805.09501): shortcuts without parameters, and further ones around every stage and around all three.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import checkpoint_seq
from torch import Tensor, nn

from ..layers.gates import GATES
from .classifier import Classifier
from .family import ATTENTION_OPTIONS, augment_network, gate_options, image_size, sort_options
from .timm_seam import feature_take_indices

__all__ = ["WideResNet"]


class Shortcut(nn.Module):
    """Average pooling, then zero channels on both sides: [N, C, H, W] -> [N, out_channels, H / stride, W / stride]."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return F.pad(x, (0, 0, 0, 0, self.before, self.after)) if self.before or self.after else x


class PreActBlock(nn.Module):
    """Batch norm, ReLU, 3x3, twice. With shared_activation the shortcut starts after the first ReLU."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        *,
        shared_activation: bool,
        gate: nn.Module | None,
        drop_path: float,
        **factory: Any,
    ):
        super().__init__()
        self.shared_activation = shared_activation
        self.bn1 = nn.BatchNorm2d(in_channels, **factory)
        self.act1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False, **factory)
        self.bn2 = nn.BatchNorm2d(channels, **factory)
        self.act2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **factory)
        self.gate = gate or nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.shortcut = Shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.act1(self.bn1(x))
        y = self.conv2(self.act2(self.bn2(self.conv1(activated))))
        return self.drop_path(self.gate(y)) + self.shortcut(activated if self.shared_activation else x)


class Stage(nn.Module):
    """Blocks of one width, and a shortcut around them all."""

    def __init__(self, blocks: Sequence[nn.Module], shortcut: nn.Module, gate: nn.Module | None):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.shortcut = shortcut
        self.gate = gate or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.blocks(x) + self.shortcut(x))


class WideResNet(Classifier):
    """Wide-ResNet-depth-width with timm's interface.

    gate: "se", "ge", "bam", "cbam", "gala" or None; its keywords (reduction, ...) are options.
    augmented: swap the first 3x3 of every block; AAConv2d's keywords are options.
    img_size: what the relative tables are made for; any other size runs as well.
    drop_rate, drop_path_rate: dropout before the classifier; stochastic depth, rising linearly with the depth.
    """

    def __init__(
        self,
        depth: int = 28,
        width: float = 10,
        *,
        num_classes: int = 100,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        gate: str | None = None,
        augmented: bool = False,
        img_size: int | tuple[int, int] = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(num_classes=num_classes, in_chans=in_chans, drop_rate=drop_rate)
        own = {"num_classes", "in_chans", "global_pool", "drop_rate", "drop_path_rate", "img_size"}
        names = gate_options(gate), ATTENTION_OPTIONS if augmented else set()
        gated, attention = sort_options(options, *names, owner=type(self).__name__, also=own)
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4, got {depth=}; try {max(10, depth - (depth - 4) % 6)}")
        img_size = image_size(img_size)
        factory = {"device": device, "dtype": dtype}
        channels = [16, *(int(16 * width * scale) for scale in (1, 2, 4))]
        self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False, **factory)
        self.feature_info = [{"num_chs": channels[0], "reduction": 1, "module": "conv1"}]

        gate_class = None if gate is None else GATES[gate]

        def make_gate(after: str, width: int) -> nn.Module | None:
            if gate_class is None or gate_class.after != after:
                return None
            return gate_class(width, **gated, **factory)

        per_stage = (depth - 4) // 6
        rates = iter(torch.linspace(0, drop_path_rate, 3 * per_stage, device="cpu").tolist())
        stages = []
        for index, (wide_in, wide) in enumerate(pairwise(channels)):
            stride = 1 if index == 0 else 2
            blocks = [
                PreActBlock(
                    wide_in if first else wide,
                    wide,
                    stride if first else 1,
                    shared_activation=first and index == 0,
                    gate=make_gate("block", wide),
                    drop_path=next(rates),
                    **factory,
                )
                for first in (True, *[False] * (per_stage - 1))
            ]
            stage_gate = make_gate("stage", wide) if index < 2 else None
            stages.append(Stage(blocks, Shortcut(wide_in, wide, stride), stage_gate))
            self.feature_info.append({"num_chs": wide, "reduction": 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self.shortcut = Shortcut(channels[0], channels[-1], 4)
        self.norm: nn.Module = nn.BatchNorm2d(channels[-1], **factory)
        self.act: nn.Module = nn.ReLU(inplace=True)
        self.add_head(channels[-1], global_pool, **factory)
        if augmented:
            where = re.compile(r"stages\.\d+\.blocks\.\d+\.conv1")
            augment_network(self, in_chans, img_size, attention, where=where)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.blocks\.(\d+)"
        return {"stem": r"^conv1", "blocks": [(blocks, None), (r"^norm", (99999,))]}

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """(features, intermediates): 0 is the first convolution, 1 to 3 the stages; norm: apply the last batch norm."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt=}")
        take, deepest = feature_take_indices(len(self.feature_info), indices)
        x = stem = self.conv1(x)
        intermediates = [x] if 0 in take else []
        for index, stage in enumerate(self.stages[:deepest] if stop_early else self.stages, start=1):
            x = checkpoint_seq([stage], x) if self.grad_checkpointing else stage(x)
            last = index == len(self.feature_info) - 1
            if last:
                x = x + self.shortcut(stem)
            normed = self.act(self.norm(x)) if last and (norm or not intermediates_only) else x
            if index in take:
                intermediates.append(normed if norm else x)
            x = normed
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the wanted intermediates do not need; returns their indices."""
        take, deepest = feature_take_indices(len(self.feature_info), indices)
        self.stages = self.stages[:deepest]
        if prune_norm:
            self.norm = self.act = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """[N, in_chans, H, W] -> [N, num_features, H / 4, W / 4]."""
        stem = self.conv1(x)
        x = checkpoint_seq(self.stages, stem) if self.grad_checkpointing else self.stages(stem)
        return self.act(self.norm(x + self.shortcut(stem)))
