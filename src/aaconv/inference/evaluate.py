"""How good a network is, and which classes it confuses: `aaconv eval RUN|MODEL --data NAME`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from .. import recipes
from ..data import Dataset, make_loader, open_dataset
from ..data.class_names import class_title
from ..data.workers import naming_killed_workers
from ..models import check_name
from ..runs.load import TrainedModel, load_model
from ..runs.run_folder import RECIPE, is_run
from ..tasks.classify import count
from ..tasks.data import as_evaluated, open_data, shapes_options
from ..utils.device import cores, pick_device
from ..utils.metrics import metric_title, says_nothing
from ..utils.precision import autocast_like
from ..utils.terminal import console, counted, new_table, plural
from .checks import check_finite
from .evaluate_detector import evaluate_run, score_run

BATCH, WORKERS = 256, 4
TAKEN_FOR = 3  # wrong classes named beside a class


@dataclass(frozen=True)
class Confused:
    """One class: how many of its images were recognised, in percent, and what the others were taken for."""

    name: str
    images: int
    top1: float
    taken_for: dict[str, int]


@dataclass(frozen=True)
class Evaluation:
    """`metrics` by name, accuracies in percent; `classes` the worst first, empty for a detector."""

    source: str
    data: str
    images: int
    metrics: dict[str, float]
    classes: list[Confused]


def evaluate(
    source: str | Path,
    *,
    data: str | None = None,
    data_dir: str | Path | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    batch: int | None = None,
    limit: int | None = None,
    device: str | None = None,
    detections: str | Path | None = None,
    save_detections: str | Path | None = None,
) -> Evaluation:
    """Test a network on a data set; a run without `data` on the images that it was evaluated on itself.

    Of a detector: `detections` scores a COCO result file instead of running it, `save_detections` writes one.
    """
    if is_run(source) and recipes.load(Path(source) / RECIPE).task == "detect":
        changes = {"data": data, "data_dir": data_dir, "limit": limit}
        return _evaluate_detector(Path(source), weights, device, batch, detections, save_detections, changes)
    if detections is not None or save_detections is not None:
        raise ValueError(f"{source} is not a run of a detector, which alone has detections")
    where = pick_device(device)
    if is_run(source) or "/" in str(source):
        loaded = load_model(source, weights=weights, pretrained=pretrained, device=where)
        dataset = _own_data(loaded, data_dir, limit) if data is None else open_dataset(data, data_dir, "test")
    elif data is None:
        check_name(str(source))
        raise ValueError(f"{source} is a model, not a run: say on which data with --data NAME")
    else:
        dataset = open_dataset(data, data_dir, "test")
        # Fresh weights have as many classes as there are; others keep their own.
        classes = None if pretrained or weights else len(dataset.classes)
        loaded = load_model(source, weights=weights, pretrained=pretrained, num_classes=classes, device=where)
    if limit is not None:
        dataset = dataset.take(min(limit, len(dataset)))
    fresh = loaded.recipe is None and not (pretrained or weights)
    found = evaluate_model(loaded, dataset, batch=batch, device=where)
    return replace(found, source=f"{source} with untrained weights") if fresh else found


def evaluate_model(
    loaded: TrainedModel, dataset: Dataset, *, batch: int | None = None, device: torch.device
) -> Evaluation:
    """Test a classifier, which is on the device, on all images of a data set."""
    _check_classes(loaded, dataset)
    dataset = replace(dataset, mean=loaded.mean, std=loaded.std)
    batch = min(batch or BATCH, len(dataset))
    loader = make_loader(dataset, batch, train=False, size=loaded.size, workers=min(WORKERS, cores()), device=device)
    fewer = "a smaller --batch takes less memory"
    precision = None if loaded.recipe is None else loaded.recipe.precision
    with autocast_like(precision, device), naming_killed_workers(lambda: fewer):
        counts = count(loaded.model, counted(loader.batches(), len(dataset)), len(dataset.classes))
    names = [class_title(name) for name in loaded.classes or dataset.classes]
    number, metrics = int(counts.sums[0]), counts.metrics()
    check_finite(loaded, dataset.name, metrics)
    return Evaluation(loaded.source, dataset.name, number, metrics, confusions(counts.guesses, names))


def confusions(guesses: Tensor, names: list[str]) -> list[Confused]:
    """int64 [images, 2], label and guess -> the classes there are images of, the least recognised first."""
    by_label: dict[int, Counter[int]] = defaultdict(Counter)
    for label, guess in guesses.tolist():
        by_label[label][guess] += 1
    found = []
    for label, row in sorted(by_label.items()):
        wrong = sorted((-times, guess) for guess, times in row.items() if guess != label)
        taken_for = {names[guess]: -times for times, guess in wrong[:TAKEN_FOR]}
        found.append(Confused(names[label], row.total(), 100 * row[label] / row.total(), taken_for))
    return sorted(found, key=lambda one: one.top1)


def print_evaluation(found: Evaluation, *, worst: int = 10, as_json: bool = False) -> None:
    """The figures in one line, and a table of the classes that are confused most."""
    if as_json:
        content = asdict(found) | {"classes": [asdict(one) for one in found.classes[:worst]]}
        print(json.dumps(content, indent=2))
        return
    output = console()
    figures = ", ".join(
        f"{metric_title(name)} {value:.4f}" if "loss" in name else f"{metric_title(name)} {value:.2f} %"
        for name, value in sorted(found.metrics.items(), key=lambda item: "loss" in item[0])
        if value is not None and not says_nothing(name, value)
    )
    output.print(Text(f"{found.source} on {plural(found.images, 'image')} of {found.data}"), soft_wrap=True)
    output.print(Text(figures, "bold"), soft_wrap=True)
    shown = [one for one in found.classes if one.taken_for][:worst]
    if not shown:
        return
    table = new_table("worst classes", "right", "of", "taken for", right=("right", "of"))
    for one in shown:
        taken_for = ", ".join(f"{name} ({times})" for name, times in one.taken_for.items())
        table.add_row(Text(one.name), f"{one.top1:.1f} %", f"{one.images:,}", Text(taken_for))
    output.print()
    output.print(table)


def _own_data(loaded: TrainedModel, data_dir: str | Path | None, limit: int | None) -> Dataset:
    """The images that a run evaluates on; with a limit of the caller's own, all that it could have."""
    recipe = loaded.run_recipe if data_dir is None else replace(loaded.run_recipe, data_dir=str(data_dir))
    recipe = recipe if limit is None else replace(recipe, eval_limit=None)
    if recipe.holdout:
        held_out = open_data(recipe)[1]
        return replace(held_out, name=f"{held_out.name} held out of training")
    # The training images need not be there.
    test = open_dataset(recipe.data, recipe.data_dir, "test", **shapes_options(recipe, train=False))
    return as_evaluated(recipe, test)


