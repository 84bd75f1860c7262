"""Batches on a device, in an order and with an augmentation that depend only on the seed, the epoch and the step.

    loader = make_loader(open_dataset("cifar100"), batch_size=128, train=True, device="cuda", seed=0)
    for images, labels in loader.batches(epoch=3, first_step=17): ...

`images` is normalised, [batch, 3, height, width], channels_last; `labels` int64 [batch]. A loader keeps no position: to
resume a run in the middle of an epoch, ask for the step. Training shuffles, augments, and drops what does not fill a
batch. Step s of an epoch takes the images at places s G to (s + 1) G - 1 of its order, G = batch_size x world_size, and
rank r the r-th part of them, so that one process and many with the same G see the same batches. Evaluation takes every
image once: rank r the images r, r + world_size, ... in their order, the last batch as small as it comes out.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from .datasets import ArrayDataset, Dataset
from .images import MAX_UNREADABLE, Skipped, UnreadableImage
from .transforms import CropAndFlip, Normalize, cut_batch, eval_transform, inception_train, pad_images

Batch = tuple[Tensor, Tensor]


class Loader(ABC):
    """What all loaders have in common: which images a step takes. `batch_size` is that of one rank."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        train: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to world_size - 1, got {rank=}, {world_size=}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if train and len(dataset) < batch_size * world_size:
            raise ValueError(
                f"{len(dataset)} images do not fill one batch of {batch_size} on {world_size} processes; "
                f"batch_size can be at most {len(dataset) // world_size}"
            )
        self.dataset, self.batch_size, self.train, self.seed = dataset, batch_size, train, seed
        self.device, self.rank, self.world_size = torch.device(device), rank, world_size
        self.normalize = Normalize(dataset.mean, dataset.std, dtype).to(self.device)

    def __len__(self) -> int:
        """The number of steps of an epoch, on this rank."""
        if self.train:
            return len(self.dataset) // (self.batch_size * self.world_size)
        mine = len(range(self.rank, len(self.dataset), self.world_size))
        return -(-mine // self.batch_size)

    @abstractmethod
    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `first_step` on."""

    def _steps(self, epoch: int, first_step: int) -> range:
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= first_step <= len(self):
            raise ValueError(f"first_step must be 0 to {len(self)}, the steps of an epoch, got {first_step}")
        return range(first_step, len(self))

    def _places(self, step: int) -> slice:
        """Where the images of a step stand in the order of its epoch."""
        if self.train:
            start = (step * self.world_size + self.rank) * self.batch_size
            return slice(start, start + self.batch_size)
        start = self.rank + step * self.batch_size * self.world_size
        return slice(start, start + self.batch_size * self.world_size, self.world_size)

    def _order(self, generator: torch.Generator) -> Tensor:
        number = len(self.dataset)
        return torch.randperm(number, generator=generator) if self.train else torch.arange(number)


class DeviceLoader(Loader):
    """A small data set kept on the device as uint8, and cut, mirrored and normalised there, a batch at a time.

    The random numbers of an epoch are drawn at its start, on the processor, and go over in one copy: a step is one
    gather and the normalising, with shapes that never change, and gives the same images on every device.
    """

    def __init__(
        self, dataset: ArrayDataset, batch_size: int, *, augmentation: CropAndFlip | None = None, **options: Any
    ) -> None:
        super().__init__(dataset, batch_size, **options)
        plain = CropAndFlip(pad=0, flip=False)
        self.augmentation = (augmentation or dataset.augmentation) if self.train else plain
        self.size = tuple(dataset.images.shape[1:3])
        self.padded = pad_images(dataset.images.to(self.device), self.augmentation.pad, dataset.mean)
        self.labels = dataset.labels.to(self.device)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        steps, plan = self._steps(epoch, first_step), self.plan(epoch)
        if self.device.type == "cuda":
            plan = plan.pin_memory()
        plan = plan.to(self.device, non_blocking=True)
        return (self.load(plan[:, self._places(step)]) for step in steps)

    def plan(self, epoch: int) -> Tensor:
        """int64 [4, number]: for each place in an epoch's order the image, its top and left edge, mirrored or not."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = self._order(generator)
        edges = torch.randint(2 * self.augmentation.pad + 1, (2, len(order)), generator=generator)
        flips = torch.randint(1 + self.augmentation.flip, (1, len(order)), generator=generator)
        return torch.cat([order[None], edges, flips])

    def load(self, plan: Tensor) -> Batch:
        """The images and labels that columns of a plan, on the device, ask for."""
        images = cut_batch(self.padded, self.size, *plan)
        return self.normalize(images.permute(0, 3, 1, 2)), self.labels[plan[0]]


class WorkerLoader(Loader):
    """Images decoded and transformed one by one in `workers` processes (0: in this one), a few batches ahead.

    Each image is transformed with torch's generator seeded by the seed, the epoch and its place, whoever does it. They
    travel as uint8, by way of pinned memory to a GPU, and are normalised there. Unreadable images are reported to
    `skipped`: evaluation leaves them out; in training others of the batch take their places, so that its size stays.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        transform: v2.Transform,
        workers: int = 4,
        prefetch: int = 4,
        max_unreadable: int = MAX_UNREADABLE,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size, **options)
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        self.skipped = Skipped(max_unreadable)
        self._keys = BatchKeys()
        self._loader = DataLoader(
            _Transformed(dataset, transform, self.seed),
            batch_sampler=self._keys,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            # Its own generator: the one of the training loop must not depend on how often a loader was started.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        return self._deliver(epoch, self._steps(epoch, first_step))

    def _deliver(self, epoch: int, steps: range) -> Iterator[Batch]:
        order = self._order(torch.Generator().manual_seed(mix(self.seed, epoch))).tolist()
        places = range(len(order))
        keys = ([(order[place], epoch, place) for place in places[self._places(step)]] for step in steps)
        self._keys.of_epoch = keys
        for step, (images, labels, unreadable) in zip(steps, self._loader, strict=True):
            for name, reason in unreadable:
                self.skipped.add(UnreadableImage(name, reason))
            if labels is None:
                if self.train:
                    raise OSError(
                        f"no image of epoch {epoch}, step {step} can be read; the first is {unreadable[0][0]}"
                    )
                continue
            if self.train and unreadable:
                filled = torch.arange(self.batch_size) % len(labels)
                images, labels = images[filled], labels[filled]
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in (images, labels))
            yield self.normalize(images), labels
            if self._keys.of_epoch is not keys:
                raise RuntimeError("another epoch of this loader was begun: it can deliver one at a time")


class BatchKeys:
    """What a WorkerLoader delivers at the moment: for each batch the (index, epoch, place) of its images."""

    of_epoch: Iterator[list[tuple[int, int, int]]] = iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        return self.of_epoch


class _Transformed:
    """A data set that is asked for (index, epoch, place) and answers with the transformed image and its label."""

    def __init__(self, dataset: Dataset, transform: v2.Transform, seed: int) -> None:
        self.dataset, self.transform, self.seed = dataset, transform, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor, int] | UnreadableImage:
        index, epoch, place = key
        try:
            image, label = self.dataset[index]
        except UnreadableImage as unreadable:
            return unreadable
        with drawing_from(self.seed, epoch, place):
            return self.transform(image), label


def _collate(
    samples: list[tuple[Tensor, int] | UnreadableImage],
) -> tuple[Tensor | None, Tensor | None, list[tuple[str, str]]]:
    good, unreadable = sort_out(samples)
    if not good:
        return None, None, unreadable
    images, labels = zip(*good, strict=True)
    return torch.stack(images), torch.tensor(labels), unreadable


def sort_out(samples: list[Any]) -> tuple[list[Any], list[tuple[str, str]]]:
    """The samples that could be read, and name and reason of those that could not."""
    unreadable = [(sample.name, sample.reason) for sample in samples if isinstance(sample, UnreadableImage)]
    return [sample for sample in samples if not isinstance(sample, UnreadableImage)], unreadable


@contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Within it torch's random numbers on the processor follow from these; afterwards they go on as before."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reach the GPU's generator as well, which the network uses.
        torch.default_generator.manual_seed(mix(*numbers))
        yield


def make_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    train: bool,
    size: int | None = None,
    workers: int = 4,
    max_unreadable: int = MAX_UNREADABLE,
    **options: Any,
) -> Loader:
    """The loader that suits a data set: on the device if it is a small one, with Inception's augmentation otherwise.

    `size` is that of the images that come out, 224 unless told; a small data set in its own size, the default, stays on
    the device. Options are those of `Loader`: device, dtype, seed, rank, world_size.
    """
    if isinstance(dataset, ArrayDataset) and size in (None, *dataset.images.shape[1:2]):
        return DeviceLoader(dataset, batch_size, train=train, **options)
    transform = (inception_train if train else eval_transform)(size or 224)
    more = {"workers": workers, "max_unreadable": max_unreadable, **options}
    return WorkerLoader(dataset, batch_size, transform=transform, train=train, **more)


def mix(*numbers: int) -> int:
    """A seed for torch out of several numbers; neighbours give unrelated ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
