"""Images in folders, one folder per class: found in one walk, in timm's order."""

import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
from timm.data.readers.reader import Reader

from .images import open_regular, walk_names

_DIGITS = re.compile(r"(\d+)")


class LabelledFiles(Reader):
    """A timm reader of image files; `images` are (path, name of its class), in their order, and labels the places of
    the names in `classes`.

    The paths are kept as one text: a list of strings would be copied in every data worker, page by page, as soon as
    their reference counts change.
    """

    def __init__(self, root: Path, images: Iterable[tuple[str, str]], classes: Sequence[str]) -> None:
        super().__init__()
        label_of = {name: label for label, name in enumerate(classes)}
        self.root = root
        self.class_to_idx = label_of
        text, lengths, labels = bytearray(), array("q"), array("q")
        for place, name in images:
            path = os.fsencode(place)
            text += path
            lengths.append(len(path))
            labels.append(label_of[name])
        self._text, self._ends, self._labels = bytes(text), np.cumsum(lengths), np.array(labels)

    def sample(self, index: int) -> tuple[str, int]:
        """The path of an image, and its label."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._text[start : self._ends[index]]), int(self._labels[index])

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.sample(index)
        return open_regular(path), label

    def __len__(self) -> int:
        return len(self._labels)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = Path(self.sample(index)[0])
        return path.name if basename else str(path if absolute else path.relative_to(self.root))


class ImageFolder(LabelledFiles):
    """Of what `images_by_folder` found: a class is the name of a folder."""

    def __init__(self, root: Path, names: dict[str, list[str]], classes: Sequence[str]) -> None:
        images = ((os.path.join(place, name), os.path.basename(place)) for place, name in _sorted(names))
        super().__init__(root, images, classes)


def images_by_folder(folder: Path) -> dict[str, list[str]]:
    """Folder -> names of the images in it, of all below a folder; a ValueError without any, or where one is in no
    folder of a class."""
    names: dict[str, list[str]] = {}
    for place, name in walk_names(folder):
        names.setdefault(place, []).append(name)
    if not names or str(folder) in names:
        wrong = "there are images in it that are in no class folder" if names else "there are no images in it"
        raise ValueError(f"{folder} must have a folder of images for each class; {wrong}")
    return names


def class_names(names: dict[str, list[str]]) -> list[str]:
    """The names of the folders, in timm's order."""
    return sorted(set(map(os.path.basename, names)), key=natural_key)


def _sorted(names: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(folder, name) of all images in timm's order, that of their whole paths: folders may be nested. Folder by
    folder, since the keys of all images together would take more memory than all else."""
    folders = (zip(repeat(place), sorted(some, key=natural_key), strict=False) for place, some in names.items())
    return merge(*folders, key=lambda image: natural_key(os.path.join(*image)))


def natural_key(text: str) -> list[str | int]:
    """Sorts as timm does, numbers by their value: a2 before a10."""
    parts: list[str | int] = list(_DIGITS.split(text.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts
