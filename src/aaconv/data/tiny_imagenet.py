"""Tiny-ImageNet: 100,000 + 10,000 photographs of 64 x 64 pixels, 200 of ImageNet's classes, as its archive unpacks.

    tiny-imagenet-200/wnids.txt                       the classes, one per line
    tiny-imagenet-200/train/<class>/images/*.JPEG     500 each
    tiny-imagenet-200/val/images/*.JPEG               10,000
    tiny-imagenet-200/val/val_annotations.txt         file <tab> class <tab> box, one per line

Its words.txt is not needed: `class_title` knows the names. The test images have no labels; val is what is evaluated on.

Every file of a split is read once before its images are used, and must be what github.com/seshuad/IMagenet has. In the
folder tiny-imagenet-200, what MD5 holds is printed by

    find train -name '*.JPEG' | LC_ALL=C sort | xargs md5sum | md5sum
    find val -type f | LC_ALL=C sort | xargs md5sum | md5sum
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .image_folder import natural_key
from .images import UnreadableImage, naming_unreadable, open_regular

FOLDER, SIDE = "tiny-imagenet-200", 64
CLASSES, TRAIN, VAL = 200, 500, 50
"""Classes, and the images of each in either part."""
MD5 = {"train": "7a50f1dc55a22c7b3a5479f8bfced819", "test": "b39822c10e51d6f57ea99a35b85ebb32"}
# of the training pixels
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)


def find(root: Path, split: str) -> tuple[Path, list[tuple[str, str]], tuple[str, ...]]:
    """The folder of a split, (path, class) of its images, and the classes; an OSError says what is missing or changed.

    root: the folder tiny-imagenet-200, or the one around it.
    """
    folder = root if (root / "wnids.txt").is_file() else root / FOLDER
    if not (folder / "wnids.txt").is_file():
        raise FileNotFoundError(
            f"there is no {folder / 'wnids.txt'}; unpack tiny-imagenet-200.zip into {root}, or name its folder as the "
            "data folder"
        )
    classes = tuple(sorted((folder / "wnids.txt").read_text(encoding="utf-8").split()))
    if len(set(classes)) != CLASSES:
        raise OSError(f"{folder / 'wnids.txt'} has {len(set(classes))} classes, expected {CLASSES}; unpack it again")
    images = _train(folder, classes) if split == "train" else _val(folder)
    _check(folder / ("train" if split == "train" else "val"), images, classes, TRAIN if split == "train" else VAL)
    _check_md5(folder, images, split)
    return folder, sorted(images, key=lambda image: natural_key(image[0])), classes


def _train(folder: Path, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(str(path), name) for name in classes for path in (folder / "train" / name / "images").glob("*.JPEG")]


def _val(folder: Path) -> list[tuple[str, str]]:
    """The images that are there, with the classes that val_annotations.txt has for them."""
    file = folder / "val" / "val_annotations.txt"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, which has the classes of the images; unpack it again")
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines() if line]
    if any(len(row) < 2 for row in rows):
        raise OSError(f"{file} is damaged: a line is not a file and a class, separated by a tab; unpack it again")
    there = {path.name: str(path) for path in (folder / "val" / "images").glob("*.JPEG")}
    return [(there[name], label) for name, label, *_ in rows if name in there]


def _check(folder: Path, images: list[tuple[str, str]], classes: tuple[str, ...], expected: int) -> None:
    """An OSError names the first class that has not as many images as it should."""
    found = Counter(label for _, label in images)
    if unknown := sorted(found.keys() - set(classes)):
        raise OSError(f"{folder} has images of {unknown[0]!r}, which wnids.txt does not have; unpack it again")
    if wrong := [name for name in classes if found[name] != expected]:
        raise OSError(
            f"{folder} is not complete: {wrong[0]} has {found[wrong[0]]} images, expected {expected}, and "
            f"{len(wrong)} of {len(classes)} classes are like it; unpack tiny-imagenet-200.zip again"
        )


def _check_md5(folder: Path, images: list[tuple[str, str]], split: str) -> None:
    """An OSError where not all that is read is as published; wnids.txt is, where the classes of the images fit it."""
    part, others = ("train", ()) if split == "train" else ("val", (str(folder / "val" / "val_annotations.txt"),))
    if (found := _digest(folder, [*others, *(path for path, _ in images)])) != MD5[split]:
        raise OSError(
            f"the {len(images):,} images in {folder / part} are not those of Tiny-ImageNet (md5 {found}, expected "
            f"{MD5[split]}): some are damaged or changed; unpack it again, or to use them as they are, sort them into "
            "PATH/train/CLASS and PATH/val/CLASS and name that folder/PATH as the data"
        )


def _digest(folder: Path, files: Iterable[str]) -> str:
    """The md5 of what md5sum prints of the files, in the order of their paths in the folder."""
    start, total, file = len(str(folder / "_")) - 1, hashlib.md5(usedforsecurity=False), ""
    try:
        with naming_unreadable(lambda: file):
            for file in sorted(files):
                with open_regular(file) as opened:
                    one = hashlib.md5(opened.read(), usedforsecurity=False)
                total.update(f"{one.hexdigest()}  {file[start:].replace(os.sep, '/')}\n".encode())
    except UnreadableImage as error:
        raise OSError(f"{error.name} cannot be read: {error.reason}; unpack it again") from None
    return total.hexdigest()
