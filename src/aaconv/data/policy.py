"""What training does to images besides cropping and mirroring them, by the code of timm and torchvision.

The random numbers of an image follow from the seed, the epoch and its place in the epoch, those of a batch from the
seed, the epoch and the step: a resumed run sees the same images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from timm.data import Mixup
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from .base_loader import Loader, drawing_from
from .transforms import fill_colour

TORCHVISION = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
    "autoaugment": v2.AutoAugment,
    "autoaugment-cifar10": lambda **how: v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, **how),
}
TIMM = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}
TIMM_POLICIES = ("original", "originalr", "v0", "v0r", "3a")
BATCH = 2
"""Beside the numbers that random ones follow from: for what is drawn for a batch."""


@dataclass(frozen=True)
class Policy:
    """auto: a name of `policy_transform`; erasing: the probability of random erasing; mixup, cutmix: their alphas;
    repeats: how often an epoch takes each image, one after the other; smoothing: of labels, where images are mixed."""

    auto: str | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    repeats: int = 1
    smoothing: float = 0.0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def changes_batches(self) -> bool:
        return self.mixes or self.erasing > 0


def on_device(name: str | None) -> bool:
    """Whether the images of a small data set can stay where they are: timm's transforms want them on the CPU."""
    return name is None or name in TORCHVISION


def policy_transform(name: str | None, mean: Sequence[float]) -> v2.Transform | None:
    """The transform of that name for uint8 images [3, height, width]: a key of TORCHVISION, one of TIMM_POLICIES, or
    timm's rand-... and augmix-... with settings such as rand-m9-mstd0.5-inc1. What it uncovers gets the mean colour."""
    if name is None:
        return None
    fill = fill_colour(mean)
    if name in TORCHVISION:
        return TORCHVISION[name](fill=fill)
    make = TIMM.get(name.partition("-")[0]) or (auto_augment_transform if name in TIMM_POLICIES else None)
    if make is None:
        known = [*TORCHVISION, *TIMM_POLICIES, "rand-m9-mstd0.5", "augmix-m5"]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
        raise ValueError(f"unknown auto_augment {name!r}; {hint}")
    try:
        return v2.Lambda(_OnPictures(make(name, {"img_mean": tuple(fill)})))
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"auto_augment={name!r} is not what timm takes, such as rand-m9-mstd0.5: {error}") from None


class _OnPictures:
    """A transform of PIL images, for tensors."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Tensor) -> Tensor:
        return pil_to_tensor(self.transform(to_pil_image(image)))


class BatchPolicy:
    """A loader whose batches are erased and mixed by timm; labels are float [batch, classes] where they are mixed."""

    def __init__(self, loader: Loader, policy: Policy, classes: int) -> None:
        if policy.mixes and loader.batch_size % 2:
            raise ValueError(f"mixup and cutmix need an even batch per process, got {loader.batch_size}")
        self.loader = loader
        # "const", the mean colour: other modes would draw on the device, from the network's random numbers.
        self.erase = RandomErasing(policy.erasing, mode="const", device=loader.device) if policy.erasing else None
        how = {"mixup_alpha": policy.mixup, "cutmix_alpha": policy.cutmix, "label_smoothing": policy.smoothing}
        self.mixup = Mixup(**how, num_classes=classes) if policy.mixes else None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's, changed."""
        for step, (images, labels) in enumerate(self.loader.batches(epoch, first_step), first_step):
            with drawing_from(self.loader.seed, epoch, step, self.loader.rank, BATCH):
                changed = self._change(images, labels)
            yield changed

    @torch.no_grad()
    def _change(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mixup is None else self.mixup(images, labels)
