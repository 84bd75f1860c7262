"""Batches of images with boxes: normalised canvases [batch, 3, size, size] and the `Targets` on them.

The order, the ranks and the steps are those of `aaconv.data.loaders`. A set whose canvases fit into memory is decoded
once, kept on the device, and scaled, moved and mirrored there; a larger one is decoded by workers again and again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..utils.device import cores
from .coco import DetectionDataset
from .detection_transforms import (
    Placed,
    PlaceForEvaluation,
    PlaceForTraining,
    draw_placement,
    move_boxes,
    move_images,
)
from .images import MAX_UNREADABLE, Skipped, UnreadableImage
from .loaders import BatchKeys, Loader, drawing_from, mix, sort_out


class Targets(NamedTuple):
    """The objects of a batch of images, padded to the same number.

    `boxes` float32 [batch, objects, 4] as x0, y0, x1, y1 in pixels of the canvas, `labels` int64 [batch, objects], -1
    where there is no object; `sizes` int64 [batch, 2], (height, width) of the image on its canvas; `index` int64
    [batch], which images of their data set they are.
    """

    boxes: Tensor
    labels: Tensor
    sizes: Tensor
    index: Tensor


Batch = tuple[Tensor, Targets]
KEPT_BYTES = 4 * 2**30
"""Canvases of one data set that are kept on the device, at most."""


class KeptDetectionLoader(Loader):
    """All canvases on the device as uint8; the random numbers of an epoch are drawn at its start, on the processor."""

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
        all_of_them = _decode(dataset, size, workers, self.skipped)
        super().__init__(dataset.subset(all_of_them.index), batch_size, **options)
        self.size = size
        self.canvases, self.boxes, self.labels, self.sizes = (tensor.to(self.device) for tensor in all_of_them[:4])

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        steps = self._steps(epoch, first_step)
        order, random = (_to(part, self.device) for part in self.plan(epoch))
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


class WorkerDetectionLoader(Loader):
    """Images decoded and placed one by one in `workers` processes (0: in this one), a few batches ahead.

    Each image is placed with torch's generator seeded by the seed, the epoch and its place, whoever does it. Unreadable
    images are reported to `skipped`: evaluation leaves them out; in training others of the batch take their places.
    """

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
        super().__init__(dataset, batch_size, **options)
        self.size, self.skipped = size, Skipped(max_unreadable)
        place = (PlaceForTraining if self.train else PlaceForEvaluation)(size, dataset.mean)
        self._keys = BatchKeys()
        self._loader = _worker_loader(_PlacedImages(dataset, place, self.seed), workers, self._keys, self.device)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        return self._deliver(epoch, self._steps(epoch, first_step))

    def _deliver(self, epoch: int, steps: range) -> Iterator[Batch]:
        order = self._order(torch.Generator().manual_seed(mix(self.seed, epoch))).tolist()
        places = range(len(order))
        keys = ([(order[place], epoch, place) for place in places[self._places(step)]] for step in steps)
        self._keys.of_epoch = keys
        for step, part in zip(steps, self._loader, strict=True):
            for name, reason in part.unreadable:
                self.skipped.add(UnreadableImage(name, reason))
            if not len(part.images):
                if self.train:
                    first = part.unreadable[0][0]
                    raise OSError(f"no image of epoch {epoch}, step {step} can be read; the first is {first}")
                continue
            images, *tensors = part.images, part.boxes, part.labels, part.sizes, part.index
            if self.train and part.unreadable:
                filled = torch.arange(self.batch_size) % len(images)
                images, *tensors = (tensor[filled] for tensor in (images, *tensors))
            images, *tensors = (_to(tensor, self.device) for tensor in (images, *tensors))
            yield self.normalize(images), Targets(*tensors)
            if self._keys.of_epoch is not keys:
                raise RuntimeError("another epoch of this loader was begun: it can deliver one at a time")


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


class _Part(NamedTuple):
    """Placed images as a worker sends them: in few tensors, each of which takes a file descriptor on its way."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    sizes: Tensor
    index: Tensor
    unreadable: list[tuple[str, str]]


def _decode(dataset: DetectionDataset, size: int, workers: int, skipped: Skipped) -> _Part:
    """All images that can be read."""
    place = PlaceForEvaluation(size, dataset.mean)
    # Small parts: what workers have ready, four parts each, lies in shared memory, which may be scarce.
    keys = [[(index, 0, index) for index in part.tolist()] for part in torch.arange(len(dataset)).split(16)]
    canvases = torch.empty(len(dataset), 3, size, size, dtype=torch.uint8)
    rest, done = [], 0
    for images, *tensors, unreadable in _worker_loader(
        _PlacedImages(dataset, place, 0), min(workers, len(keys) - 1), keys
    ):
        canvases[done : done + len(images)] = images
        done += len(images)
        rest.append([tensor.clone() for tensor in tensors])
        for name, reason in unreadable:
            skipped.add(UnreadableImage(name, reason))
    if not done:
        name, reason = next(iter(skipped.reasons.items()))
        raise OSError(f"none of the images of {dataset.name} can be read; the first is {name}: {reason}")
    return _Part(canvases[:done], *(torch.cat(parts) for parts in zip(*rest, strict=True)), [])


class _PlacedImages:
    """A data set that is asked for (index, epoch, place) and answers with the index and the placed image."""

    def __init__(self, dataset: DetectionDataset, place: PlaceForTraining | PlaceForEvaluation, seed: int) -> None:
        self.dataset, self.place, self.seed = dataset, place, seed
        self.most = max(len(objects.labels) for objects in dataset.objects)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[int, Placed] | UnreadableImage:
        index, epoch, place = key
        try:
            image, objects = self.dataset[index]
        except UnreadableImage as unreadable:
            return unreadable
        with drawing_from(self.seed, epoch, place):
            return index, self.place(image, objects)

    def collate(self, samples: list[tuple[int, Placed] | UnreadableImage]) -> _Part:
        good, unreadable = sort_out(samples)
        index, placed = zip(*good, strict=True) if good else ((), ())
        boxes, labels = pad_objects([(one.boxes, one.labels) for one in placed], self.most)
        size = self.place.size
        images = torch.stack([one.image for one in placed]) if placed else torch.empty(0, 3, size, size)
        sizes = torch.tensor([one.size for one in placed], dtype=torch.int64).reshape(-1, 2)
        return _Part(images, boxes, labels, sizes, torch.tensor(index, dtype=torch.int64), unreadable)


def _worker_loader(images: _PlacedImages, workers: int, batches: Any, device: torch.device | None = None) -> DataLoader:
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}")
    workers = min(workers, cores())
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        persistent_workers=workers > 0 and device is not None,
        collate_fn=images.collate,
        pin_memory=device is not None and device.type == "cuda",
        generator=torch.Generator().manual_seed(images.seed),
    )


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
