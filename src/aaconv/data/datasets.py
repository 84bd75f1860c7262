"""Data sets by name: `open_dataset("cifar100")` and so on. Images come as uint8 tensors, nothing is augmented here.

Nothing that is read can run code, with one exception that is guarded: the official CIFAR files are pickles. Their md5
sums are compared with the published ones before they are opened, and files that differ are refused.
"""

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import calculate_md5

from . import shapes, tar_shards, tiny_imagenet
from .image_folder import ImageFolder, LabelledFiles, class_names, images_by_folder
from .images import decode_stored, naming_unreadable
from .transforms import CropAndFlip

SPLITS = ("train", "test")
SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("val", "validation", "valid", "test", "eval")}
NAMES = (
    "shapes",
    "cifar10",
    "cifar100",
    "tiny-imagenet",
    "imagenet",
    "folder/PATH",
    "wds/PATH",
    "hfds/NAME",
)
WITH_PATH = ("folder", "wds", "hfds")
OPTIONS = {"shapes": ("size", "number", "seed", "distance"), "hfds": ("input_key", "target_key")}
CIFAR_STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@dataclass(frozen=True)
class ArrayDataset:
    """A small data set that lies in memory as a whole.

    `images` uint8 [number, height, width, 3], `labels` int64 [number]; where there are objects, their `boxes` float32
    [number, objects, 4] as x0, y0, x1, y1 in pixels and `kinds` int64 [number, objects], indices of `kind_names`.
    `mean` and `std` are those of the training pixels, 0..1; `augmentation` is what training on it does.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: CropAndFlip
    boxes: Tensor | None = None
    kinds: Tensor | None = None
    kind_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def side(self) -> int:
        """Height and width of the images."""
        return self.images.shape[1]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image uint8 [3, height, width] and label."""
        return self.images[index].permute(2, 0, 1), int(self.labels[index])

    def take(self, number: int, seed: int = 0) -> "ArrayDataset":
        """`number` images at random, the same for the same seed."""
        chosen = _choose(number, len(self), seed)
        arrays = {name: getattr(self, name) for name in ("images", "labels", "boxes", "kinds")}
        return replace(self, **{name: array[chosen] for name, array in arrays.items() if array is not None})


@dataclass(frozen=True)
class FileDataset:
    """Images behind one of timm's readers, decoded one by one; one that cannot be raises `UnreadableImage`.

    `side` is the height and width of all images, None where they differ; where there is one, `augmentation` is what
    training on it does.
    """

    name: str
    reader: Any
    classes: tuple[str, ...]
    chosen: Tensor | None = None
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    side: int | None = None
    augmentation: CropAndFlip | None = None

    def __len__(self) -> int:
        return len(self.reader if self.chosen is None else self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image uint8 [3, height, width] and label."""
        index = range(len(self))[index] if self.chosen is None else int(self.chosen[index])
        with naming_unreadable(lambda: self._file_name(index)):
            file, label, *_ = self.reader[index]
            with file:
                pixels = decode_stored(file)
        if label not in range(len(self.classes)):
            last = len(self.classes) - 1
            raise ValueError(
                f"{self._file_name(index)} has the label {label}, expected 0 to {last}: is it a labelled split?"
            )
        return pixels, int(label)

    def _file_name(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True) or f"image {index} of {self.name}")

    def take(self, number: int, seed: int = 0) -> "FileDataset":
        """`number` images at random, the same for the same seed."""
        chosen = _choose(number, len(self), seed)
        return replace(self, chosen=chosen if self.chosen is None else self.chosen[chosen])


Dataset = ArrayDataset | FileDataset


def open_dataset(name: str, data_dir: str | Path | None = None, split: str = "train", **options: Any) -> Dataset:
    """The training or the test images of a data set.

    name       shapes, cifar10, cifar100, tiny-imagenet, imagenet, a folder of images (its path, or folder/PATH: one
               folder per class, within train/ and val/ where there are both), wds/PATH (webdataset shards on a disk),
               or hfds/NAME (Hugging Face; needs the package datasets)
    data_dir   where CIFAR's official files, tiny-imagenet-200, ImageNet's two folders or Hugging Face's cache lie;
               paths in names are relative to it. Default: $AACONV_DATA, or ~/.cache/aaconv/data
    options    shapes: size, number, seed, distance (shapes:distance=24 names it); hfds: input_key, target_key (columns)
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"the data folder {data_dir} does not exist")
    if name.startswith("shapes:"):
        name, options = "shapes", options | shapes.options_of(name)
    kind, _, rest = name.partition("/")
    complete = kind in OPENERS and (not rest if kind not in WITH_PATH else rest or kind == "folder")
    if complete:
        _check_options(kind, options)
        return OPENERS[kind](rest, data_dir, split, **options)
    if name and Path(name).is_dir():
        _check_options("folder", options)
        return _open_folder(str(Path(name).resolve()), None, split)
    hint = f"choose one of {', '.join(NAMES)}"
    if near := get_close_matches(kind, OPENERS, n=1):
        hint = f"did you mean {near[0] + '/' + (rest or 'PATH') if near[0] in WITH_PATH else near[0]!r}?"
    raise ValueError(f"unknown data set or folder {name!r}; {hint}")


