"""The weights of a run as they come with the package: `aaconv export RUN -o weights/NAME.TAG.safetensors`.

Matrices are written in half precision, statistics and biases as they are. What is written is then evaluated on all test
images in float32, as `aaconv eval NAME.TAG --pretrained` will do it, and kept with these figures beside it, and a card.
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
from ..models import list_models
from ..recipes import PARTIAL
from ..recipes.diff import changes_in
from ..recipes.recipe import START_OPTIONS, Recipe
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
from .model_card import shipped_card

ENDING = ".safetensors"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NOT_OF_THE_WEIGHTS = (*START_OPTIONS, "backend", "drop_rate", "drop_path_rate")
"""Keywords of a network that its weights fit with and without."""


def export_weights(
    source: str | Path,
    path: str | Path,
    *,
    weights: str | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the weights of a run and, beside them, a JSON file of what they are and a card; the first is returned, too.

    dtype: of the matrices, float16 (the default) or bfloat16. All three files are written or none; those that were
    there stay till then.
    """
    path = Path(path)
    check_run(source, f"{ENDING} files are made of runs")
    check_finished(source)
    loaded = load_model(source, weights=weights)
    _check(loaded, path)
    about_file, card_file = path.with_suffix(".json"), path.with_suffix(".md")
    for file in (path, about_file, card_file):
        check_writable(file)
    dtype, recipe, where = dtype or "float16", loaded.run_recipe, pick_device(device)
    origin = _origin(Path(source), recipe)
    dataset = open_dataset(recipe.data, data_dir or recipe.data_dir, "test")
    with replacing(path) as draft, replacing(about_file) as about_draft, replacing(card_file) as card_draft:
        write_weights(draft, in_half(loaded.model.state_dict(), dtype))
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
            "weights": Path(weights or default_weights(source, recipe)).name,
            "dtype": dtype,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        write_json(about_draft, about)
        card_draft.write_text(shipped_card(path.name.removesuffix(ENDING), about), encoding="utf-8")
    figures = ", ".join(f"{metric_title(name)} {about[name]:.2f} %" for name in ("top1", "top5"))
    say(f"wrote {path}: {len(data) / 1e6:.1f} MB, {figures}")
    return about


def in_half(state: dict[str, Tensor], dtype: str = "float16") -> dict[str, Tensor]:
    """Matrices in dtype; what has one dimension or is not a float, statistics above all, stays as it is."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype=}")
    half = DTYPES[dtype]
    stored = {name: one.to(half) if one.dim() > 1 and one.is_floating_point() else one for name, one in state.items()}
    for name, one in stored.items():
        if one.dtype == half and not bool(one.isfinite().all()):
            way_out = "; --dtype bfloat16 has room for larger ones" if half == torch.float16 else ""
            raise ValueError(f"{name} has values that {dtype} cannot hold{way_out}")
    return stored


def _check(loaded: TrainedModel, path: Path) -> None:
    """A ValueError where `timm.create_model(NAME, pretrained=True)` could not use the file."""
    recipe = loaded.run_recipe
    name = recipe.model.name.partition(".")[0]
    if recipe.task != "classify":
        raise ValueError(f"{loaded.source} is the run of a detector; {ENDING} files are made of classifiers")
    if name not in list_models():
        raise ValueError(
            f"{recipe.model.name} is not a registered model of ours, and {ENDING} files are found by the names of those"
        )
    own, _, tag = path.name.removesuffix(ENDING).partition(".")
    if own != name or not tag or "." in tag:
        raise ValueError(f"the file must be called {name}.TAG{ENDING}, TAG being the data, got {path.name!r}")
    for part in PARTIAL:
        if value := getattr(recipe, part):
            raise ValueError(
                f"{loaded.source} was run with {part}={value}; {ENDING} files are made of runs on all images"
            )


def _origin(run: Path, recipe: Recipe) -> dict[str, Any]:
    """Where the weights come from, and what timm has to know about them."""
    config = _pick(read_config(run), run / CONFIG, "architecture", "label_names", "model_args", "pretrained_cfg")
    return {
        "architecture": config["architecture"],
        "options": _options(recipe.model.name.partition(".")[0], config["model_args"], run),
        "recipe": recipe.name,
        "overrides": changes_in(recipe),
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        **_pick(read_environment(run), run / ENVIRONMENT, "commit", "device"),
        **_pick(config["pretrained_cfg"], run / CONFIG, "input_size", "mean", "std", "num_classes", "crop_pct"),
        "label_names": config["label_names"],
    }


def _options(name: str, given: Any, run: Path) -> dict[str, Any]:
    """What the network of the weights is built with besides its name: {} for the very one that the name means."""
    if not isinstance(given, dict):
        raise ValueError(f"{run / CONFIG} is not what a run writes: 'model_args' must be a mapping, got {given!r}")
    _, *usual = timm.get_pretrained_cfg_value(name, "input_size") or (3, None)
    kept = {key: value for key, value in given.items() if key not in NOT_OF_THE_WEIGHTS}
    return {key: value for key, value in kept.items() if key != "img_size" or value != usual[-1]}


def _pick(known: dict[str, Any], file: Path, *names: str) -> dict[str, Any]:
    for name in names:
        if name not in known:
            raise ValueError(f"{file} has no {name!r}, which a run writes; it was changed, or is of another version")
    return {name: known[name] for name in names}
