"""Recipes with other values: changed by hand, or for the machine that they run on."""

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, get_type_hints

from . import recipe as definition
from .recipe import Model, Recipe
from .yaml_file import fit


def override(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with other values; "model" is a name here, "model_options" are added to those it has.

    Another network starts without options. The paper's cell is kept as long as network and data are; the backend of the
    attention is part of neither.

    >>> from aaconv import recipes
    >>> recipes.override(recipes.get("demo-aa"), {"epochs": 1, "model_options": {"num_heads": 2}}).model
    Model(name='aa_small', options={'num_heads': 2})
    """
    changes = dict(changes)
    model, options = changes.pop("model", None), changes.pop("model_options", {})
    if model is not None and model != recipe.model.name:
        changes["model"] = Model(model, options)
    elif options:
        changes["model"] = Model(recipe.model.name, recipe.model.options | options)
    hints = get_type_hints(Recipe)
    for name in changes:
        if name not in hints:
            near = get_close_matches(name, hints, n=1)
            raise ValueError(f"a recipe has no field {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        if name != "model":
            changes[name] = fit(changes[name], hints[name], name, recipe.name)
    changed = replace(recipe, **changes)
    if changed.optimizer != recipe.optimizer:
        check_optimizer(changed)
    if (_network(changed.model), changed.data) != (_network(recipe.model), recipe.data):
        changed = replace(changed, evidence=None)
    if changed.model != recipe.model:
        check_model(changed)
    return changed


def _network(model: Model) -> tuple[str, dict[str, Any]]:
    return model.name, {name: value for name, value in model.options.items() if name != "backend"}


def check_model(recipe: Recipe) -> None:
    """Build the network without memory for it; what is wrong with its name or options is a ValueError."""
    from ..models import create_without_memory

    for name, value in recipe.model.options.items():
        if value is None:
            option = f"--model.{name.replace('_', '-')}"
            raise ValueError(
                f"{option} null: timm leaves out what is null, so {recipe.model.name} would take its own value; "
                f"leave {option} out, or name a network without it"
            )
    try:
        create_without_memory(recipe.model.name, **recipe.model.network_options)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        options = "".join(f" --model.{name.replace('_', '-')} {value}" for name, value in recipe.model.options.items())
        message = " ".join(str(error).split())
        if recipe.model.base != recipe.model.name:
            raise ValueError(f"{recipe.model.base}: {message}") from None
        raise ValueError(message if not options else f"{recipe.model.name}{options}: {message}") from None


def check_optimizer(recipe: Recipe) -> None:
    """A ValueError names the nearest where timm has no optimizer of that name."""
    from timm.optim import list_optimizers

    known: list[Any] = list_optimizers()
    if recipe.optimizer.lower().rpartition("_")[2] not in known:  # before it stands lookahead_, or nothing
        near = get_close_matches(recipe.optimizer, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.optim.list_optimizers() has all names"
        raise ValueError(f"unknown optimizer {recipe.optimizer!r}; {hint}")


def for_machine(recipe: Recipe, given: Iterable[str], *, gpu: bool, cores: int, processes: int = 1) -> Recipe:
    """The recipe as this machine does it best, but for the fields that were given.

    What a GPU does in bf16 and compiled, a CPU does faster in float32 and without compilation; CUDA graphs have not
    been tried with several processes; and more workers than cores only wait for each other.
    """
    better: dict[str, Any] = {} if gpu else {"precision": "float32", "compile": "off"}
    if gpu and processes > 1 and recipe.compile == "reduce-overhead":
        better["compile"] = "default"
    better["workers"] = min(recipe.workers, cores)
    return replace(recipe, **{name: value for name, value in better.items() if name not in given})


def field_texts() -> dict[str, str]:
    """What stands under each field of the dataclass in its source."""
    (recipe,) = ast.parse(textwrap.dedent(inspect.getsource(definition.Recipe))).body
    assert isinstance(recipe, ast.ClassDef)
    texts = {}
    for node, below in pairwise(recipe.body):
        if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
            continue
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            texts[node.target.id] = " ".join(str(below.value.value).split())
    return texts
