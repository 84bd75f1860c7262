"""Images of files kept on the device: decoded once to squares of one size, uint8, and augmented there by batches.

One epoch then costs a gather and a few kernels per step, whatever the files were. `make_loader(..., in_memory=True)`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from ..utils.memory import machine_bytes
from ..utils.terminal import readable_bytes
from .base_loader import Loader, mix, to_device
from .datasets import ArrayDataset, Dataset
from .images import Skipped
from .transforms import AREA, BRIGHTNESS, CONTRAST, HUE, RATIO, SATURATION, CropAndFlip
from .workers import Transformed, skip

CHUNK = 64
"""Images that a worker decodes at a time."""
LUMA = (0.299, 0.587, 0.114)
TO_YIQ = (LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def decode_all(
    dataset: Dataset, transform: v2.Transform, side: int, *, workers: int, max_unreadable: int, device: torch.device
) -> ArrayDataset:
    """All images, cut to [side, side] by the transform, in their order; unreadable ones are reported and left out."""
    check_memory(len(dataset), side, device)
    keys = [[(index, 0, index) for index in part] for part in _chunks(len(dataset))]
    images = torch.empty(len(dataset), side, side, 3, dtype=torch.uint8)
    labels, skipped, done = torch.empty(len(dataset), dtype=torch.int64), Skipped(max_unreadable), 0
    for tensors, failed in Transformed(dataset, transform).loader(keys, workers):
        skip(failed, skipped)
        if tensors is not None:
            place = slice(done, done + len(tensors[1]))
            images[place], labels[place] = tensors[0].permute(0, 2, 3, 1), tensors[1]
            done = place.stop
    if not done:
        raise OSError(f"none of the {len(dataset):,} images of {dataset.name} can be read")
    augmentation = dataset.augmentation or CropAndFlip(pad=0)
    about = dataset.name, images[:done], labels[:done], dataset.classes, dataset.mean, dataset.std
    return ArrayDataset(*about, augmentation)


def _chunks(number: int) -> Iterator[range]:
    return (range(first, min(first + CHUNK, number)) for first in range(0, number, CHUNK))


def check_memory(number: int, side: int, device: torch.device) -> None:
    """A ValueError where this machine, or its GPU, could not hold so many images."""
    needed = 3 * side**2 * number
    for where in dict.fromkeys((torch.device("cpu"), device)):
        there = free_memory(where)
        if there is not None and needed > there:
            raise ValueError(
                f"{number:,} images of {side} x {side} pixels take {readable_bytes(needed)}, {where} has "
                f"{readable_bytes(there)}; --no-in-memory reads them from the disk, --size and --train-limit take less"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes: of a GPU what nobody has taken, of the machine all of it; None where that is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine_bytes()


class InceptionLoader(Loader):
    """Inception's augmentation of square images on the device: a random part of each, resized to the whole, mirrored
    or not, in other light. The law of `aaconv.data.loaders` holds: the random numbers of an epoch are drawn at its
    start, on the CPU.

    It differs from `inception_train` in three ways: a part that would be longer than the image is cut off, instead of
    drawn again; the four changes of light have a fixed order; and hue and saturation change in YIQ, by one matrix.
    """

    def __init__(self, dataset: ArrayDataset, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, train=True, **options)
        self.images, self.labels = dataset.images.to(self.device), dataset.labels.to(self.device)
        self.to_yiq = torch.tensor(TO_YIQ, device=self.device)
        self.from_yiq = torch.tensor(TO_YIQ, dtype=torch.float64).inverse().float().to(self.device)

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        steps = self._steps(epoch, first_step)
        order, drawn = (to_device(one, self.device) for one in self.plan(epoch))
        places = (self._places(step) for step in steps)
        return (self.load(order[place], drawn[:, place]) for place in places)

    def plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """For each place in an epoch's order: the image, int64 [number], and 9 numbers, float32 [9, number]: the width
        and height of its part, 0 to 1, where its middle is, -1 to 1, minus one to mirror it, and its light."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = self._order(generator)
        uniform = torch.rand(9, len(order), generator=generator, dtype=torch.float64)
        area = AREA[0] + (AREA[1] - AREA[0]) * uniform[0]
        stretch = (math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * uniform[1]).exp()
        width, height = (area * stretch).sqrt().clamp(max=1), (area / stretch).sqrt().clamp(max=1)
        across, down = ((2 * uniform[2 + axis] - 1) * (1 - length) for axis, length in enumerate((width, height)))
        mirrored = torch.where(uniform[4] < 0.5, -1.0, 1.0).double()
        light = [2 * uniform[5 + one] - 1 for one in range(4)]
        light = [1 + BRIGHTNESS * light[0], 1 + CONTRAST * light[1], 1 + SATURATION * light[2], HUE * light[3]]
        return order, torch.stack([width, height, across, down, mirrored, *light]).float()

    def load(self, order: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels that a part of a plan, on the device, asks for."""
        images = self.images[order].permute(0, 3, 1, 2).float()
        width, height, across, down, mirrored, *light = drawn
        none = torch.zeros_like(width)
        rows = torch.stack([width * mirrored, none, across, none, height, down], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(rows, list(images.shape), align_corners=False)
        images = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return self.normalize(self._in_other_light(images, *light)), self.labels[order]

    def _in_other_light(
        self, images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor
    ) -> Tensor:
        """float32 [batch, 3, height, width] in 0..255, and one factor per image for each; hue in turns."""
        images = (images * brightness[:, None, None, None]).clamp(0, 255)
        grey = (images * self.to_yiq[0, :, None, None]).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = (grey + contrast[:, None, None, None] * (images - grey)).clamp(0, 255)
        turned = torch.zeros(len(images), 3, 3, device=images.device)
        cosine, sine = saturation * (2 * math.pi * hue).cos(), saturation * (2 * math.pi * hue).sin()
        turned[:, 0, 0] = 1
        turned[:, 1, 1], turned[:, 1, 2], turned[:, 2, 1], turned[:, 2, 2] = cosine, -sine, sine, cosine
        colours = self.from_yiq @ turned @ self.to_yiq
        return (colours @ images.flatten(2)).view_as(images).clamp(0, 255)
