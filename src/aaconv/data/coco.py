"""Images with the boxes of their objects: COCO's format from any folder, and `shapes`, which needs none.

Annotations are checked when they are opened: what contradicts itself is a ValueError that names the file, and boxes
that cannot be used are left out, counted and logged in one line.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from ..utils.json_file import read_json
from ..utils.numbers import is_number, is_whole
from .datasets import SPLITS, ArrayDataset, default_data_dir, open_dataset
from .images import UnreadableImage, read_stored

SPLIT_NAMES = {"train": ("train", "train2017", "train2014"), "test": ("val", "val2017", "val2014", "test")}
NAMES = ("shapes", "coco", "coco/PATH")
MIN_SIDE = 1e-3
"""Boxes with a shorter side, in pixels, are not boxes."""
LARGEST_SIDE, LARGEST_AREA = 1_000_000, 1e12
"""Pixels: what is beyond is not an image."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Objects:
    """What is in one image: `boxes` float32 [n, 4] as x0, y0, x1, y1 in its pixels, `labels` int64 [n], indices of the
    classes, `areas` float32 [n], and `crowd` bool [n]: a group that training leaves out and evaluation forgives."""

    boxes: Tensor
    labels: Tensor
    areas: Tensor
    crowd: Tensor


@dataclass(frozen=True)
class DetectionDataset:
    """Images with boxes; `image_ids` and `category_ids` are those of the annotations, `read` gives image i as uint8
    [3, height, width] or raises `UnreadableImage`."""

    name: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    image_ids: tuple[int, ...]
    sizes: Tensor
    """int64 [images, 2]: height and width."""
    objects: tuple[Objects, ...]
    read: Callable[[int], Tensor] = field(repr=False)
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    chosen: Tensor | None = None

    def __len__(self) -> int:
        return len(self.image_ids) if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, Objects]:
        place = self.place(index)
        pixels = self.read(place)
        height, width = self.sizes[place].tolist()
        if pixels.shape[1:] != (height, width):
            found = f"is {pixels.shape[2]} x {pixels.shape[1]} pixels, its annotations say {width} x {height}"
            raise UnreadableImage(f"image {self.image_ids[place]} of {self.name}", found)
        return pixels, self.objects[place]

    def place(self, index: int) -> int:
        """Where the index-th image stands in image_ids, sizes and objects."""
        return range(len(self))[index] if self.chosen is None else int(self.chosen[index])

    def subset(self, indices: Tensor | Sequence[int]) -> "DetectionDataset":
        indices = torch.as_tensor(indices, dtype=torch.int64)
        return replace(self, chosen=indices if self.chosen is None else self.chosen[indices])

    def take(self, number: int, seed: int = 0) -> "DetectionDataset":
        """`number` images at random, the same for the same seed."""
        if not 1 <= number <= len(self):
            raise ValueError(f"number must be 1 to {len(self)}, the images there are, got {number}")
        return self.subset(torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:number])


