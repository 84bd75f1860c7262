"""The boxes that a detector corrects: several forms at every position of every level of its pyramid."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator

Size = tuple[int, int]


@dataclass(frozen=True)
class AnchorSettings:
    """`scale` is the side of the smallest anchor in strides of its level; `scales` sizes divide an octave evenly."""

    scale: float = 4.0
    scales: int = 2
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Height by width."""

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"anchor_scale must be positive, got anchor_scale={self.scale}")
        if self.scales < 1:
            raise ValueError(f"anchor_scales must be at least 1, got anchor_scales={self.scales}")
        if not self.ratios or min(self.ratios) <= 0:
            raise ValueError(f"anchor_ratios must be positive numbers, got anchor_ratios={self.ratios}")

    @property
    def per_position(self) -> int:
        return self.scales * len(self.ratios)


def make_anchors(size: Size, strides: tuple[int, ...], settings: AnchorSettings, device: torch.device) -> list[Tensor]:
    """Per level float32 [positions * per_position, 4], x0 y0 x1 y1: rows, columns, forms, as the heads order them.

    Position i of a level lies at pixel i * stride, in the middle of what its convolutions see.
    """
    octave = [settings.scale * 2 ** (i / settings.scales) for i in range(settings.scales)]
    generator = AnchorGenerator(
        tuple(tuple(stride * step for step in octave) for stride in strides), (settings.ratios,) * len(strides)
    )
    generator.set_cell_anchors(torch.float32, device)
    grids = [[-(-side // stride) for side in size] for stride in strides]
    return generator.grid_anchors(grids, [[stride, stride] for stride in strides])
