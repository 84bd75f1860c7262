"""What a training run leaves behind, and everything that is read from it again: one folder per run.

recipe.yaml        what was to be done
environment.json   versions, device, commit
metrics.csv        one row per epoch, only what is the same every time; speed.csv: what is not
config.json        with model.safetensors, the last weights: timm.create_model("local-dir:RUN", pretrained=True)
model-best.safetensors, model-ema.safetensors
checkpoints/       to resume from
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
from pathlib import Path
from typing import Any

import torch

from ..recipes import diff
from ..recipes.recipe import Recipe
from ..utils.environment import environment, version_of
from ..utils.files import naming_unwritable, replacing
from ..utils.json_file import read_json
from ..utils.numbers import is_whole
from ..utils.weights import Tensors, encode, write_file
from .run_types import SUMMARY_FIELDS, Row, check_fields

RECIPE, ENVIRONMENT, METRICS, SPEED = "recipe.yaml", "environment.json", "metrics.csv", "speed.csv"
CONFIG, SUMMARY, CURVES, CHECKPOINTS = "config.json", "summary.json", "curves.png", "checkpoints"
WEIGHTS = {"last": "model.safetensors", "best": "model-best.safetensors", "ema": "model-ema.safetensors"}
OURS = (RECIPE, ENVIRONMENT, METRICS, SPEED, CONFIG, SUMMARY, CHECKPOINTS, *WEIGHTS.values())


def is_run(path: str | Path) -> bool:
    """Is this a folder that a training run was written into?"""
    return (Path(path) / RECIPE).is_file()


def check_run(path: str | Path, hint: str = "") -> None:
    """A ValueError unless this is the folder of a training run; the hint says what else may have been meant."""
    if not is_run(path):
        raise ValueError(f"{path} is not a run folder, it has no {RECIPE}{hint and f'; {hint}'}")


def check_finished(run: str | Path) -> None:
    """A ValueError unless this is a run that has ended."""
    check_run(run)
    if not is_finished(run):
        raise ValueError(f"{run} is not finished; resume it: aaconv train --resume {run}")


def default_weights(run: str | Path, recipe: Recipe) -> str:
    """Which of a run's weights are taken where none are named: those of the best epoch where the recipe stops when
    nothing gets better, because it trains beyond that epoch to know; else their moving average, where there is one."""
    there = {name for name, file in WEIGHTS.items() if (Path(run) / file).is_file()}
    if recipe.patience is not None and "best" in there:
        return "best"
    return "ema" if "ema" in there else "last"


def is_finished(run: str | Path) -> bool:
    with naming_the_way_out(Path(run)):
        return (Path(run) / SUMMARY).is_file() and bool(read_summary(run).get("finished"))


def check_free(run: Path) -> None:
    """A ValueError if there is something in the folder that a run would overwrite."""
    with naming_unwritable(run):  # it may lie where nobody may look
        if is_run(run):
            raise ValueError(
                f"{run} holds a run already; resume it: aaconv train --resume {run}, or name another folder"
            )
        if run.exists() and not run.is_dir():
            raise ValueError(f"{run} is a file, not a folder for a run; name another")
        if file := next((place for place in run.parents if place.is_file()), None):
            raise ValueError(f"{run} cannot be made: {file} is a file, not a folder; name another folder")
        if there := [name for name in OURS if (run / name).exists()]:
            raise ValueError(f"{run} has a {there[0]} that no run has written; name another folder")


def read_config(run: str | Path) -> dict[str, Any]:
    return _read_json(Path(run) / CONFIG)


def read_environment(run: str | Path) -> dict[str, Any]:
    return _read_json(Path(run) / ENVIRONMENT)


def read_summary(run: str | Path) -> dict[str, Any]:
    path = Path(run) / SUMMARY
    summary = _read_json(path)
    check_fields(summary, SUMMARY_FIELDS, path)
    return summary


def read_metrics(run: str | Path) -> list[Row]:
    """The rows of metrics.csv, as numbers; what was not measured is None."""
    return read_rows(Path(run) / METRICS)


def read_epochs(run: str | Path) -> list[Row]:
    """The rows of metrics.csv, epoch by epoch; none before the first is finished, and none may be missing then."""
    run = Path(run)
    with naming_the_way_out(run):
        summary = read_summary(run) if (run / SUMMARY).is_file() else {}
        finished = bool(summary.get("finished"))
        rows = read_metrics(run) if finished or (run / METRICS).is_file() else []
        if rows or finished:
            check_epochs(rows, run / METRICS, summary, SUMMARY)
    return rows


def check_epochs(rows: list[Row], path: Path, summary: dict[str, Any], name: str) -> None:
    """A ValueError where the rows of a file are not every epoch up to the one that the summary, in `name`, is of."""
    if not rows:
        raise ValueError(f"{path} has no rows")
    if gap := next((epoch for epoch, row in enumerate(rows, 1) if row.get("epoch") != epoch), None):
        raise ValueError(f"{path} is damaged: line {gap + 1} is not epoch {gap}")
    for column, value in rows[-1].items():
        nan = value != value
        if column in summary and summary[column] != value and not (nan and summary[column] != summary[column]):
            raise ValueError(f"{path} ends with {column} {value}, but {name} has {str(summary[column])[:60]}")


@contextmanager
def naming_the_way_out(run: Path) -> Iterator[None]:
    """What is wrong with the tables or the summary of a run, and how to get them back."""
    try:
        yield
    except ValueError as error:
        remove = f"remove {run / SUMMARY} and have it and the tables" if (run / SUMMARY).is_file() else "have it"
        again = f"{remove} rewritten: aaconv train --resume {run}"
        way_out = again if (run / CHECKPOINTS).is_dir() else "copy it again from where it was trained"
        raise ValueError(f"{error}; {way_out}") from None


def read_speed(run: str | Path) -> list[Row]:
    return read_rows(Path(run) / SPEED)


def write_rows(path: Path, rows: list[Row], columns: list[str]) -> None:
    """A CSV file, whole; numbers are written so that reading gives the same again."""
    if odd := {name for row in rows for name in row} - set(columns):
        raise ValueError(f"{path} has no column {min(odd)[:40]!r}, which a row has")
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
        "options": diff.kept_options(recipe.model),
        "data": recipe.data,
        "task": recipe.task,
        "seed": recipe.seed,
        "epochs": last["epoch"],
        "steps": last["step"],
        **{name: last.get(name) for name in metrics},
        "train_loss": last["train_loss"],
        "parameters": parameters,
        "seconds_per_epoch": seconds[len(seconds) // 2],
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in speed),
        "device": known["device"],
        "processes": known["processes"],
        "commit": known["commit"],
        "versions": {name: known.get(name) for name in versions},
        "date": known["date"],
        "overrides": diff.overrides_of(recipe),
        "finished": True,
    }


def _read_json(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not what a run writes")
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file of numbers; a ValueError names the file that is damaged or not there."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for row in reader:
                # csv puts what is too much under None, and None for what is missing.
                if None in row or None in row.values():
                    raise ValueError(f"line {reader.line_num} has not as many fields as the first")
                rows.append({name: _number(value) for name, value in row.items()})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {str(error)[:200]}") from None
    return rows


def _number(text: str | None) -> int | float | None:
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        return float(text)
    if not is_whole(int(text)):
        raise ValueError(f"{text[:20]}... does not fit 64 bits")
    return int(text)
