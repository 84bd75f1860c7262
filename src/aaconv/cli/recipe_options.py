"""The fields of a recipe as options of the command line, generated from the dataclass."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..recipes.overrides import field_texts
from ..recipes.recipe import Recipe
from ..recipes.yaml_file import describe
from .parsing import Parser, one_of

MODEL_OPTION, ATTENTION_OPTION = "--model.", "--augment."
FIXED = ("evidence",)
"""Fields that follow from others: the cell of the paper belongs to its network and data."""


def add_options(parser: Parser, without: Sequence[str] = ()) -> None:
    """An option for each field but those, without defaults: what is not given is not in the namespace."""
    group = parser.add_argument_group("fields of the recipe", "each replaces the value of the recipe")

    def add(*names: str, **how: Any) -> None:
        parser.remember(group.add_argument(*names, default=argparse.SUPPRESS, **how))

    if "model" not in without:
        add("--model", metavar="NAME", help="another network; `aaconv models` lists them, all of timm's are known")
    add(
        "--model.OPTION",
        dest="model_options",
        action="append",
        metavar="VALUE",
        help="a keyword of the network: --model.num-heads 4 --model.position none",
    )
    hints, texts = get_type_hints(Recipe), field_texts()
    for field in fields(Recipe):
        if field.name not in ("model", *FIXED, *without):
            about = _about(field.name, hints[field.name])
            help = _help(field, hints[field.name], texts.get(field.name))
            add("--" + field.name.replace("_", "-"), dest=field.name, help=help, **about)


def _about(name: str, hint: Any) -> dict[str, Any]:
    """What add_argument has to know about a field of that type."""
    kind = _not_none(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        bare = {"nargs": "?", "const": "default"} if name == "compile" else {}
        return one_of(name, get_args(kind)) | bare
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return {
            "nargs": "*",
            "action": "extend",
            "type": _reader(item),
            "metavar": "TEXT" if item is str else "N",
        }
    return {"type": _reader(hint), "metavar": "TEXT" if kind is str else "N"}


def spell_out(arguments: Sequence[str]) -> list[str]:
    """`--model.num-heads 4` as `--model.OPTION=num_heads=4`, `--augment.num-heads 4` likewise: argparse has to know all
    names, and networks differ."""
    spelt, rest = [], iter(arguments)
    for word in rest:
        before = next((prefix for prefix in (MODEL_OPTION, ATTENTION_OPTION) if word.startswith(prefix)), None)
        if before is None or word.startswith(f"{before}OPTION"):
            spelt.append(word)
            continue
        name, equals, value = word.removeprefix(before).partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise ValueError(f"{word} needs a value: {word} 4")
            value = following
        spelt.append(f"{before}OPTION={name.replace('-', '_')}={value}")
    return spelt


def given(chosen: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given on the command line, by name; "model_options" are those of the network."""
    names = {field.name for field in fields(Recipe)} | {"model_options"}
    values = {name: value for name, value in vars(chosen).items() if name in names}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if "model_options" in values:
        values["model_options"] = parse_pairs(values["model_options"])
    return values


def parse_pairs(texts: Sequence[str]) -> dict[str, Any]:
    """["num_heads=4", ...] as a mapping."""
    pairs = (text.partition("=") for text in texts)
    return {name: parse_value(value) for name, _, value in pairs}


def parse_value(text: str) -> Any:
    """4, 0.5, 1e-3, true, [14, 14], {layer1.*: 2}: as in YAML; anything else is a text."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML wants a dot in 1e-3
        except ValueError:
            return value
    if isinstance(value, dict) and text.lstrip().startswith("{"):  # "a: b" is a text
        return value
    return value if isinstance(value, bool | int | float | list | NoneType) else text


def _help(field: Any, hint: Any, text: str | None) -> str:
    parts = [_as_a_phrase(text) if text else describe(hint)]
    if text and get_origin(_not_none(hint)) is Literal:
        parts.append(f"one of {', '.join(get_args(_not_none(hint)))}")
    if field.default is not MISSING and field.default is not None and hint is not bool:
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        parts.append(f"usually {default}" if default != "" else "")
    return "; ".join(part.rstrip(".") for part in parts if part).replace("%", "%%")


def _as_a_phrase(text: str) -> str:
    """As all help is written, without the capital of a sentence; None is what one writes there."""
    text = text.replace("None: ", "none: ")
    return text[0].lower() + text[1:] if text[1:2].islower() else text


def _not_none(hint: Any) -> Any:
    if get_origin(hint) is UnionType:
        return next(kind for kind in get_args(hint) if kind is not NoneType)
    return hint


def _reader(hint: Any) -> Any:
    """What argparse calls with the text of an option: an ArgumentTypeError says what was expected."""
    kind = _not_none(hint)

    def read(text: str) -> Any:
        if kind is not hint and text.lower() == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {describe(hint)}, got {text!r}") from None

    return read
