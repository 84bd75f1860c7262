"""What images show, by a trained network: `aaconv predict RUN|MODEL IMAGE...`, for files, folders and patterns."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor, nn
from torchvision.transforms import v2

from ..data import Normalize
from ..data.class_names import class_title
from ..data.images import UnreadableImage, find_images, read_photograph
from ..data.transforms import eval_transform
from ..runs.load import TrainedModel, load_model
from ..utils.device import pick_device
from ..utils.files import check_writable, replacing
from ..utils.precision import autocast_like
from ..utils.terminal import console, plural
from .checks import not_finite

COLUMNS = ("image", "rank", "class", "probability", "error")


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one image and their probabilities, best first; or the reason why there are none."""

    path: str
    classes: dict[str, float]
    error: str | None = None


def predict(
    source: str | Path | nn.Module | TrainedModel,
    images: str | Path | Iterable[str | Path],
    *,
    top: int = 5,
    weights: str | None = None,
    pretrained: bool = False,
    augment: Mapping[str, Any] | None = None,
    batch: int = 32,
    device: str | None = None,
) -> Iterator[Prediction]:
    """One prediction per image, in order; those that cannot be read have an `error`. Paths are looked at before all.

    source: a run folder, a registered model's name, or a network in hand; augment: of a name, the keywords of
    aaconv.augment. Weights whose output is not finite are a ValueError, at the first image.
    """
    files, where = find_images(images), pick_device(device)
    loaded = load_model(source, weights=weights, pretrained=pretrained, augment=augment, device=where)
    if loaded.task == "detect":
        raise ValueError(f"{loaded.source} finds objects and does not name whole images; use the run of a classifier")
    return _predict(loaded, files, top, batch)


def _predict(loaded: TrainedModel, files: list[Path], top: int, batch: int) -> Iterator[Prediction]:
    device = next(loaded.model.parameters()).device
    normalize = Normalize(loaded.mean, loaded.std).to(device)
    transform = eval_transform(loaded.size, loaded.crop, loaded.interpolation)
    for part in (files[first : first + batch] for first in range(0, len(files), batch)):
        read = [_read(path, transform) for path in part]
        good = [image for image in read if isinstance(image, Tensor)]
        found: Iterator[Tensor] = iter(())
        if good:
            precision = None if loaded.recipe is None else loaded.recipe.precision
            with torch.no_grad(), autocast_like(precision, device):
                probabilities = loaded.model(normalize(torch.stack(good).to(device))).float().softmax(1).cpu()
            found = iter(probabilities)
        for path, image in zip(part, read, strict=True):
            if isinstance(image, Tensor):
                one = next(found)
                if not one.isfinite().all():
                    raise not_finite(loaded, f"the output for {path}")
                yield Prediction(str(path), _best(one, loaded.classes, top))
            else:
                yield Prediction(str(path), {}, image)


def write_predictions(found: Iterable[Prediction], path: str | Path) -> Path:
    """A .json file as `aaconv predict --json` prints it, or a .csv file: a row per image and class, best first."""
    path = check_ending(path)
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".json":
            json.dump([asdict(one) for one in found], file, indent=2, ensure_ascii=False)
            return path
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for one in found:
            if one.error:
                rows.writerow((one.path, "", "", "", one.error))
            for rank, (name, probability) in enumerate(one.classes.items(), 1):
                rows.writerow((one.path, rank, name, f"{probability:.6g}", ""))
    return path


def check_ending(path: str | Path) -> Path:
    if Path(path).suffix not in (".csv", ".json"):
        raise ValueError(f"the file must end in .csv or .json, got {str(path)!r}")
    return Path(path)


def _best(probabilities: Tensor, classes: tuple[str, ...] | None, top: int) -> dict[str, float]:
    values, indices = probabilities.topk(min(top, len(probabilities)))
    names = [class_title(classes[i]) if classes else f"class {i}" for i in indices.tolist()]
    return dict(zip(names, values.tolist(), strict=True))


def _read(path: Path, transform: v2.Transform) -> Tensor | str:
    try:
        return transform(read_photograph(path))
    except UnreadableImage as image:
        return image.reason


def print_predictions(
    source: str | Path,
    images: Iterable[str | Path],
    *,
    as_json: bool = False,
    file: str | None = None,
    top: int = 5,
    batch: int = 32,
    device: str | None = None,
    **options: Any,
) -> None:
    """Print what `predict` finds as it comes, or write it to a .csv or .json file.

    An OSError at the end if images could not be read.
    """
    if file is not None:
        check_ending(file)
        check_writable(file)
    output, all_found, unreadable = console(), [], []
    files = find_images(images)
    loaded = load_model(source, device=pick_device(device), **options)
    if not loaded.trained:
        print(f"{source} has untrained weights: take --pretrained, --weights FILE or a run", file=sys.stderr)
    for one in predict(loaded, files, top=top, batch=batch):
        all_found.append(one)
        if one.error:
            unreadable.append(one)
        if as_json or file is not None:
            continue
        output.print(Text(one.path, "bold"), soft_wrap=True)
        for name, probability in one.classes.items():
            output.print(Text(f"  {100 * probability:5.1f} %  {name}"), soft_wrap=True)
        if one.error:
            output.print(Text(f"  skipped: {one.error}", "red"), soft_wrap=True)
    if as_json:
        print(json.dumps([asdict(one) for one in all_found], indent=2))
    if file is not None:
        print(f"wrote {write_predictions(all_found, file)}: {plural(len(all_found), 'image')}", file=sys.stderr)
    if unreadable:
        first = unreadable[0]
        number = f"{len(unreadable)} of {plural(len(all_found), 'image')}"
        raise OSError(f"{number} could not be read; the first is {first.path}: {first.error}")
