"""From a name to a finished run: the recipe with its changes, a folder of its own, training, and what to say after."""

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..recipes.overrides import check_model, check_optimizer, for_machine
from ..recipes.pretrained import Start, start_from
from ..recipes.recipe import Recipe
from ..runs import run_folder
from ..runs.record import record_result
from ..runs.run_types import SUMMARY_FIELDS, check_fields
from ..utils.device import machine, pick_device
from ..utils.distributed import started_by_torchrun
from ..utils.files import naming_unwritable
from ..utils.metrics import TITLES, metric_title, telling
from ..utils.terminal import plural
from . import trainer
from .finetune import finetune_recipe
from .progress import TensorBoard, duration, following
from .trackers import Tracker

RUNS = Path("runs")
NOTHING = Start()
SLOW = """\
This recipe is made for a GPU: on a CPU it can take days. The time left is shown after
the first steps; demo-plain, demo-se, demo-aa, detection-demo and shapes-distance-*
take minutes."""


def choose(
    name: str | None,
    source: str | None,
    changes: dict[str, Any],
    device: str | None = None,
    start: Start = NOTHING,
) -> Recipe:
    """The recipe of that name, or of a YAML file, with the changes made, and the network started from `start`. Without
    a recipe a network and data are enough: they are trained as `aaconv finetune` does."""
    if name is None and source is None and {"model", "data"} <= changes.keys():
        rest = {key: value for key, value in changes.items() if key not in ("model", "data")}
        return finetune_recipe(changes["model"], changes["data"], start, rest, device=device)
    if name is not None and source is None:
        recipe = for_machine(recipes.get(name), changes, **machine(device))
    elif source is not None and name is None:
        recipe = recipes.load(source)
    else:
        raise ValueError(
            "name a recipe (`aaconv recipes` lists them), or a file with --from, or a run with --resume, or a network "
            "and data with --model and --data"
        )
    recipe = recipes.override(recipe, changes)
    if start != NOTHING:
        recipe = replace(recipe, model=start_from(recipe.model, start), evidence=None)
        check_model(recipe)
    check_optimizer(recipe)
    return recipe


def made_for_a_gpu(recipe: Recipe) -> bool:
    """Has the catalogue a recipe of that name that is trained in mixed precision?"""
    return recipe.name in recipes.names() and recipes.get(recipe.name).precision != "float32"


def free_folder(recipe: Recipe, runs: Path = RUNS) -> Path:
    """runs/NAME-seedN, with the first number behind it that is free, made for `start`; no other process gets the same.

    All processes of torchrun must agree on one, and name it.
    """
    if started_by_torchrun():
        raise ValueError("name the folder of the run with --run-dir DIR: all processes, and restarted ones, must agree")
    base = runs / f"{recipe.name}-seed{recipe.seed}"
    number, folder = 1, base
    with naming_unwritable(base):
        made = [place for place in (runs, *runs.parents) if not place.exists()]
        runs.mkdir(parents=True, exist_ok=True)
        while not _reserve(folder, made):
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
    return folder


_reserved: dict[Path, list[Path]] = {}
"""Folders that were made here for runs to come, and those that were made around them, the inner ones first."""


def _reserve(folder: Path, around: list[Path]) -> bool:
    """Make the folder; not where somebody else has."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    _reserved[folder] = around
    return True


def _give_back(folder: Path) -> None:
    """Remove folders that were made for a run if it has not begun; what is not empty stays."""
    if folder in _reserved:
        with suppress(OSError):
            for place in (folder, *_reserved.pop(folder)):
                place.rmdir()


def check_unchanged(changes: dict[str, Any], others: dict[str, Any]) -> None:
    """A run is resumed as it began: a ValueError names what was given beside --resume."""
    fields = ["--" + {"model_options": "model.OPTION"}.get(name, name.replace("_", "-")) for name in changes]
    extra = [name for name, value in others.items() if value] + fields
    if extra:
        raise ValueError(f"--resume continues the run as it is: leave out {', '.join(extra)}")


def start(
    run: Path,
    recipe: Recipe | None,
    *,
    device: str | None = None,
    tensorboard: bool = False,
    track: str | None = None,
    record: bool = False,
) -> dict[str, Any]:
    """Train `recipe` into the folder `run`, or resume it where there is no recipe; prints what came out.

    track: "trackio" or "wandb", which is told of every step and epoch, too.
    """
    first = os.environ.get("RANK", "0") == "0"
    with ExitStack() as stack:
        stack.callback(_give_back, run)
        if tensorboard and first:
            stack.enter_context(following(TensorBoard(run / "tensorboard")))
        if track is not None and first:
            stack.enter_context(following(Tracker(track, run, recipe)))
        if recipe is None:
            summary = trainer.resume(run, device=device)
        else:
            if first:
                lines = [f"{recipe.name}: {recipe.model.title} on {recipe.data}, into {run}"]
                lines += [SLOW] if pick_device(device).type == "cpu" and made_for_a_gpu(recipe) else []
                print("\n".join(lines), flush=True)
            summary = trainer.train(recipe, run, device=device)
    if first:
        print(conclusion(summary, run))
        if record:
            print(f"recorded in {record_result(run)}")
    return summary


def conclusion(summary: dict[str, Any], run: Path) -> str:
    """The result in one line, the paper's under it where there is one, and where to go from here."""
    wanted = {name: SUMMARY_FIELDS[name] for name in ("epochs", "seconds_per_epoch", "parameters")}
    check_fields(summary, wanted, run / run_folder.SUMMARY, needed=True)
    results = [f"{metric_title(name)} {value:.2f} %" for name, value in telling(summary).items()]
    results += [f"loss {summary['loss']:.4f}"] if summary.get("loss") is not None else []
    lines = [
        ", ".join(results),
        f"{plural(summary['epochs'], 'epoch')}, {duration(summary['seconds_per_epoch'])} each, "
        f"{summary['parameters']:,} parameters",
    ]
    recipe = recipes.load(run / run_folder.RECIPE)
    if recipe.holdout:
        lines[0] += f", on {recipe.holdout:,} training images held out"
    row = recipes.paper_row(recipe)
    if row is not None and recipe.evidence is not None and not (recipe.holdout or recipe.eval_limit):
        values = ", ".join(f"{name} {row.cells[name]}" for name in TITLES.values() if name in row.cells)
        lines.append(f"the paper: {values} (table {recipe.evidence.table}, {row.name}){_shortened(recipe)}")
    return "\n".join([*lines, f"all of it is in {run}; look at it with aaconv eval, plot, report or explore"])


def _shortened(recipe: Recipe) -> str:
    """What the run did less of than the paper, if it did."""
    if recipe.name not in recipes.names():
        return ""
    usual = recipes.get(recipe.name)
    parts = [plural(usual.epochs, "epoch")] if recipe.epochs != usual.epochs else []
    if recipe.train_limit:
        parts.append("all images")
    return f", with {' and '.join(parts)}" if parts else ""
