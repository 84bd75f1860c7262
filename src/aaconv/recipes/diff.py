"""What was changed in a recipe: as fields, and as options of the command line."""

import json
import math
import shlex
from dataclasses import asdict
from typing import Any

import yaml

from . import catalogue
from .recipe import Model, Recipe

NEUTRAL = {
    *("seed", "data_dir", "workers", "max_unreadable", "compile", "checkpoint_every", "keep", "eval_every", "evidence"),
    "summary",
}
"""Fields of a recipe that do not make another experiment of it."""


def changes_of(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of its recipe that were changed and that matter."""
    return {name: value for name, value in (record.get("overrides") or {}).items() if name not in NEUTRAL}


def changes_in(recipe: Recipe) -> dict[str, Any]:
    """The same of a recipe itself."""
    return changes_of({"overrides": overrides_of(recipe)})


def usual(name: str, model: Model, data: str, epochs: int) -> Recipe:
    """What overrides are held against: the catalogue's recipe or, for a name that it does not have, all defaults."""
    return catalogue.get(name) if name in catalogue.names() else Recipe(name, "", model, data, epochs, batch=1)


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """All fields, as JSON can hold them."""
    return asdict(recipe) | {"model": {"name": recipe.model.name, "options": kept_options(recipe.model)}}


USUAL_WEIGHTS = {"tf_efficientnet_lite0": "2b4a5f7e9a18"}
"""The start of the sha256 of the weights that the catalogue's recipes start from."""


def kept_options(model: Model) -> dict[str, Any]:
    """The options of a network without the file that its first weights were read from, which has a place of its own on
    every machine; the sha256 of what is in it says which weights they were, unless they are the usual ones."""
    overlay = model.options.get("pretrained_cfg_overlay")
    if not isinstance(overlay, dict):
        return model.options
    others = {name: value for name, value in model.options.items() if name != "pretrained_cfg_overlay"}
    overlay = {name: value for name, value in overlay.items() if name != "file"}
    if overlay.get("sha256") == USUAL_WEIGHTS.get(model.base):
        overlay.pop("sha256", None)
    return others | ({"pretrained_cfg_overlay": overlay} if overlay else {})


def overrides_of(recipe: Recipe) -> dict[str, Any]:
    """The fields that differ from the catalogue's recipe of that name or, if it has none, from the defaults."""
    own, others = fields_of(recipe), fields_of(usual(recipe.name, recipe.model, recipe.data, recipe.epochs))
    return {name: value for name, value in own.items() if value != others[name]}


def experiment_key(recipe: Recipe) -> str:
    """The same text for recipes of one experiment, and another for all others."""
    about = {name: value for name, value in fields_of(recipe).items() if name not in NEUTRAL}
    return json.dumps(about, sort_keys=True)


def options_of(recipe: Recipe, changes: dict[str, Any]) -> list[str]:
    """The changes of a recipe as options of the command line."""
    words = []
    for name, value in changes.items():
        option = "--" + name.replace("_", "-")
        match value:
            case {"name": model, "options": options}:
                usual = recipe.model
                if model != usual.name:
                    words.append(f"--model {model}")
                new = {key: it for key, it in options.items() if model != usual.name or usual.options.get(key) != it}
                words += [_network_option(key, it) for key, it in new.items()]
            case bool():
                words.append(option if value else option.replace("--", "--no-", 1))
            case list() | tuple():
                words.append(" ".join([option, *map(_written, value)]))
            case _:
                words.append(f"{option} {_written(value)}")
    return words


def _network_option(name: str, value: Any) -> str:
    if name == "pretrained_cfg_overlay" and isinstance(value, dict) and "sha256" in value:
        return f"--pretrained sha256:{value['sha256']}"  # of a file that everybody has somewhere else
    return f"--model.{name.replace('_', '-')} {_written(value)}"


def _written(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return shlex.quote(value)
        case list() | tuple() | dict():
            return shlex.quote(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).strip())
        case _:
            return str(value)
