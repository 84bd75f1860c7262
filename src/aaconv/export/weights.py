"""The weights of a run as they come with the package: `aaconv export RUN -o weights/NAME.TAG.safetensors`.

Matrices are written in half precision, statistics and biases as they are. What is written is then evaluated on all test
images in float32, as `aaconv eval NAME --pretrained` will do it, and kept with these figures beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from ..data import open_dataset
from ..inference.evaluate import evaluate_model
from ..recipes import PARTIAL
from ..recipes.diff import changes_in
from ..recipes.recipe import Recipe
from ..runs.load import TrainedModel, fill, load_model
from ..runs.run_folder import (
    CONFIG,
    ENVIRONMENT,
    check_finished,
    check_run,
    default_weights,
    read_config,
    read_environment,
    write_json,
    write_weights,
)
from ..utils.device import pick_device
from ..utils.environment import environment
from ..utils.files import check_writable, replacing
from ..utils.metrics import metric_title

ENDING = ".safetensors"


def export_weights(
    source: str | Path,
    path: str | Path,
    *,
    weights: str | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the weights of a run and, beside them, a JSON file of what they are; that is returned, too.

    Both files are written or none; those that were there stay till then.
    """
    path = Path(path)
    check_run(source, f"{ENDING} files are made of runs")
    check_finished(source)
    loaded = load_model(source, weights=weights)
    _check(loaded, path)
    for file in (path, path.with_suffix(".json")):
        check_writable(file)
    recipe, where = loaded.run_recipe, pick_device(device)
    origin = _origin(Path(source), recipe)
    dataset = open_dataset(recipe.data, data_dir or recipe.data_dir, "test")
    with replacing(path) as draft:
        write_weights(draft, in_half(loaded.model.state_dict()))
        fill(loaded.model, draft)
        # Without its recipe: in float32, whatever it was trained in.
        loaded = replace(loaded, model=loaded.model.to(where), recipe=None)
        say(f"evaluating the file on {len(dataset):,} images of {dataset.name}")
        found = evaluate_model(loaded, dataset, device=where)
        data = draft.read_bytes()
        about = {
            "data": found.data,
            "images": found.images,
            **found.metrics,
            "evaluated_on": environment(where)["device"],
            **origin,
            # "best" was chosen by the images it is evaluated on here: a reader should know.
            "weights": str(weights or default_weights(source, recipe)),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        write_json(path.with_suffix(".json"), about)
    figures = ", ".join(f"{metric_title(name)} {about[name]:.2f} %" for name in ("top1", "top5"))
    say(f"wrote {path}: {len(data) / 1e6:.1f} MB, {figures}")
    return about


def in_half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as float16; what has one dimension or is not a float, statistics above all, stays as it is."""
    half = {name: one.half() if one.dim() > 1 and one.is_floating_point() else one for name, one in state.items()}
    for name, one in half.items():
        if one.dtype == torch.float16 and not bool(one.isfinite().all()):
            raise ValueError(f"{name} has values that half precision cannot hold")
    return half


def _check(loaded: TrainedModel, path: Path) -> None:
    """A ValueError where `timm.create_model(NAME, pretrained=True)` could not use the file."""
    recipe = loaded.run_recipe
    name = recipe.model.name
    if recipe.task != "classify":
        raise ValueError(f"{loaded.source} is the run of a detector; {ENDING} files are made of classifiers")
    known = None if ":" in name else timm.get_pretrained_cfg(name)
    if known is None or known.input_size is None:
        raise ValueError(f"{name} is not a registered model, and {ENDING} files are found by the names of those")
    own, _, tag = path.name.removesuffix(ENDING).partition(".")
    if own != name or not tag or "." in tag:
        raise ValueError(f"the file must be called {name}.TAG{ENDING}, TAG being the data, got {path.name!r}")
    if options := {key: value for key, value in recipe.model.options.items() if key != "backend"}:
        raise ValueError(f"{name} is built without options, the network of {loaded.source} with {options}")
    for part in PARTIAL:
        if value := getattr(recipe, part):
            raise ValueError(
                f"{loaded.source} was run with {part}={value}; {ENDING} files are made of runs on all images"
            )
    usual = known.input_size[-1]
    if loaded.size != usual:
        raise ValueError(f"{name} is made for images of {usual} pixels, {loaded.source} was trained on {loaded.size}")


def _origin(run: Path, recipe: Recipe) -> dict[str, Any]:
    """Where the weights come from, and what timm has to know about them."""
    config = _pick(read_config(run), run / CONFIG, "architecture", "label_names", "pretrained_cfg")
    return {
        "architecture": config["architecture"],
        "recipe": recipe.name,
        "overrides": changes_in(recipe),
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        **_pick(read_environment(run), run / ENVIRONMENT, "commit", "device"),
        **_pick(config["pretrained_cfg"], run / CONFIG, "input_size", "mean", "std", "num_classes", "crop_pct"),
        "label_names": config["label_names"],
    }


def _pick(known: dict[str, Any], file: Path, *names: str) -> dict[str, Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"{file} has no {name!r}, which a run writes; it was changed, or is of another version")
    return {name: known[name] for name in names}
