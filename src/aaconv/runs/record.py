"""`aaconv record`: what is worth keeping of a finished run, small, in a file of its own below `results/`."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from .. import recipes
from ..recipes import diff
from ..recipes.recipe import Recipe
from ..utils.json_file import read_json
from ..utils.locks import alone_in
from . import results
from .run_folder import (
    RECIPE,
    SUMMARY,
    check_finished,
    naming_the_way_out,
    read_epochs,
    read_summary,
    write_json,
    write_rows,
)


def record_result(run: str | Path, folder: str | Path = results.RESULTS) -> Path:
    """Copy the small record of a finished run to folder/DATASET/RECIPE-CHANGES-seedN.json, and its metrics beside it.

    `aaconv table` and `aaconv plot` read the files.
    """
    run = Path(run)
    check_finished(run)
    with naming_the_way_out(run):
        summary = _summary_of(run)
    rows, recipe = read_epochs(run), recipes.load(run / RECIPE)
    known = recipe.name in recipes.names()
    # A summary is of its day's catalogue; of other recipes older ones say nothing.
    overrides = summary.get("overrides", {}) if known else diff.overrides_of(recipe)
    # Where the data lay is nobody else's business.
    overrides = {name: value for name, value in overrides.items() if name != "data_dir"}
    record = summary | {"dataset": _dataset_of(run, summary, recipe), "overrides": overrides}
    path = Path(folder) / record["dataset"] / _file_name(record, recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):  # from the look for a record to its writing
            # As texts: of a run that diverged, a NaN is the same NaN.
            if path.exists() and json.dumps(read_json(path), sort_keys=True) != json.dumps(record, sort_keys=True):
                raise ValueError(f"{path} is there already, of another run; move it away first")
            write_rows(path.with_suffix(".csv"), rows, list(rows[0]))
            write_json(path, record)  # last: what has a record has its metrics
    except OSError as error:
        reason, way_out = error.strerror or error, f"keep it elsewhere: aaconv record {run} --results FOLDER"
        raise ValueError(f"{path} cannot be written: {reason}; {way_out}") from error
    return path


def _summary_of(run: Path) -> dict[str, Any]:
    """The summary of a finished run; a ValueError where `aaconv table` could not read its record."""
    summary = read_summary(run)
    if missing := [name for name in ("model", "options", "data", "seed") if name not in summary]:
        raise ValueError(f"{run / SUMMARY} is not what a run writes: it lacks {', '.join(missing)}")
    try:
        results.check(summary)
    except ValueError as error:
        raise ValueError(f"{run / SUMMARY} is not what a run writes: {error}") from None
    return summary


def _dataset_of(run: Path, summary: dict[str, Any], recipe: Recipe) -> str:
    dataset = re.sub(r"[^\w.-]+", "-", summary["data"].rstrip("/").rpartition("/")[2])
    if not dataset.strip("."):
        raise ValueError(
            f"{run} was trained on {summary['data']!r}, which gives no name; call it folder/NAME in {SUMMARY}"
        )
    if recipe.holdout or recipe.eval_limit or recipe.train_limit:
        dataset += "-part"  # the tables must not take it for a run on all images
    return dataset


def _file_name(record: results.Record, recipe: Recipe) -> str:
    """RECIPE-CHANGES-seedN.json; several recipes train one network on the same images, so its name would not do."""
    changes, options = diff.changes_of(record), record["options"]
    own_network = changes.pop("model", None) is not None
    parts = [recipe.name]
    if recipe.name not in recipes.names() or (
        own_network and any(isinstance(x, list | dict) for x in options.values())
    ):
        # More was changed than a name can hold.
        parts.append(hashlib.sha256(diff.experiment_key(recipe).encode()).hexdigest()[:6])
    else:
        network = {"model": record["model"], **options} if own_network else {}
        parts += [f"{name}_{value}" for some in (network, changes) for name, value in sorted(some.items())]
    name = "-".join([*parts, f"seed{record['seed']}"])
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.json"
