"""Batches of images with boxes: normalised canvases [batch, 3, size, size] and the `Targets` on them.

The order, the ranks and the steps are those of `aaconv.data.loaders`. A set whose canvases fit into memory is decoded
once, kept on the device, and scaled, moved and mirrored there; a larger one is decoded by workers again and again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base_loader import Loader, mix, to_device
from .coco import DetectionDataset
from .detection_transforms import (
    Placed,
    PlaceForEvaluation,
    PlaceForTraining,
    draw_placement,
    move_boxes,
    move_images,
)
from .images import MAX_UNREADABLE, Skipped
from .workers import SampleLoader, Samples, skip


class Targets(NamedTuple):
    """The objects of a batch of images, padded to the same number.

    `boxes` float32 [batch, objects, 4] as x0, y0, x1, y1 in pixels of the canvas, `labels` int64 [batch, objects], -1
    where there is no object; `sizes` int64 [batch, 2], (height, width) of the image on its canvas; `index` int64
    [batch], which images of their data set they are.
    """

    boxes: Tensor
    labels: Tensor
    sizes: Tensor
    index: Tensor  # type: ignore[assignment]


Batch = tuple[Tensor, Targets]
KEPT_BYTES = 4 * 2**30
"""Canvases of one data set that are kept on the device, at most."""


class KeptDetectionLoader(Loader):
    """All canvases on the device as uint8; the random numbers of an epoch are drawn at its start, on the CPU."""

    def __init__(
        self,
        dataset: DetectionDataset,
        batch_size: int,
        *,
        size: int,
        workers: int = 4,
        max_unreadable: int = MAX_UNREADABLE,
        **options: Any,
    ) -> None:
        self.skipped = Skipped(max_unreadable)
        *tensors, index = _decode(dataset, size, workers, self.skipped)
        super().__init__(dataset.subset(index), batch_size, **options)
        self.size = size
        self.canvases, self.boxes, self.labels, self.sizes = (tensor.to(self.device) for tensor in tensors)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        steps = self._steps(epoch, first_step)
        order, random = (to_device(part, self.device) for part in self.plan(epoch))
        places = map(self._places, steps)
        return (self.load(order[place], random[:, place]) for place in places)

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The images of an epoch in their order, int64 [number], and float32 [4, number] in [0, 1) for each place."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = self._order(generator)
        return order, torch.rand(4, len(order), generator=generator)

    def load(self, index: Tensor, random: Tensor) -> Batch:
        """The batch of the images `index`, in training moved as the random numbers say."""
        images = self.normalize(self.canvases[index])
        boxes, labels, sizes = self.boxes[index], self.labels[index], self.sizes[index]
        if self.train:
            placement = draw_placement(sizes, self.size, random)
            images = move_images(images.float(), placement).to(images.dtype, memory_format=torch.channels_last)
            boxes, labels = move_boxes(boxes, labels, self.size, placement)
        return images, Targets(boxes, labels, sizes, index)


class WorkerDetectionLoader(SampleLoader):
    """Images decoded and placed one by one in `workers` processes."""

    def __init__(self, dataset: DetectionDataset, batch_size: int, *, size: int, train: bool, **options: Any) -> None:
        place = (PlaceForTraining if train else PlaceForEvaluation)(size, dataset.mean)
        super().__init__(dataset, batch_size, train=train, samples=partial(_PlacedImages, dataset, place), **options)
        self.size = size

    def pack(self, images: Tensor, *others: Tensor) -> Batch:
        return images, Targets(*others)


DetectionLoader = KeptDetectionLoader | WorkerDetectionLoader


def make_detection_loader(
    dataset: DetectionDataset, batch_size: int, *, size: int, kept_bytes: int = KEPT_BYTES, **options: Any
) -> DetectionLoader:
    """The loader that suits a data set: on the device if its canvases take at most `kept_bytes`, else with workers.

    Options are those of `Loader` (train, device, dtype, seed, rank, world_size), workers and max_unreadable.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    fits = len(dataset) * 3 * size**2 <= kept_bytes
    return (KeptDetectionLoader if fits else WorkerDetectionLoader)(dataset, batch_size, size=size, **options)


def pad_objects(objects: list[tuple[Tensor, Tensor]], number: int) -> tuple[Tensor, Tensor]:
    """Boxes float32 [images, number, 4] and labels int64 [images, number], -1 where there is no object.

    At least one place for an object, so that no tensor is empty.
    """
    boxes = torch.zeros(len(objects), max(number, 1), 4)
    labels = torch.full((len(objects), max(number, 1)), -1)
    for row, (some, their) in enumerate(objects):
        boxes[row, : len(their)], labels[row, : len(their)] = some, their
    return boxes, labels


def _decode(dataset: DetectionDataset, size: int, workers: int, skipped: Skipped) -> tuple[Tensor, ...]:
    """All images that can be read, on their canvases, and the fields of `Targets`."""
    samples = _PlacedImages(dataset, PlaceForEvaluation(size, dataset.mean), 0)
    # Small parts: what workers have ready, four parts each, lies in shared memory, which may be scarce.
    keys = [[(index, 0, index) for index in part.tolist()] for part in torch.arange(len(dataset)).split(16)]
    canvases = torch.empty(len(dataset), 3, size, size, dtype=torch.uint8)
    rest, done = [], 0
    for tensors, failed in samples.loader(keys, min(workers, len(keys) - 1)):
        skip(failed, skipped)
        if tensors is not None:
            images, *others = tensors
            canvases[done : done + len(images)] = images
            done += len(images)
            rest.append([tensor.clone() for tensor in others])
    if not done:
        name, reason = next(iter(skipped.reasons.items()))
        raise OSError(f"none of the images of {dataset.name} can be read; the first is {name}: {reason}")
    return canvases[:done], *(torch.cat(parts) for parts in zip(*rest, strict=True))


class _PlacedImages(Samples[tuple[int, Placed]]):
    """Samples are the index of an image and the image on its canvas."""

    def __init__(self, dataset: DetectionDataset, place: PlaceForTraining | PlaceForEvaluation, seed: int) -> None:
        super().__init__(dataset, seed)
        self.place = place
        self.most = max(len(objects.labels) for objects in dataset.objects)

    def make(self, index: int) -> tuple[int, Placed]:
        return index, self.place(*self.dataset[index])

    def stack(self, samples: list[tuple[int, Placed]]) -> tuple[Tensor, ...]:
        index, placed = zip(*samples, strict=True)
        boxes, labels = pad_objects([(one.boxes, one.labels) for one in placed], self.most)
        sizes = torch.tensor([one.size for one in placed], dtype=torch.int64)
        return torch.stack([one.image for one in placed]), boxes, labels, sizes, torch.tensor(index)
