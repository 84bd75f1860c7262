"""Images in folders, one folder per class: found in one walk, in timm's order."""

import re
from pathlib import Path
from typing import BinaryIO

from timm.data.readers.reader import Reader

from .images import open_regular, walk_images


class ImageFolder(Reader):
    """A timm reader of files that `find_labelled` found; their labels are the places of their folders in `classes`."""

    def __init__(self, root: Path, images: list[tuple[str, str]], classes: list[str]) -> None:
        super().__init__()
        label_of = {name: label for label, name in enumerate(classes)}
        self.root = root
        self.class_to_idx = label_of
        self.samples = [(path, label_of[name]) for path, name in images]

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.samples[index]
        return open_regular(path), label

    def __len__(self) -> int:
        return len(self.samples)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = Path(self.samples[index][0])
        return path.name if basename else str(path if absolute else path.relative_to(self.root))


def find_labelled(folder: Path) -> list[tuple[str, str]]:
    """(path, name of the folder it lies in) of all images below a folder, in timm's order; a ValueError without any,
    or where one is in no folder of a class."""
    found = [(str(path), path.parent.name if path.parent != folder else "") for path in walk_images(folder)]
    if not found or any(not name for _, name in found):
        wrong = "there are no images in it" if not found else "there are images in it that are in no class folder"
        raise ValueError(f"{folder} must have a folder of images for each class; {wrong}")
    return sorted(found, key=lambda image: natural_key(image[0]))


def class_folders(images: list[tuple[str, str]]) -> list[str]:
    """The names of the folders, in timm's order."""
    return sorted({name for _, name in images}, key=natural_key)


def natural_key(text: str) -> list[str | int]:
    """Sorts as timm does, numbers by their value: a2 before a10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", text.lower()))]