def open_detection(
    name: str, data_dir: str | Path | None = None, split: str = "train", **options: Any
) -> DetectionDataset:
    """The training or the test images of a data set with boxes.

    name      shapes (options: size, number, seed), or coco/PATH: annotations/instances_{train,val}.json or
              instances_{train,val}2017.json, and the images in a folder named likewise. PATH is relative to data_dir;
              without one to this folder, or to where data lie by default. `coco` alone is data_dir itself, or coco
              where data lie by default.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    kind, _, rest = name.partition("/")
    if kind == "coco":
        if options:
            raise ValueError(f"the data set coco has no option {next(iter(options))!r}; it has none")
        return _open_coco(_coco_root(rest, data_dir), split)
    if name == "shapes":
        shapes = open_dataset("shapes", None, split, **options)
        assert isinstance(shapes, ArrayDataset)
        return from_arrays(shapes)
    if Path(name).is_dir() and (Path(name) / "annotations").is_dir():
        return _open_coco(Path(name), split)
    near = get_close_matches(name, ("shapes", "coco"), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(NAMES)}"
    raise ValueError(f"unknown data set with boxes {name!r}; {hint}")


def from_arrays(dataset: ArrayDataset) -> DetectionDataset:
    """A small data set whose objects have boxes."""
    if dataset.boxes is None or dataset.kinds is None:
        raise ValueError(f"the data set {dataset.name} has no boxes")
    number, height, width = dataset.images.shape[:3]
    sides = dataset.boxes[..., 2:] - dataset.boxes[..., :2]
    nothing = torch.zeros(dataset.boxes.shape[1], dtype=torch.bool)
    columns = zip(dataset.boxes, dataset.kinds, sides.prod(-1), strict=True)
    return DetectionDataset(
        name=dataset.name,
        classes=dataset.kind_names,
        category_ids=tuple(range(1, len(dataset.kind_names) + 1)),
        image_ids=tuple(range(1, number + 1)),
        sizes=torch.tensor([height, width]).expand(number, 2),
        objects=tuple(Objects(boxes, kinds, areas, nothing) for boxes, kinds, areas in columns),
        read=_ArrayReader(dataset.images),
        mean=dataset.mean,
        std=dataset.std,
    )


@dataclass(frozen=True)
class _ArrayReader:
    images: Tensor

    def __call__(self, index: int) -> Tensor:
        return self.images[index].permute(2, 0, 1)


@dataclass(frozen=True)
class _FileReader:
    folder: Path
    files: tuple[str, ...]

    def __call__(self, index: int) -> Tensor:
        return read_stored(self.folder / self.files[index])


def _coco_root(rest: str, data_dir: str | Path | None) -> Path:
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"the data folder {data_dir} does not exist")
    if data_dir is not None:
        return Path(data_dir) / rest
    if rest and (Path(rest).is_dir() or Path(rest).is_absolute()):
        return Path(rest)
    return default_data_dir() / (rest or "coco")


def _open_coco(root: Path, split: str) -> DetectionDataset:
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root} with COCO's annotations/ and images")
    names = SPLIT_NAMES[split]
    files = [root / "annotations" / f"instances_{name}.json" for name in names]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{root} has no annotations of {split} images; expected {' or '.join(map(str, files))}")
    same = file.stem.removeprefix("instances_")
    folders = [root / name for name in (same, *names)] + [root / "images" / name for name in (same, *names)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"{root} has no folder of {split} images; expected {root / same}")
    return read_annotations(file, folder)


def read_annotations(file: str | Path, folder: str | Path) -> DetectionDataset:
    """The images of a COCO annotation file, which lie in `folder`."""
    file = Path(file)
    content = read_json(file)
    lists: dict[str, Any] = {name: content.get(name) if isinstance(content, dict) else None for name in _FIELDS}
    for name, entries in lists.items():
        if not isinstance(entries, list):
            raise ValueError(f"{file} is not in COCO's format: it has no list of {name!r}")
        for entry in entries:
            if missing := [key for key in _FIELDS[name] if not isinstance(entry, dict) or key not in entry]:
                raise ValueError(f"{file}: an entry of {name!r} has no {missing[0]!r}: {str(entry)[:80]}")
    images = _by_id(file, "images", lists["images"])
    categories = _by_id(file, "categories", lists["categories"])
    if not images or not categories:
        raise ValueError(f"{file} has no {'images' if not images else 'categories'}")
    category_ids = sorted(categories)
    return DetectionDataset(
        name=file.parent.parent.resolve().name,
        classes=tuple(str(categories[number]["name"]) for number in category_ids),
        category_ids=tuple(category_ids),
        image_ids=tuple(images),
        sizes=torch.tensor([_size(file, image) for image in images.values()]),
        objects=_objects(file, images, category_ids, lists["annotations"]),
        read=_FileReader(Path(folder), tuple(str(image["file_name"]) for image in images.values())),
    )


_FIELDS = {
    "images": ("id", "file_name", "width", "height"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id", "bbox"),
}


def _by_id(file: Path, what: str, entries: list[dict]) -> dict[int, dict]:
    found: dict[int, dict] = {}
    for entry in entries:
        if not is_whole(entry["id"]):
            wrong = repr(entry["id"])[:40]
            raise ValueError(f"{file}: the id of an entry of {what!r} must be a whole number, got {wrong}")
        if entry["id"] in found:
            raise ValueError(f"{file}: the id {entry['id']} stands twice in {what!r}")
        found[entry["id"]] = entry
    return found


def _size(file: Path, image: dict) -> tuple[int, int]:
    size = image["height"], image["width"]
    if not all(is_whole(side) and 0 < side <= LARGEST_SIDE for side in size):
        found = " and ".join(repr(side)[:20] for side in size)
        raise ValueError(f"{file}: image {image['id']} must have a height and a width, got {found}")
    return size


def _objects(file: Path, images: dict[int, dict], category_ids: list[int], entries: list[dict]) -> tuple[Objects, ...]:
    """Per image its usable objects, in the order of the file; the others are counted and logged."""
    label_of = {number: label for label, number in enumerate(category_ids)}
    rows: dict[int, list[tuple]] = {number: [] for number in images}
    wrong: Counter[str] = Counter()
    for entry in entries:
        image_id, category_id, box = entry["image_id"], entry["category_id"], _box(entry["bbox"])
        if not is_whole(image_id) or image_id not in images:
            wrong["of an unknown image"] += 1
        elif not is_whole(category_id) or category_id not in label_of:
            known = is_whole(category_id) or isinstance(category_id, str)
            wrong[f"of the unknown category {str(category_id)[:40]}" if known else "without a category"] += 1
        elif box is None:
            wrong["that are not four numbers"] += 1
        elif min(box[2] - box[0], box[3] - box[1]) < MIN_SIDE:
            wrong["without an area"] += 1
        else:
            image = images[image_id]
            x0, x1 = (min(max(x, 0.0), image["width"]) for x in box[::2])
            y0, y1 = (min(max(y, 0.0), image["height"]) for y in box[1::2])
            if min(x1 - x0, y1 - y0) < MIN_SIDE:
                wrong["outside of their image"] += 1
                continue
            area = entry.get("area") or (x1 - x0) * (y1 - y0)
            if not is_number(area) or not 0 < area < LARGEST_AREA:
                wrong["with an area that is none"] += 1
                continue
            rows[image_id].append(((x0, y0, x1, y1), label_of[category_id], float(area), bool(entry.get("iscrowd"))))
    if wrong:
        _logger.warning("%s: left out boxes %s", file, ", ".join(f"{why} ({number})" for why, number in wrong.items()))
    return tuple(_stack(of_image) for of_image in rows.values())


def _box(values: Any) -> tuple[float, float, float, float] | None:
    """x0, y0, x1, y1 of COCO's x, y, width, height; None where it is not that."""
    if not isinstance(values, list) or len(values) != 4 or not all(map(is_number, values)):
        return None
    x, y, width, height = map(float, values)
    return (x, y, x + width, y + height)


def _stack(rows: list[tuple]) -> Objects:
    boxes, labels, areas, crowd = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Objects(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(areas, dtype=torch.float32),
        torch.tensor(crowd, dtype=torch.bool),
    )
