"""Images with boxes onto a square canvas: one by one with torchvision's transforms, or whole batches on a device.

Both follow the same law. Evaluation: the longer side becomes that of the canvas, the image lies in the upper left, the
rest has the mean colour. Training: that size times a random factor, anywhere on the canvas (a larger image is cut by
it), mirrored or not. Boxes go along, are cut at the edge of the canvas, and are dropped if less than a pixel is left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes

from .coco import Objects
from .transforms import fill_colour

JITTER = (0.8, 1.2)
"""The random factor of the size: 512 to 768 pixels where the canvas has 640."""
MIN_SIDE = 1.0


class Placed(NamedTuple):
    """An image uint8 [3, size, size] on its canvas, `size` (height, width) of its part of it, and the objects there:
    `boxes` float32 [n, 4] in pixels of the canvas, `labels` int64 [n]."""

    image: Tensor
    size: tuple[int, int]
    boxes: Tensor
    labels: Tensor


class PlaceForEvaluation:
    """Longer side to `size`, upper left, padded with the mean colour."""

    def __init__(self, size: int, mean: Sequence[float]) -> None:
        self.size, self.fill = size, fill_colour(mean)

    def __call__(self, image: Tensor, objects: Objects) -> Placed:
        image, boxes = resize(self.size, image, _boxes(objects, image))
        height, width = image.shape[-2:]
        image = functional.pad(image, [0, 0, self.size - width, self.size - height], fill=self.fill)
        return Placed(image, (height, width), boxes.as_subclass(Tensor), objects.labels[~objects.crowd])


class PlaceForTraining:
    """`JITTER` x the size of evaluation, anywhere on the canvas, mirrored or not."""

    def __init__(self, size: int, mean: Sequence[float], jitter: tuple[float, float] = JITTER) -> None:
        self.size, self.jitter = size, jitter
        self.move = v2.Compose(
            [
                v2.RandomCrop(size, pad_if_needed=True, fill=fill_colour(mean)),
                v2.RandomHorizontalFlip(),
                v2.ClampBoundingBoxes(),
            ]
        )

    def __call__(self, image: Tensor, objects: Objects) -> Placed:
        low, high = self.jitter
        longest = self.size * (low + (high - low) * torch.rand(()).item())
        image, boxes = self.move(*resize(longest, image, _boxes(objects, image)))
        boxes, labels = boxes.as_subclass(Tensor), objects.labels[~objects.crowd]
        solid = (boxes[:, 2:] - boxes[:, :2]).amin(dim=1) >= MIN_SIDE
        return Placed(image, (self.size, self.size), boxes[solid], labels[solid])


def resize(longest: float, image: Tensor, *others: Tensor) -> list[Tensor]:
    """The image [3, height, width], and its boxes, with a longer side of `longest` pixels and the same aspect.

    No side gets shorter than a pixel, as it does in v2.Resize(max_size=...) and v2.ScaleJitter.
    """
    height, width = image.shape[-2:]
    size = [max(1, round(longest * side / max(height, width))) for side in (height, width)]
    return [functional.resize(one, size, antialias=True) for one in (image, *others)]


def _boxes(objects: Objects, image: Tensor) -> BoundingBoxes:
    """Of the single objects: crowds are nothing to learn from."""
    return BoundingBoxes(objects.boxes[~objects.crowd], format="XYXY", canvas_size=tuple(image.shape[-2:]))


class Placement(NamedTuple):
    """How a batch of canvases is moved: `scale`, `left` and `top` (pixels of the new canvas) float32 [batch], `flip`
    bool [batch], which mirrors the new canvas."""

    scale: Tensor
    left: Tensor
    top: Tensor
    flip: Tensor


def draw_placement(sizes: Tensor, size: int, random: Tensor, jitter: tuple[float, float] = JITTER) -> Placement:
    """For images of `sizes` int64 [batch, 2] on canvases of `size`, and random numbers [4, batch] in [0, 1)."""
    scale = jitter[0] + (jitter[1] - jitter[0]) * random[0]
    # Free space where the image is smaller than the canvas, what is cut off where it is larger.
    top, left = ((size - sizes[:, axis] * scale) * random[1 + axis] for axis in (0, 1))
    return Placement(scale, left, top, random[3] < 0.5)


def move_images(images: Tensor, placement: Placement) -> Tensor:
    """Normalised canvases [batch, 3, size, size] -> the same, scaled and moved; what comes in is 0, the mean colour."""
    size = images.shape[-1]
    middles = torch.arange(size, device=images.device) + 0.5
    columns = torch.where(placement.flip[:, None], size - middles, middles)
    x = (columns - placement.left[:, None]) / placement.scale[:, None]
    y = (middles - placement.top[:, None]) / placement.scale[:, None]
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(images, grid * (2 / size) - 1, mode="bilinear", padding_mode="zeros", align_corners=False)


def move_boxes(boxes: Tensor, labels: Tensor, size: int, placement: Placement) -> tuple[Tensor, Tensor]:
    """boxes [batch, objects, 4] and labels [batch, objects], -1 where there is none, along with their images."""
    offset = torch.stack([placement.left, placement.top] * 2, dim=-1)[:, None]
    boxes = boxes * placement.scale[:, None, None] + offset
    mirrored = torch.stack([size - boxes[..., 2], boxes[..., 1], size - boxes[..., 0], boxes[..., 3]], dim=-1)
    boxes = torch.where(placement.flip[:, None, None], mirrored, boxes).clamp(0, size)
    solid = (boxes[..., 2:] - boxes[..., :2]).amin(dim=-1) >= MIN_SIDE
    return boxes, torch.where(solid, labels, -1)
