"""Recipes as YAML, there and back without loss: `aaconv train --from RUN/recipe.yaml`."""

import math
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ..utils.files import replacing
from ..utils.numbers import is_whole
from .former import options_meant
from .recipe import Model, Recipe

LARGEST, MOST_VALUES, DEEPEST = 100_000, 10_000, 100
"""Letters, values and levels of a recipe; ours has a hundred values. A few aliases of aliases stand for billions."""


class _Loader(yaml.SafeLoader):
    """Stops at `DEEPEST`: the interpreter's own limit is another one once something has been compiled, and far off."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth >= DEEPEST:
            raise RecursionError
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def to_yaml(recipe: Recipe) -> str:
    """Every field, in the order of the dataclass."""
    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=True, width=100)


def from_yaml(text: str, where: str = "the recipe") -> Recipe:
    """What `to_yaml` wrote, or a person: fields with a default may be left out; a ValueError names what is wrong."""
    recipe: Recipe = _build(Recipe, parse_yaml(text, where), where)
    model = recipe.model
    return replace(recipe, model=Model(model.name, options_meant(recipe.name, model.name, model.options)))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, of at most `LARGEST` letters and `MOST_VALUES` values with every alias written out."""
    if len(text) > LARGEST:
        raise ValueError(f"{where} has {len(text):,} letters, a recipe at most {LARGEST:,}")
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = 0 if node is None else _count_values(node, {})
        if 0 < values <= MOST_VALUES:
            return yaml.constructor.SafeConstructor().construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"{where} is not YAML{line}: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ValueError(f"{where} is not opened: its YAML is nested too deeply, or contains itself") from None
    except (ValueError, AttributeError, TypeError, ArithmeticError, LookupError) as error:  # of a tag that does not fit
        raise ValueError(f"{where} has a value that YAML cannot read: {error}") from None
    if values:
        raise ValueError(f"{where} has more than {MOST_VALUES:,} values, most of them by aliases (*name)")
    return None


def _count_values(node: yaml.Node, counted: dict[int, int], depth: int = 0) -> int:
    """How many values a node stands for; a RecursionError where it is too deep, as one that contains itself is."""
    if depth > DEEPEST:
        raise RecursionError
    if id(node) in counted:
        return counted[id(node)]
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in parts for part in pair]
    total = 1 + sum(_count_values(part, counted, depth + 1) for part in parts)
    counted[id(node)] = total
    return total


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
            raise ValueError(f"{where} has a field {_short(name)}, which a {kind.__name__.lower()} does not have{hint}")
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    try:
        return kind(**{name: fit(value, hints[name], name, where) for name, value in values.items()})
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def fit(value: Any, hint: Any, name: str, where: str) -> Any:
    """The value as its type wants it: a whole number as a float, a list as a tuple; a ValueError if it does not fit."""
    if isinstance(hint, type) and is_dataclass(hint):
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
        fits = isinstance(value, dict) and _is_plain(value)
    elif hint is float:
        fits = is_whole(value) or (isinstance(value, float) and not math.isnan(value))
        value = float(value) if fits else value
    else:
        fits = type(value) is hint
    if isinstance(value, int) and not isinstance(value, bool) and not is_whole(value):
        raise ValueError(f"{where}: {name} must fit 64 bits, got a number of {value.bit_length()}")
    if not fits:
        raise ValueError(f"{where}: {name} must be {describe(hint)}, got {_short(value)}")
    return value


def _is_plain(value: Any) -> bool:
    """Is it made of texts, numbers, lists and mappings by name alone, as JSON is?"""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | float) or is_whole(value)


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is UnionType:
        return " or ".join("none" if kind is NoneType else describe(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {'texts' if get_args(hint)[0] is str else 'numbers'}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, "a mapping of names to texts, numbers and lists of them")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
