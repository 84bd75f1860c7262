"""Webdataset shards on a disk, read in any order: the headers are scanned once, then every image is one seek away.

Streaming, as the package webdataset does it, knows neither a fixed order nor a place to resume at nor how many images a
rank will see, and its urls may name commands. Shards that lie on a disk need none of it.
"""

import io
import tarfile
from pathlib import Path
from typing import NamedTuple

from timm.data.readers.reader import Reader

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
SPLIT_WORDS = {"train": ("train",), "test": ("val", "test", "eval")}


class Entry(NamedTuple):
    """Where the bytes of an image lie, and its label."""

    shard: Path
    key: str
    offset: int
    size: int
    label: int


class TarShards(Reader):
    """A timm reader of .tar files with members KEY.jpg (or .jpeg, .png, .webp) and KEY.cls, the label as a number."""

    def __init__(self, shards: list[Path]) -> None:
        super().__init__()
        self.entries = [entry for shard in shards for entry in _scan(shard)]
        if not self.entries:
            raise ValueError(
                f"no images in {len(shards)} shards, the first {shards[0]}; "
                f"each needs KEY.cls beside KEY.{{{','.join(IMAGE_ENDINGS)}}}"
            )
        self.class_to_idx = {name: label for label, name in enumerate(self._class_names(shards[0].parent))}

    def _class_names(self, folder: Path) -> list[str]:
        number = max(entry.label for entry in self.entries) + 1
        listed = folder / "classes.txt"
        if not listed.exists():
            return [str(label) for label in range(number)]
        names = listed.read_text().split("\n")
        names = [name.strip() for name in names if name.strip()]
        if len(names) < number or len(set(names)) < len(names):
            raise ValueError(
                f"{listed} must name each of {number} classes on a line of its own, got {len(names)} names"
            )
        return names

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        entry = self.entries[index]
        with entry.shard.open("rb") as file:
            file.seek(entry.offset)
            return io.BytesIO(file.read(entry.size)), entry.label

    def __len__(self) -> int:
        return len(self.entries)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        entry = self.entries[index]
        return entry.key if basename else f"{entry.shard}:{entry.key}"


def find_shards(where: str | Path, split: str) -> list[Path]:
    """The .tar files of one split: a pattern names them, in a folder their names or their sub-folder tell."""
    folder, pattern = Path(where), "*.tar"
    if any(sign in folder.name for sign in "*?["):
        found = sorted(folder.parent.glob(folder.name))
    else:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} with the shards of a webdataset")
        shards = sorted([*folder.glob(pattern), *folder.glob(f"*/{pattern}")])
        found = [shard for shard in shards if any(word in _place(shard, folder) for word in SPLIT_WORDS[split])]
    if not found:
        raise FileNotFoundError(
            f"no shards for the split {split!r} in {where}; their names or folders must contain "
            f"{' or '.join(repr(word) for word in SPLIT_WORDS[split])}, as in {split}-0000.tar"
        )
    return found


def _place(shard: Path, folder: Path) -> str:
    return str(shard.relative_to(folder)).lower()


def _scan(shard: Path) -> list[Entry]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                key, _, ending = member.name.rpartition("/")[2].partition(".")
                key = member.name[: len(member.name) - len(ending) - 1]
                if not member.isreg():
                    continue
                if ending.lower() == "cls":
                    labels[key] = int(tar.extractfile(member).read())
                elif ending.lower() in IMAGE_ENDINGS:
                    images[key] = member.offset_data, member.size
    except (tarfile.TarError, ValueError) as error:
        raise ValueError(f"{shard} is not a webdataset shard: {error}") from None
    if negative := [key for key, label in labels.items() if label < 0]:
        raise ValueError(f"{shard}: the label of {negative[0]} is {labels[negative[0]]}, expected at least 0")
    return [Entry(shard, key, *place, labels[key]) for key, place in images.items() if key in labels]
