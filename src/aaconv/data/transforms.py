"""Augmentation: of single images with torchvision's transforms, and the CIFAR one also of whole batches on a device.

All of them take and give uint8; `Normalize` is applied to the batch, on its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import center_crop

EVAL_CROP = 0.875
"""The part of the shorter side that evaluation looks at, as in Inception and ResNet."""
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of the part of an image that Inception's augmentation takes: its share of the image, and width over height."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32 / 255, 0.5, 0.5, 0.2
"""How far Inception's augmentation changes the light: factors up to 1 +- these, of the hue parts of a turn."""
INTERPOLATION = "bilinear"
"""How images are resized; timm assumes bicubic where nothing is said."""
INTERPOLATIONS = tuple(mode.value for mode in v2.InterpolationMode)
LONGEST = 16
"""Times the shorter side: what is longer is cut before it is enlarged, or one row of pixels would fill all memory."""


@dataclass(frozen=True)
class CropAndFlip:
    """CIFAR's augmentation: pad each edge by `pad` pixels of the mean colour, cut the old size out anywhere, mirror
    every other image. (Padding with the mean is padding with zeros after normalising, as in the paper's code.)
    """

    pad: int = 4
    flip: bool = True


def cifar_train(size: int, augmentation: CropAndFlip, mean: Sequence[float]) -> v2.Transform:
    """`CropAndFlip` of one image [3, size, size], by torchvision."""
    crop = v2.RandomCrop(size, padding=augmentation.pad, fill=fill_colour(mean))
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 if augmentation.flip else 0.0)])


def inception_train(size: int) -> v2.Transform:
    """A random part of 8% to 100% of the image, resized to size x size, mirrored or not, in other light."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=AREA, ratio=RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=SATURATION, hue=HUE),
        ]
    )


def eval_transform(size: int, crop: float = EVAL_CROP, interpolation: str = INTERPOLATION) -> v2.Transform:
    """The middle size x size pixels after the shorter side was resized to size / crop."""
    resize = v2.Resize(round(size / crop), v2.InterpolationMode(interpolation), antialias=True)
    return v2.Compose([v2.Lambda(cut_ends), resize, v2.CenterCrop(size)])


def cut_ends(image: Tensor) -> Tensor:
    """The middle of an image [..., height, width] that is more than `LONGEST` times as long as it is wide."""
    longest = LONGEST * min(image.shape[-2:])
    if max(image.shape[-2:]) <= longest:
        return image
    return center_crop(image, [min(side, longest) for side in image.shape[-2:]])


def fill_colour(mean: Sequence[float]) -> list[int]:
    """The mean colour of a data set, 0..1, as the nearest pixel value."""
    return [round(255 * value) for value in mean]


def pad_images(images: Tensor, pad: int, mean: Sequence[float]) -> Tensor:
    """uint8 [number, height, width, 3] -> [number, height + 2 pad, width + 2 pad, 3], filled with the mean colour."""
    if pad == 0:
        return images
    number, height, width, channels = images.shape
    fill = torch.tensor(fill_colour(mean), dtype=torch.uint8, device=images.device)
    padded = fill.expand(number, height + 2 * pad, width + 2 * pad, channels).contiguous()
    padded[:, pad:-pad, pad:-pad] = images
    return padded


def cut_batch(padded: Tensor, size: tuple[int, int], image: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Windows of `size` out of padded [number, H, W, 3], each mirrored or not: [batch, *size, 3], by one gather.

    `image`, `top`, `left` and `flip` (0 or 1) are int64 [batch] on the device of the images.
    """
    height, width = (torch.arange(length, device=padded.device) for length in size)
    rows = top[:, None] + height
    columns = left[:, None] + torch.where(flip[:, None] == 1, size[1] - 1 - width, width)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]


class Normalize(nn.Module):
    """uint8 [batch, 3, height, width] -> `dtype`, mean 0 and standard deviation 1 over the data set, channels_last."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("shift", -means / stds, persistent=False)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return images.mul_(self.scale).add_(self.shift).to(self.dtype)
