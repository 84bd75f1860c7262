"""Image files that people bring, in any mode, and one kind of error for all that cannot be read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from .unreadable import UnreadableImage

BACKGROUND = (255, 255, 255)  # behind what is transparent


@contextmanager
def naming_unreadable(name: Callable[[], str]) -> Iterator[None]:
    """Whatever a decoder raises within it becomes an `UnreadableImage` of that name."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(name(), "there is no such file") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(name(), "no image, or of an unknown format") from error
    except Exception as error:  # decoders raise whatever they like on broken bytes
        raise UnreadableImage(name(), f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def read_photograph(path: str | Path) -> Tensor:
    """uint8 [3, height, width] of a file in any mode: grey, with a palette, 16 bits, transparent, turned by EXIF."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith(("I", "F")):
            image = _eight_bits(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
            image = Image.alpha_composite(ground, image)
        return pil_to_tensor(image.convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    if image.mode.startswith("I;16"):
        scaled = values / 257
    else:
        low, high = float(values.min()), float(values.max())
        scaled = 255 * (values - low) / (high - low or 1) if (low < 0 or high > 255) else values
    return Image.fromarray(scaled.round().astype(np.uint8))