def _check_classes(loaded: TrainedModel, dataset: Dataset) -> None:
    # timm's names for ImageNet's classes are not those of its folders.
    known = loaded.classes if loaded.recipe is not None or loaded.metrics is not None else None
    if known is not None and tuple(known) != tuple(dataset.classes):
        strange = (
            sorted(set(dataset.classes) - set(known)) or sorted(set(known) - set(dataset.classes)) or ["another order"]
        )
        raise ValueError(
            f"{loaded.source} knows {len(known)} classes, {dataset.name} has {len(dataset.classes)} and they are not "
            f"the same: {strange[0]!r}"
        )
    outputs = loaded.model.num_classes
    if outputs != len(dataset.classes):
        raise ValueError(f"{loaded.source} has {outputs:,} classes, {dataset.name} has {len(dataset.classes):,}")


def _evaluate_detector(
    run: Path,
    weights: str | None,
    device: str | None,
    batch: int | None,
    detections: str | Path | None,
    save: str | Path | None,
    changes: dict[str, Any],
) -> Evaluation:
    if detections is not None:
        found = score_run(run, detections, **changes)
    else:
        loaded = load_model(run, weights=weights, device=pick_device(device))
        found = evaluate_run(loaded, weights=weights, batch=batch, save=save, **changes)
    data = changes["data"] or recipes.load(run / RECIPE).data
    return Evaluation(str(run), data, found.pop("images"), found, [])
