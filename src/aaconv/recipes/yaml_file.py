"""Recipes as YAML, there and back without loss: `aaconv train --from RUN/recipe.yaml`."""

import math
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ..utils.files import replacing
from .recipe import Recipe


def to_yaml(recipe: Recipe) -> str:
    """Every field, in the order of the dataclass."""
    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True, width=100)


def from_yaml(text: str, where: str = "the recipe") -> Recipe:
    """What `to_yaml` wrote, or a person: fields with a default may be left out; a ValueError names what is wrong."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"{where} is not YAML{line}: {getattr(error, 'problem', None) or error}") from None
    return _build(Recipe, values, where)


def save(recipe: Recipe, path: str | Path) -> None:
    """Write the recipe; the file is replaced whole."""
    with replacing(path) as draft:
        draft.write_text(to_yaml(recipe), encoding="utf-8")


def load(path: str | Path) -> Recipe:
    """Read a recipe; nothing in the file can run code."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no recipe {path}; a run keeps its own in RUN/recipe.yaml") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder, not a recipe; that of a run is in RUN/recipe.yaml") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not YAML: it is not text") from None
    return from_yaml(text, str(path))


def _build(kind: type, values: Any, where: str) -> Any:
    """A dataclass out of a mapping, every value checked against the type of its field."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a mapping of the fields of a {kind.__name__.lower()}, got {_short(values)}")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            near = get_close_matches(str(name), hints, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has a field {name!r}, which a {kind.__name__.lower()} does not have{hint}")
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    try:
        return kind(**{name: fit(value, hints[name], name, where) for name, value in values.items()})
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def fit(value: Any, hint: Any, name: str, where: str) -> Any:
    """The value as its type wants it: a whole number as a float, a list as a tuple; a ValueError if it does not fit."""
    if is_dataclass(hint):
        return _build(hint, value, f"{where}: {name}")
    if get_origin(hint) is UnionType:
        kinds = get_args(hint)
        if value is None and NoneType in kinds:
            return None
        return fit(value, next(kind for kind in kinds if kind is not NoneType), name, where)
    if get_origin(hint) is Literal:
        fits = value in get_args(hint)
    elif get_origin(hint) is tuple:
        if isinstance(value, list | tuple):
            return tuple(fit(one, get_args(hint)[0], name, where) for one in value)
        fits = False
    elif get_origin(hint) is dict:
        fits = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        value = float(value) if fits else value
    else:
        fits = type(value) is hint
    if not fits:
        raise ValueError(f"{where}: {name} must be {describe(hint)}, got {_short(value)}")
    return value


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is UnionType:
        return " or ".join("none" if kind is NoneType else describe(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {'texts' if get_args(hint)[0] is str else 'numbers'}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, "a mapping of names to values")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
