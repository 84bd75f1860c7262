"""Image files that people bring, in any mode, and one kind of error for all that cannot be read."""

import glob
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor

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


IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


LIMIT = 50


_logger = logging.getLogger(__name__)


class UnreadableImage(Exception):
    """One image that cannot be decoded: `name` says which, `reason` why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


class Skipped:
    """The unreadable images met so far, by name; one that is met again is not counted again."""

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 0:
            raise ValueError(f"the limit of unreadable images must be at least 0, got {limit}")
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, image: UnreadableImage) -> None:
        """Log the image; more than `limit` of them are an OSError."""
        if image.name in self.reasons:
            return
        self.reasons[image.name] = image.reason
        if len(self) > self.limit:
            first, reason = next(iter(self.reasons.items()))
            raise OSError(
                f"{len(self)} images cannot be read, the limit is {self.limit}; the first is {first}: {reason}"
            )
        _logger.warning(
            "skipped an unreadable image (%d of at most %d): %s: %s", len(self), self.limit, image.name, image.reason
        )


LONGEST = 4  # times the shorter side: what the middle of an image is cut out of


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """The files that are meant: a file itself, all images below a folder, what fits a pattern; each once."""
    found: dict[Path, None] = {}
    for place in map(str, places):
        if Path(place).is_dir():
            below = sorted(p for p in Path(place).rglob("*") if p.suffix.lower() in IMAGE_ENDINGS and p.is_file())
            if not below:
                raise FileNotFoundError(f"there are no images in the folder {place}")
        elif Path(place).exists():
            below = [Path(place)]
        elif glob.has_magic(place):
            below = [Path(name) for name in sorted(glob.glob(place, recursive=True)) if Path(name).is_file()]
            if not below:
                raise FileNotFoundError(f"no file fits the pattern {place}")
        else:
            raise FileNotFoundError(f"there is no image or folder {place}")
        found |= dict.fromkeys(below)
    return list(found)


def read_image(path: str | Path) -> Tensor:
    """uint8 [3, height, width] of a file. Of a very long image only the middle: the rest would be cut off anyway."""
    pixels = read_photograph(path)
    longest = LONGEST * min(pixels.shape[1:])
    return F.center_crop(pixels, [min(length, longest) for length in pixels.shape[1:]])
