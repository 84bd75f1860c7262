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
MOST_CLASSES = 100_000
"""Without a list of them, unless there are more images: memory must not follow a label that is a slip of the pen."""
LABEL_BYTES = 100
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
        """Of classes.txt, which says how many there are; without it as many as the labels want."""
        largest = max(self.entries, key=lambda entry: entry.label)
        listed = folder / "classes.txt"
        if not listed.exists():
            most = max(MOST_CLASSES, len(self.entries))
            if largest.label >= most:
                raise ValueError(
                    f"{largest.shard}: the label of {largest.key} is {_short(largest.label)}, expected less than "
                    f"{most:,}; {listed} may name more classes, one per line"
                )
            return [str(label) for label in range(largest.label + 1)]
        names = listed.read_text(encoding="utf-8").split("\n")
        names = [name.strip() for name in names if name.strip()]
        if len(names) <= largest.label or len(set(names)) < len(names):
            wanted = _short(largest.label + 1)
            raise ValueError(
                f"{listed} must name each of {wanted} classes on a line of its own, got {len(names)} names"
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
        with _Bounded(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                key, _, ending = member.name.rpartition("/")[2].partition(".")
                key = member.name[: len(member.name) - len(ending) - 1]
                if not member.isreg():
                    continue
                if member.size < 0 or member.offset_data + member.size > file.size:
                    raise tarfile.ReadError(f"{member.name[:80]} ends beyond the end of the file")
                if ending.lower() == "cls":
                    content = tar.extractfile(member)
                    assert content is not None  # of a regular file
                    labels[key] = int(content.read(LABEL_BYTES + 1)[: LABEL_BYTES + 1])
                elif ending.lower() in IMAGE_ENDINGS:
                    images[key] = member.offset_data, member.size
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise ValueError(f"{shard} is not a webdataset shard: {error}") from None
    if negative := [key for key, label in labels.items() if label < 0]:
        raise ValueError(f"{shard}: the label of {negative[0]} is {labels[negative[0]]}, expected at least 0")
    return [Entry(shard, key, *place, labels[key]) for key, place in images.items() if key in labels]


class _Bounded(io.FileIO):
    """A file of which nobody can ask for more than there is: a header may claim any size, and it would be allocated."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size = path.stat().st_size

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _short(number: int) -> str:
    return str(number) if number < 10**20 else f"a number of {number.bit_length()} bits"