def _check_options(kind: str, options: dict[str, Any]) -> None:
    for option in options:
        if option not in OPTIONS.get(kind, ()):
            known = f"it has {', '.join(OPTIONS[kind])}" if kind in OPTIONS else "it has none"
            raise ValueError(f"the data set {kind} has no option {option!r}; {known}")


def default_data_dir() -> Path:
    """Where data lie and are downloaded to by default."""
    return Path(os.environ.get("AACONV_DATA") or "~/.cache/aaconv/data").expanduser()


def _open_shapes(
    rest: str,
    data_dir: object,
    split: str,
    *,
    size: int = 32,
    number: int | None = None,
    seed: int = 0,
    distance: int | None = None,
) -> ArrayDataset:
    number = number or {"train": 20_000, "test": 5_000}[split]
    # Even seeds of the drawing for training, odd ones for tests: no seed shares an image with another.
    drawing = shapes.draw(number, size, seed=2 * seed + (split == "test"), distance=distance)
    return ArrayDataset(
        name="shapes" if distance is None else f"shapes:distance={distance}",
        images=drawing.images,
        labels=drawing.labels,
        classes=shapes.CLASSES,
        mean=(0.3, 0.3, 0.3),
        std=(0.12, 0.12, 0.12),
        augmentation=CropAndFlip(pad=0),
        boxes=drawing.boxes,
        kinds=drawing.kinds,
        kind_names=shapes.KINDS,
    )


def _cifar_opener(name: str, official: type[CIFAR10]) -> Callable[..., ArrayDataset]:
    def open_cifar(rest: str, data_dir: str | Path | None, split: str) -> ArrayDataset:
        root = Path(data_dir or default_data_dir())
        if root.name == official.base_folder:
            root = root.parent
        _check_cifar(name, official, root)
        files = official(root, train=split == "train")
        mean, std = CIFAR_STATISTICS[name]
        images, labels = torch.from_numpy(files.data), torch.tensor(files.targets)
        return ArrayDataset(name, images.contiguous(), labels, tuple(files.classes), mean, std, CropAndFlip())

    return open_cifar


def _check_cifar(name: str, official: type[CIFAR10], root: Path) -> None:
    """Only the published bytes are ever unpickled: md5 first. Missing files are downloaded where there is a network."""
    folder = root / official.base_folder
    published = {**dict(official.train_list + official.test_list), official.meta["filename"]: official.meta["md5"]}
    if not any((folder / file).exists() for file in published):
        _download_cifar(name, official, root)
    for file, md5 in published.items():
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is missing; {_how_to_get(official, root)}")
        if (found := calculate_md5(folder / file)) != md5:
            raise ValueError(
                f"{folder / file} is not the published file of {name} (md5 {found}, expected {md5}) and is not opened: "
                f"it is damaged or another; remove the folder, then {_how_to_get(official, root)}"
            )


