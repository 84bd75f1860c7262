"""Image files: finding them, decoding them, and one kind of error for all that cannot be read.

`read_stored` gives the pixels as they lie in the file, which is what labels and boxes of a data set are about;
`read_photograph` gives them as a person sees them. Both decode once, at most AACONV_MAX_PIXELS pixels.
"""

import glob
import logging
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

BACKGROUND = (255, 255, 255)  # behind what is transparent
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
MAX_PIXELS = 120_000_000
"""Of one image, unless the environment variable AACONV_MAX_PIXELS says otherwise: phones take 108 megapixels."""
MAX_UNREADABLE = 50

_logger = logging.getLogger(__name__)


class UnreadableImage(Exception):
    """One image that cannot be decoded: `name` says which, `reason` why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


class Skipped:
    """The unreadable images met so far, by name; one that is met again is not counted again."""

    def __init__(self, limit: int = MAX_UNREADABLE) -> None:
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


class _Refused(Exception):
    """An image that is not decoded; the text is the whole reason."""


@contextmanager
def naming_unreadable(name: Callable[[], str]) -> Iterator[None]:
    """Whatever a decoder raises within it becomes an `UnreadableImage` of that name."""
    try:
        yield
    except (MemoryError, UnreadableImage):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(name(), "there is no such file") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(name(), "not an image, or of an unknown format") from error
    except _Refused as error:
        raise UnreadableImage(name(), str(error)) from None
    except Exception as error:  # decoders raise whatever they like on broken bytes
        raise UnreadableImage(name(), f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def read_stored(path: str | Path) -> Tensor:
    """uint8 [3, height, width] of an image file, in RGB, as it is stored; `UnreadableImage` says what is wrong."""
    with naming_unreadable(lambda: str(path)), open_regular(path) as file:
        return decode_stored(file)


def read_photograph(path: str | Path) -> Tensor:
    """uint8 [3, height, width] of a file in any mode: grey, with a palette, 16 bits, transparent, turned by EXIF."""
    with naming_unreadable(lambda: str(path)), open_regular(path) as file, _opened(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image = _eight_bits(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
            image = Image.alpha_composite(ground, image)
        return _pixels(image)


def decode_stored(file: BinaryIO) -> Tensor:
    """uint8 [3, height, width] of an open file, as `read_stored`; raises what the decoder does."""
    with _opened(file) as image:
        return _pixels(_eight_bits(image))


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file, opened to be read; anything else is refused without waiting for it."""
    # A FIFO would wait for a writer; Windows has none, but would change the ends of lines.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _Refused("a folder, not an image" if Path(path).is_dir() else "not a regular file")
    return os.fdopen(handle, "rb")


def max_pixels() -> int:
    """The pixels that one image may have."""
    text = os.environ.get("AACONV_MAX_PIXELS") or str(MAX_PIXELS)
    if not text.isdecimal() or not 1 <= int(text) < 2**62:
        raise ValueError(f"AACONV_MAX_PIXELS must be a whole number of pixels, at least 1, got {text!r}")
    return int(text)


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """An image, not decoded yet. Pillow's limit, which it looks at whenever it makes an image, is ours within."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        pixels = re.search(r"\((\d+) pixels", str(error))
        found = f"it has {int(pixels[1]):,} pixels, " if pixels else ""
        limit = f"more than the limit of {Image.MAX_IMAGE_PIXELS:,}"
        raise _Refused(f"{found}{limit}; AACONV_MAX_PIXELS=N in the environment raises it") from None
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _pixels(image: Image.Image) -> Tensor:
    return pil_to_tensor(image if image.mode == "RGB" else image.convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 or 32 bits or floats as bytes; what lies beyond 0 to 255 is stretched over it."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image).astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        if not finite.any():
            raise _Refused("none of its pixels is a finite number")
        values[~finite] = values[finite].min()
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16"):
        values /= 257
    elif low < 0 or high > 255:
        values = (values - low) * (255 / (high - low or 1))
    elif image.mode == "F" and high <= 1:
        values *= 255
    return Image.fromarray(values.round().astype(np.uint8))


def find_images(places: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files that are meant: a file itself, all images below a folder, what fits a pattern; each once."""
    found: dict[Path, None] = {}
    for place in map(str, [places] if isinstance(places, str | Path) else places):
        if Path(place).is_dir():
            below = sorted(walk_images(Path(place)))
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


def walk_images(folder: Path) -> Iterator[Path]:
    """All image files below a folder, in no order."""
    return (Path(place, name) for place, name in walk_names(folder))


def walk_names(folder: Path) -> Iterator[tuple[str, str]]:
    """The same as (folder, name), both text: of a million files, paths would take most of the time.

    Links are followed, but no folder is entered twice: they may lead back. What is not a file, such as a FIFO, is left
    out; a link to nothing is not, and will be reported as unreadable.
    """
    waiting, seen = [str(folder)], set()
    while waiting:
        place = waiting.pop()
        try:
            about, entries = os.stat(place), sorted(os.scandir(place), key=lambda entry: entry.name, reverse=True)
        except OSError:
            continue  # a folder that nobody may look into
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        for entry in entries:
            kind = _kind(entry)
            if kind == "folder":
                waiting.append(os.path.join(place, entry.name))
            elif kind != "other" and os.path.splitext(entry.name)[1].lower() in IMAGE_ENDINGS:
                yield place, entry.name


def _kind(entry: os.DirEntry) -> str:
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() or not os.path.exists(entry.path) else "other"
    except OSError:  # a link to itself
        return "broken"
