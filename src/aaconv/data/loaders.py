"""Batches on a device, in an order and with an augmentation that depend only on the seed, the epoch and the step.

    loader = make_loader(open_dataset("cifar100"), batch_size=128, train=True, device="cuda", seed=0)
    for images, labels in loader.batches(epoch=3, first_step=17): ...

`images` is normalised, [batch, 3, height, width], channels_last; `labels` int64 [batch]. A loader keeps no position: to
resume a run in the middle of an epoch, ask for the step. Training shuffles, augments, and drops what does not fill a
batch; a Policy lets it do more (policy.py). Step s of an epoch takes the images at places s G to (s + 1) G - 1 of its
order, G = batch_size x world_size, and rank r the r-th part of them, so that one process and many with the same G see
the same batches. Evaluation takes every image once: rank r the images r, r + world_size, ... in their order, the last
batch as small as it comes out.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from .base_loader import Loader, drawing_from, mix, to_device
from .datasets import ArrayDataset, Dataset
from .images import MAX_UNREADABLE
from .policy import BatchPolicy, Policy, on_device, policy_transform
from .resident import InceptionLoader, decode_all
from .transforms import (
    EVAL_CROP,
    INTERPOLATION,
    CropAndFlip,
    cifar_train,
    cut_batch,
    eval_transform,
    inception_train,
    pad_images,
)
from .workers import SampleLoader, Transformed

Batch = tuple[Tensor, Tensor]
CHANGED = 1
"""Beside the numbers that random ones follow from: for what else is drawn at the same place."""
PLAIN = Policy()


class DeviceLoader(Loader):
    """A small data set kept on the device as uint8, and cut, mirrored and normalised there, a batch at a time; then
    enlarged where `side` is larger than its images.

    The random numbers of an epoch are drawn at its start, on the CPU, and go over in one copy: a step is one
    gather and the normalising, with shapes that never change, and gives the same images on every device.
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        batch_size: int,
        *,
        augmentation: CropAndFlip | None = None,
        change: v2.Transform | None = None,
        side: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size, **options)
        self.change, self.side = change, side or dataset.side
        plain = CropAndFlip(pad=0, flip=False)
        self.augmentation = (augmentation or dataset.augmentation) if self.train else plain
        self.size = dataset.images.shape[1], dataset.images.shape[2]
        self.padded = pad_images(dataset.images.to(self.device), self.augmentation.pad, dataset.mean)
        self.labels = dataset.labels.to(self.device)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        steps, plan = self._steps(epoch, first_step), to_device(self.plan(epoch), self.device)
        if self.change is None:
            return (self.load(plan[:, self._places(step)]) for step in steps)
        return (self._load_changed(plan, epoch, self._places(step)) for step in steps)

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
        return self._finished(images.permute(0, 3, 1, 2)), self.labels[plan[0]]

    def _finished(self, images: Tensor) -> Tensor:
        images = self.normalize(images)
        if self.side == self.dataset.side:
            return images
        return F.interpolate(images, size=(self.side, self.side), mode=INTERPOLATION, align_corners=False)

    def _load_changed(self, plan: Tensor, epoch: int, places: slice) -> Batch:
        """The same, each image changed by itself: its random numbers follow from its place in the epoch."""
        images = cut_batch(self.padded, self.size, *plan[:, places]).permute(0, 3, 1, 2)
        changed = []
        assert self.change is not None
        for place, image in zip(range(places.start, places.stop), images, strict=True):
            with drawing_from(self.seed, epoch, place, CHANGED):
                changed.append(self.change(image))
        return self._finished(torch.stack(changed)), self.labels[plan[0, places]]


class WorkerLoader(SampleLoader):
    """Images decoded and transformed one by one in `workers` processes: (images, labels int64 [batch])."""

    def __init__(self, dataset: Dataset, batch_size: int, *, transform: v2.Transform, **options: Any) -> None:
        super().__init__(dataset, batch_size, samples=partial(Transformed, dataset, transform), **options)

    def pack(self, images: Tensor, *others: Tensor) -> Batch:
        (labels,) = others
        return images, labels


def make_loader(
    dataset: Dataset,
    batch_size: int,
    *,
    train: bool,
    size: int | None = None,
    workers: int = 4,
    max_unreadable: int = MAX_UNREADABLE,
    policy: Policy = PLAIN,
    in_memory: bool = False,
    **options: Any,
) -> Loader | BatchPolicy:
    """The loader that suits a data set: on the device if it is a small one, with Inception's augmentation otherwise.

    policy: what training does to the images besides; labels are float [batch, classes] where it mixes them.

    `size` is that of the images that come out, by default 224. A small data set stays on the device, in its own size,
    the default, or enlarged after its own augmentation. in_memory: decode the images of files once, as squares of
    `size`, and keep them there, too. Options are those of `Loader`: device, dtype, seed, rank, world_size.
    """
    policy = policy if train else PLAIN
    options |= {"repeats": policy.repeats}
    side, own_size = size or dataset.side or 224, takes_whole_images(dataset, size)
    more: dict[str, Any] = {"workers": workers, "max_unreadable": max_unreadable}
    if in_memory and not (own_size and isinstance(dataset, ArrayDataset)):
        if policy.auto and not own_size:
            raise ValueError(
                f"auto_augment={policy.auto} changes images one by one, in_memory by batches: leave one out"
            )
        whole = eval_transform(side, crop=1.0 if train or own_size else EVAL_CROP)
        dataset = decode_all(dataset, whole, side, device=torch.device(options.get("device", "cpu")), **more)
        if train and not own_size:
            return _changing_batches(InceptionLoader(dataset, batch_size, **options), policy)
        own_size = True
    change = policy_transform(policy.auto, dataset.mean)
    if own_size and isinstance(dataset, ArrayDataset) and on_device(policy.auto):
        on_the_device = DeviceLoader(dataset, batch_size, change=change, train=train, side=side, **options)
        return _changing_batches(on_the_device, policy)
    if own_size and dataset.augmentation is not None:
        crop = _cropped_whole(dataset, side) if train else eval_transform(side, crop=1.0)
    else:
        crop = (inception_train if train else eval_transform)(side)
    transform = crop if change is None else v2.Compose([crop, change])
    loader = WorkerLoader(dataset, batch_size, transform=transform, train=train, **more, **options)
    return _changing_batches(loader, policy)


def takes_whole_images(dataset: Dataset, size: int | None) -> bool:
    """Whether images are looked at whole, in their own size or, of a small data set, enlarged: not a part of them."""
    if dataset.side is None:
        return False
    return size in (None, dataset.side) or (isinstance(dataset, ArrayDataset) and (size or 0) > dataset.side)


def _cropped_whole(dataset: Dataset, side: int) -> v2.Transform:
    """The data set's own augmentation of one image, enlarged if need be."""
    assert dataset.augmentation is not None
    assert dataset.side is not None
    crop = cifar_train(dataset.side, dataset.augmentation, dataset.mean)
    return crop if side == dataset.side else v2.Compose([crop, v2.Resize(side, antialias=True)])


def _changing_batches(loader: Loader, policy: Policy) -> Loader | BatchPolicy:
    return BatchPolicy(loader, policy, len(loader.dataset.classes)) if policy.changes_batches else loader
