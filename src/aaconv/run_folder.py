"""What a training run leaves behind, and everything that is read from it again: one folder a run.

recipe.yaml        what was to be done
environment.json   versions, device, commit
metrics.csv        a row an epoch, only what is the same every time; speed.csv: what is not
config.json        with model.safetensors, the last weights: timm.create_model("local-dir:RUN", pretrained=True)
model-best.safetensors, model-ema.safetensors
checkpoints/       to go on from
summary.json, curves.png   at the end
training.lock      while it is trained: the process that does it; training/run_lock.py
"""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.data import ImageNetInfo
from torch import nn

from . import recipes, results
from .benchmark.report import environment
from .doctor import version_of
from .files import naming_unwritable, replacing
from .models import check_pretrained, create_model
from .models._weights import facts_of as facts_of_weights
from .recipes.recipe import Recipe
from .training.checkpoint import Tensors, encode, read_weights, write_file
from .training.tasks import Facts, create_task

RECIPE, ENVIRONMENT, METRICS, SPEED = "recipe.yaml", "environment.json", "metrics.csv", "speed.csv"
CONFIG, SUMMARY, CURVES, CHECKPOINTS = "config.json", "summary.json", "curves.png", "checkpoints"
WEIGHTS = {"last": "model.safetensors", "best": "model-best.safetensors", "ema": "model-ema.safetensors"}
OURS = (RECIPE, ENVIRONMENT, METRICS, SPEED, CONFIG, SUMMARY, CHECKPOINTS, *WEIGHTS.values())

Row = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A network in evaluation mode and what it takes to use it: names of classes, statistics and size of images."""

    model: nn.Module
    recipe: Recipe | None
    classes: tuple[str, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    task: str
    source: str
    metrics: dict[str, Any] | None
    file: Path | None = None
    """Which the weights were read from; None: they are a name's own, or fresh."""


def is_run(path: str | Path) -> bool:
    """Is this a folder that a training run was written into?"""
    return (Path(path) / RECIPE).is_file()


def usual_weights(run: str | Path) -> str:
    """Which of a run's weights are taken where none are named: their moving average, where there is one."""
    return "ema" if (Path(run) / WEIGHTS["ema"]).is_file() else "last"


def is_finished(run: str | Path) -> bool:
    with naming_the_way_out(Path(run)):
        return (Path(run) / SUMMARY).is_file() and bool(read_summary(run).get("finished"))


def check_free(run: Path) -> None:
    """A ValueError if there is something in the folder that a run would overwrite."""
    with naming_unwritable(run):  # it may lie where nobody may look
        if is_run(run):
            raise ValueError(
                f"{run} holds a run already; go on with it: aaconv train --resume {run}, or name another folder"
            )
        if run.exists() and not run.is_dir():
            raise ValueError(f"{run} is a file, not a folder for a run; name another")
        if file := next((place for place in run.parents if place.is_file()), None):
            raise ValueError(f"{run} cannot be made: {file} is a file, not a folder; name another folder")
        if there := [name for name in OURS if (run / name).exists()]:
            raise ValueError(f"{run} has a {there[0]} that no run has written; name another folder")


