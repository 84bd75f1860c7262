"""Boxes as a detector speaks of them: how far their middle is from an anchor's, and how much larger they are."""

import math

import torch
from torch import Tensor

LARGEST = math.log(1000 / 16)
"""Of a code's logarithm: what is beyond would overflow, and no object is 60 times its anchor."""


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """boxes and anchors [..., 4] as x0, y0, x1, y1 -> codes [..., 4]: (dx, dy) in sizes of the anchor, and logarithms
    of width and height against the anchor's. Torchvision's code, with all weights 1."""
    (middle, size), (anchor_middle, anchor_size) = _middle_and_size(boxes), _middle_and_size(anchors)
    return torch.cat([(middle - anchor_middle) / anchor_size, torch.log(size / anchor_size)], dim=-1)


def decode(codes: Tensor, anchors: Tensor) -> Tensor:
    """codes and anchors [..., 4] -> boxes [..., 4]: the inverse of `encode`."""
    anchor_middle, anchor_size = _middle_and_size(anchors.to(codes.dtype))
    middle = codes[..., :2] * anchor_size + anchor_middle
    half = 0.5 * (codes[..., 2:].clamp(max=LARGEST).exp() * anchor_size)
    return torch.cat([middle - half, middle + half], dim=-1)


def _middle_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    size = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * size, size
