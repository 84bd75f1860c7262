"""Boxes, classes and scores out of what a detector says about every anchor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import batched_nms, clip_boxes_to_image, remove_small_boxes

from .boxes import decode


class Detections(NamedTuple):
    """The objects found in one image, best first: `boxes` [n, 4] as x0, y0, x1, y1, `scores` [n], `labels` [n]."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


@dataclass(frozen=True)
class PostprocessSettings:
    """Of each level the `candidates` best above `threshold`; of those that overlap by more than `overlap` the best; of
    all of them `most`."""

    threshold: float = 0.05
    candidates: int = 1000
    overlap: float = 0.5
    most: int = 100


def postprocess(
    logits: Tensor,
    deltas: Tensor,
    anchors: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    settings: PostprocessSettings | None = None,
) -> list[Detections]:
    """One `Detections` per image, in pixels of its canvas, clipped to its (height, width) of `sizes`.

    logits [batch, anchors, classes] and deltas [batch, anchors, 4] as the network gives them, `anchors` per level.
    """
    settings = settings or PostprocessSettings()
    lengths = [len(level) for level in anchors]
    kept = [
        best_of_level(*level, settings.candidates)
        for level in zip(logits.split(lengths, 1), deltas.split(lengths, 1), anchors, strict=True)
    ]
    boxes, scores, labels = (torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
    return [_best_of_image(*image, settings) for image in zip(boxes, scores, labels, sizes, strict=True)]


def best_of_level(logits: Tensor, deltas: Tensor, anchors: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes [batch, k, 4], scores and labels [batch, k] of the k best pairs of anchor and class."""
    classes = logits.shape[-1]
    logits, pair = logits.float().flatten(1).topk(min(number, logits[0].numel()), dim=1)
    anchor = pair.div(classes, rounding_mode="floor")
    codes = deltas.float().gather(1, anchor[..., None].expand(-1, -1, 4))
    return decode(codes, anchors[anchor]), logits.sigmoid(), pair % classes


def _best_of_image(
    boxes: Tensor, scores: Tensor, labels: Tensor, size: tuple[int, int], settings: PostprocessSettings
) -> Detections:
    good = scores > settings.threshold
    boxes, scores, labels = clip_boxes_to_image(boxes[good], size), scores[good], labels[good]
    solid = remove_small_boxes(boxes, 1e-2)
    boxes, scores, labels = boxes[solid], scores[solid], labels[solid]
    chosen = batched_nms(boxes, scores, labels, settings.overlap)[: settings.most]
    return Detections(boxes[chosen], scores[chosen], labels[chosen])
