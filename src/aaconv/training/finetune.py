"""From a network and a folder of images to a recipe that trains it further: what `aaconv finetune` begins with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import timm

from .. import recipes
from ..data import open_dataset
from ..layers.last_stage import last_stage
from ..models import check_name, create_without_memory
from ..recipes.overrides import check_model, check_optimizer, for_machine
from ..recipes.pretrained import Start, start_from
from ..recipes.recipe import Model, Recipe
from ..utils.device import machine
from ..utils.terminal import plural

LAST_STAGE = "last-stage"
"""For --augment: wherever layers.last_stage says."""
HELD_OUT, FEWEST = 0.15, 2
"""Of the training images, to stop by; and images that a split must have."""
EPOCHS, BATCH, SIZE = 20, 64, 224

ADAPTED: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 1e-3,
    "lr_backbone": 0.1,
    "weight_decay": 0.05,
    "decay": "matrices",
    "clip_grad": 1.0,
    "warmup": 0.1,
    "freeze_epochs": 1,
    "head": "zero",
    "patience": 5,
    "label_smoothing": 0.1,
    "normalize": "model",
    "precision": "bf16",
}
"""How a pretrained network is adapted: head and attention, which are new, learn ten times as fast as the rest."""
FILES_OF_WEIGHTS = (".safetensors", ".pth", ".bin")
"""How their names end. Not .pt: timm has a beit3_base_patch16_224.pt."""


def finetune_recipe(
    model: str,
    data: str,
    start: Start,
    changes: dict[str, Any] | None = None,
    *,
    device: str | None = None,
) -> Recipe:
    """A recipe for the network `model`, a name or a file of weights called NAME.safetensors, on the images of `data`.

    A part of the training images is held out to stop by. start.where may be LAST_STAGE; changes are fields of the
    recipe, "model_options" keywords of the network.
    """
    changes = dict(changes or {})
    name, start = _named(model, start)
    data = str(Path(data).resolve()) if Path(data).is_dir() else data  # a run is looked at from anywhere
    images = open_dataset(data, changes.get("data_dir"), "train")
    if len(images.classes) < 2:
        found = ", ".join(images.classes)[:80]
        raise ValueError(f"{data} has one class, {found}: at least two with images in them are needed to tell apart")
    size = changes.get("size") or _own_size(name)
    if start.where == LAST_STAGE:
        start = replace(start, where=tuple(_last_stage(name, size)))
    held_out = max(FEWEST, round(HELD_OUT * len(images)))
    batch = min(BATCH, _half(len(images) - held_out))
    if batch < 1:
        there = plural(len(images), "image")
        raise ValueError(f"{data} has {there}, too few to train on: at least {2 + FEWEST} are needed")
    steps = changes.get("epochs", EPOCHS) * ((len(images) - held_out) // batch)
    recipe = Recipe(
        name=f"{name.partition('.')[0].replace('/', '-')}-{Path(data).name}",
        summary=f"{name} adapted to {Path(data).name}",
        model=start_from(Model(name, changes.pop("model_options", {})), start),
        data=data,
        epochs=EPOCHS,
        batch=batch,
        size=size,
        holdout=held_out,
        # Averages over about a tenth of the steps.
        ema=min(max(1 - 10 / steps, 0.5), 0.9998),
        **ADAPTED,
    )
    recipe = for_machine(recipe, changes, **machine(device))
    recipe = recipes.override(recipe, changes)
    check_model(recipe)
    check_optimizer(recipe)
    return recipe


def _named(model: str, start: Start) -> tuple[str, Start]:
    """The network's name; a file of weights is called after its network."""
    path = Path(model)
    if not path.is_file():
        if path.suffix in FILES_OF_WEIGHTS:
            raise ValueError(f"there is no file {path} with weights; name one that is there, or a model of timm's")
        check_name(model)
        return model, start
    name = path.name.removesuffix(path.suffix)
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"{path} is not called after a model of timm: name the model, and the file with --pretrained")
    if isinstance(start.pretrained, str):
        raise ValueError(f"{model} and {start.pretrained} are both files of weights: name one")
    return name, replace(start, pretrained=model)


def _own_size(name: str) -> int:
    known = timm.get_pretrained_cfg(name) if ":" not in name else None
    return known.input_size[-1] if known is not None else SIZE


def _last_stage(name: str, size: int) -> list[str]:
    model = create_without_memory(name)
    try:
        return last_stage(model, size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; name some with --augment WHERE, or none with --augment none") from None


def _half(images: int) -> int:
    """The largest power of two of which there are two batches."""
    return 2 ** max(0, (images // 2).bit_length() - 1) if images >= 2 else 0