def load_model(
    source: str | Path,
    *,
    weights: str | Path | None = None,
    pretrained: bool = False,
    options: dict[str, Any] | None = None,
    num_classes: int | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """The network of a run folder, or one by its registered name.

    weights      of a run: last, best or ema; by default ema where there is one, else last. Or a file, of tensors only
    pretrained   of a name: with its own weights, ours or timm's
    options, num_classes   of a name: what it is built with
    """
    if is_run(source):
        if options or num_classes or pretrained:
            raise ValueError(f"{source} is a run, its network is built as it was trained: leave out model options")
        return _load_run(Path(source), weights, device)
    if isinstance(source, Path) or "/" in source or source.startswith("."):
        raise ValueError(f"{source} is no run folder, it has no {RECIPE}; and models have no slash in their names")
    return _load_named(source, weights, pretrained, options or {}, num_classes, device)


def _load_run(run: Path, weights: str | Path | None, device: torch.device | str) -> Loaded:
    recipe, config = recipes.load(run / RECIPE), read_config(run)
    facts = facts_of(config, run)
    model = create_task(recipe).build(facts)
    weights = weights or usual_weights(run)
    file = run / WEIGHTS[weights] if weights in WEIGHTS else Path(weights)
    if weights in WEIGHTS and not file.is_file():
        there = [name for name, path in WEIGHTS.items() if (run / path).is_file()]
        hint = f"it has {', '.join(there)}" if there else "it has none yet: wait for its first checkpoint"
        raise ValueError(f"{run} has no weights {weights!r}; {hint}")
    fill(model, file)
    with naming_the_way_out(run):
        metrics = read_summary(run) if (run / SUMMARY).is_file() else None
    return Loaded(
        model=model.to(device).eval(),
        recipe=recipe,
        classes=facts.classes,
        mean=facts.mean,
        std=facts.std,
        size=facts.size,
        task=recipe.task,
        source=str(run),
        metrics=metrics,
        file=file,
    )


def _load_named(
    name: str,
    weights: str | Path | None,
    pretrained: bool,
    options: dict[str, Any],
    num_classes: int | None,
    device: torch.device | str,
) -> Loaded:
    if pretrained:
        check_pretrained(name)
    try:
        model = create_model(name, pretrained=pretrained, num_classes=num_classes, **options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {options}: {error}") from None
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged: {error}; install or download them anew") from None
    except RuntimeError as error:
        raise ValueError(_why_not_built(name, options, str(error))) from None
    if weights is not None:
        if weights in WEIGHTS:
            raise ValueError(f"weights {weights!r} belong to a run folder; of a model name a file of weights")
        fill(model, Path(weights))
    known = model.pretrained_cfg
    own_head = pretrained and num_classes is None
    return Loaded(
        model=model.to(device).eval(),
        recipe=None,
        classes=_class_names(known) if own_head else None,
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        size=options.get("img_size", known["input_size"][-1]),
        task="classify",
        source=name,
        metrics=facts_of_weights(known) if own_head and weights is None else None,
        file=None if weights is None else Path(weights),
    )


def _why_not_built(name: str, options: dict[str, Any], reason: str) -> str:
    """In a line, without what torch says about every single tensor."""
    first, *more = reason.splitlines() or [""]
    if not more or "state_dict" not in first:
        return f"{name} cannot be built: {first}"
    known = None if ":" in name else timm.get_pretrained_cfg(name)
    file = known.file if known and known.file else f"the file of weights of {name}"
    tensor = more[0].strip().partition(', "')[0].rstrip(".")  # of a list of names the first
    way_out = f"leave out {', '.join(options)}" if options else "install the package or export the weights anew"
    return f"{file} does not fit the network {name}: {tensor}; {way_out}"


def _class_names(known: dict[str, Any]) -> tuple[str, ...] | None:
    """What the weights of a name tell apart; timm has names for ImageNet's own thousand classes."""
    if known.get("label_names"):
        return tuple(known["label_names"])
    return tuple(ImageNetInfo().label_descriptions()) if known["num_classes"] == 1000 else None


def fill(model: nn.Module, path: Path) -> None:
    """Read weights into the network; a ValueError names the first that does not fit."""
    tensors, own = read_weights(path), model.state_dict()
    for name in own.keys() | tensors.keys():
        if name not in tensors or name not in own or own[name].shape != tensors[name].shape:
            found = f"{list(tensors[name].shape)}" if name in tensors else "nothing"
            wanted = f"{list(own[name].shape)}" if name in own else "nothing"
            raise ValueError(f"{path} does not fit the network: of {name} it has {found}, the network {wanted}")
    model.load_state_dict(tensors)


def facts_of(config: dict[str, Any], run: Path) -> Facts:
    """What the network of a run was built for, out of its config.json."""
    try:
        known = config["pretrained_cfg"]
        size = known["input_size"][-1]
        return Facts(tuple(config["label_names"]), tuple(known["mean"]), tuple(known["std"]), size)
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{run / CONFIG} is not what a run writes") from None


def read_config(run: str | Path) -> dict[str, Any]:
    return _read_json(Path(run) / CONFIG)


def read_environment(run: str | Path) -> dict[str, Any]:
    return _read_json(Path(run) / ENVIRONMENT)


def read_summary(run: str | Path) -> dict[str, Any]:
    return _read_json(Path(run) / SUMMARY)


def read_metrics(run: str | Path) -> list[Row]:
    """The rows of metrics.csv, as numbers; what was not measured is None."""
    return read_rows(Path(run) / METRICS)


def read_course(run: str | Path) -> list[Row]:
    """The rows of metrics.csv, epoch by epoch; none before the first is finished, and none may be missing then."""
    run = Path(run)
    with naming_the_way_out(run):
        summary = read_summary(run) if (run / SUMMARY).is_file() else {}
        finished = bool(summary.get("finished"))
        rows = read_metrics(run) if finished or (run / METRICS).is_file() else []
        if rows or finished:
            check_course(rows, run / METRICS, summary, SUMMARY)
    return rows


def check_course(rows: list[Row], path: Path, summary: dict[str, Any], name: str) -> None:
    """A ValueError where the rows of a file are not every epoch up to the one that the summary, in `name`, is of."""
    if not rows:
        raise ValueError(f"{path} has no rows")
    if gap := next((epoch for epoch, row in enumerate(rows, 1) if row.get("epoch") != epoch), None):
        raise ValueError(f"{path} is damaged: line {gap + 1} is not epoch {gap}")
    for column, value in rows[-1].items():
        nan = value != value
        if column in summary and summary[column] != value and not (nan and summary[column] != summary[column]):
            raise ValueError(f"{path} ends with {column} {value}, but {name} has {summary[column]}")


@contextmanager
def naming_the_way_out(run: Path) -> Iterator[None]:
    """What is wrong with the tables or the summary of a run, and how to get them back."""
    try:
        yield
    except ValueError as error:
        both = f"remove {run / SUMMARY} and have it and the tables" if (run / SUMMARY).is_file() else "have it"
        anew = f"{both} written anew: aaconv train --resume {run}"
        way_out = anew if (run / CHECKPOINTS).is_dir() else "copy it again from where it was trained"
        raise ValueError(f"{error}; {way_out}") from None


def read_speed(run: str | Path) -> list[Row]:
    return read_rows(Path(run) / SPEED)


def write_rows(path: Path, rows: list[Row], columns: list[str]) -> None:
    """A CSV file, whole; numbers are written so that reading gives the same again."""
    with replacing(path) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n")


def write_weights(path: Path, tensors: Tensors) -> None:
    with replacing(path) as draft:
        write_file(draft, encode(tensors))


def link(source: Path, target: Path) -> None:
    """The same file under another name, without a copy where the disk can do that."""
    with replacing(target) as draft:
        try:
            os.link(source, draft)
        except OSError:
            shutil.copyfile(source, draft)


def environment_of(device: torch.device, processes: int) -> dict[str, Any]:
    """What a run depends on besides its recipe."""
    found = environment(device)
    found |= {package: version_of(package) for package in ("torchvision", "safetensors")}
    return found | {"processes": processes}


def summary_of(
    recipe: Recipe, known: dict[str, Any], rows: list[Row], speed: list[Row], metrics: tuple[str, ...], parameters: int
) -> dict[str, Any]:
    """summary.json: the last evaluation, and what it took."""
    last = rows[-1]
    versions = ("aaconv", "python", "torch", "torchvision", "timm", "triton", "cuda")
    seconds = sorted(row["seconds"] for row in speed)
    return {
        "name": recipe.name,
        "model": recipe.model.name,
        "options": recipe.model.options,
        "data": recipe.data,
        "task": recipe.task,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "steps": last["step"],
        **{name: last[name] for name in metrics},
        "train_loss": last["train_loss"],
        "parameters": parameters,
        "seconds_per_epoch": seconds[len(seconds) // 2],
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in speed),
        "device": known["device"],
        "processes": known["processes"],
        "commit": known["commit"],
        "versions": {name: known.get(name) for name in versions},
        "date": known["date"],
        "overrides": results.overrides_of(recipe),
        "finished": True,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not what a run writes")
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file of numbers; a ValueError names the file that is damaged or not there."""
    rows = []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                # csv puts what is too much under None, and None for what is missing.
                if None in row or None in row.values():
                    raise ValueError(f"line {reader.line_num} has not as many fields as the first")
                rows.append({name: _number(value) for name, value in row.items()})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return rows


def _number(text: str | None) -> int | float | None:
    if not text:
        return None
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