def _download_cifar(name: str, official: type[CIFAR10], root: Path) -> None:
    """Into a folder beside, which is moved when it is complete: killed runs and other processes do no harm."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=root) as draft, _network_timeout(30):
            official(draft, download=True)
            _move_unless_there(Path(draft) / official.base_folder, root / official.base_folder)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{name} is not in {root} and cannot be downloaded ({error}); {_how_to_get(official, root)}, "
            "or name its folder as the data folder"
        ) from None


def _move_unless_there(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _how_to_get(official: type[CIFAR10], root: Path) -> str:
    return f"unpack {official.url} there, so that {root / official.base_folder} holds the files"


def _open_tiny_imagenet(rest: str, data_dir: str | Path | None, split: str) -> FileDataset:
    folder, images, classes = tiny_imagenet.find(Path(data_dir or default_data_dir()), split)
    reader = LabelledFiles(folder, images, classes)
    statistics = tiny_imagenet.MEAN, tiny_imagenet.STD
    pad = CropAndFlip(pad=tiny_imagenet.SIDE // 8)  # as CIFAR's 4 of 32
    return FileDataset("tiny-imagenet", reader, classes, None, *statistics, side=tiny_imagenet.SIDE, augmentation=pad)


def _open_imagenet(rest: str, data_dir: str | Path | None, split: str) -> FileDataset:
    root = Path(data_dir or default_data_dir() / "imagenet")
    if not root.is_dir():
        raise FileNotFoundError(
            f"there is no folder {root}; ImageNet must lie there as train/<class>/ and val/<class>/"
        )
    return replace(_open_folder(str(root), None, split), name="imagenet")


def _open_folder(rest: str, data_dir: str | Path | None, split: str) -> FileDataset:
    if not rest and data_dir is None:
        raise ValueError("folder needs a path: folder/PATH, or the data folder")
    root = Path(data_dir or ".") / rest
    # A tar is read by timm together with an index that lies beside it as a pickle.
    if root.suffix == ".tar":
        raise ValueError(f"{root} must be unpacked first (tar xf), or be read as webdataset shards: wds/PATH")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root} with images; --data-dir, or folder/PATH, says where it is")
    folders = {name: next(_sub_folders(root, name), None) for name in SPLITS}
    if folders[split] is None and (split == "test" or folders["test"] is not None):
        expected = " or ".join(SPLIT_FOLDERS[split])
        raise FileNotFoundError(f"{root} has no folder of {split} images; expected one named {expected}")
    folder = folders[split] or root
    names = images_by_folder(folder)
    classes = class_names(names if folders["train"] in (None, folder) else images_by_folder(folders["train"]))
    if unknown := sorted(set(class_names(names)) - set(classes)):
        raise ValueError(f"{folder} has a class {unknown[0]!r} that {folders['train']} does not have")
    return FileDataset(root.resolve().name, ImageFolder(folder, names, classes), tuple(classes))


def _sub_folders(root: Path, split: str) -> Iterator[Path]:
    return (root / name for name in SPLIT_FOLDERS[split] if (root / name).is_dir())


def _open_shards(rest: str, data_dir: str | Path | None, split: str) -> FileDataset:
    where = Path(data_dir or ".") / rest
    reader = tar_shards.TarShards(tar_shards.find_shards(where, split))
    return FileDataset(where.name, reader, tuple(reader.class_to_idx))


def _open_hugging_face(rest: str, data_dir: str | Path | None, split: str, **options: str) -> FileDataset:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"hfds/{rest} needs the package datasets: pip install datasets")
    reader = _hugging_face_reader(rest, data_dir, ("train",) if split == "train" else ("validation", "test"), options)
    target = options.get("target_key", "label")
    classes: Sequence[str] | None = getattr(reader.dataset.features.get(target), "names", None)
    if not classes:
        columns = ", ".join(reader.dataset.features)
        raise ValueError(
            f"hfds/{rest}: {target!r} is not a column of class labels; it has {columns}: choose target_key"
        )
    return FileDataset(rest, reader, tuple(classes))


def _hugging_face_reader(rest: str, data_dir: str | Path | None, splits: Sequence[str], options: dict[str, Any]) -> Any:
    """timm's reader of the first of the splits that the data set has."""
    root = None if data_dir is None else str(data_dir)
    for split in splits:
        try:
            return create_dataset(f"hfds/{rest}", root=root, split=split, trust_remote_code=False, **options).reader
        except ValueError as error:
            if split == splits[-1] or "split" not in str(error).lower():
                raise
        except (AttributeError, KeyError) as error:
            raise ValueError(f"hfds/{rest} has no such columns: {error}; choose input_key and target_key") from error
    raise AssertionError("unreachable: there is at least one split")


def _choose(number: int, available: int, seed: int) -> Tensor:
    if not 1 <= number <= available:
        raise ValueError(f"can take 1 to {available} images, got {number}")
    return torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:number]


OPENERS: dict[str, Callable[..., Dataset]] = {
    "shapes": _open_shapes,
    "cifar10": _cifar_opener("cifar10", CIFAR10),
    "cifar100": _cifar_opener("cifar100", CIFAR100),
    "tiny-imagenet": _open_tiny_imagenet,
    "imagenet": _open_imagenet,
    "folder": _open_folder,
    "wds": _open_shards,
    "hfds": _open_hugging_face,
}
