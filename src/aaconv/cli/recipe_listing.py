"""The catalogue in print: `aaconv recipes` and `aaconv recipes show NAME`."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from rich.text import Text

from ..recipes import catalogue
from ..recipes.overrides import field_texts
from ..recipes.paper import ACCURACY
from ..recipes.recipe import Recipe
from ..utils.terminal import fitting_console, new_table

OUR_CHOICE = "our choice: the paper does not say"


COLUMNS: dict[str, Callable[[Recipe], str]] = {
    "recipe": lambda recipe: recipe.name,
    "network": lambda recipe: recipe.model.name,
    "data": lambda recipe: recipe.data,
    "epochs": lambda recipe: str(recipe.epochs),
    "table": lambda recipe: str(recipe.evidence.table) if recipe.evidence else "",
    "row": lambda recipe: recipe.evidence.row if recipe.evidence else "",
    "paper": lambda recipe: _headline(recipe),
}
DISPENSABLE = ("row", "data")
"""Columns that are left out, one after the other, until a narrow terminal has room for the rest."""


def print_recipes(pattern: str = "*", *, as_json: bool = False) -> None:
    """A line per recipe; columns that do not fit the terminal are left out, the name never."""
    found = [catalogue.get(name) for name in catalogue.names(pattern)]
    if as_json:
        print(json.dumps([_with_paper(recipe) for recipe in found], indent=2))
        return
    output = fitting_console()
    columns = {title: [cell(recipe) for recipe in found] for title, cell in COLUMNS.items()}
    for title in DISPENSABLE:
        if sum(max(map(len, [title, *cells])) + 2 for title, cells in columns.items()) - 2 > output.width:
            del columns[title]
    table = new_table(*columns, right=("epochs", "table", "paper"))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    output.print(table)
    if any(recipe.evidence for recipe in found):
        output.print(Text("paper: top-1 accuracy or mAP as printed, in percent", "dim"))
    output.print(Text(f"aaconv recipes show {found[0].name} prints all of one", "dim"))


def print_recipe(name: str, *, as_json: bool = False) -> None:
    """Every field of one recipe, what the paper got, and the command that trains it."""
    recipe = catalogue.get(name)
    if as_json:
        print(json.dumps(_with_paper(recipe), indent=2))
        return
    output = fitting_console()
    output.print(Text.assemble((recipe.name, "bold"), f"  {recipe.summary}"))
    row = catalogue.paper_row(recipe)
    if row is not None and recipe.evidence is not None:
        cells = ", ".join(f"{column} {value}" for column, value in row.cells.items() if value != "-")
        output.print(Text(f"the paper, table {recipe.evidence.table}, {row.name}: {cells}"))
    output.print(Text(f"\n  aaconv train {recipe.name}{_where(recipe)}\n", "cyan"), soft_wrap=True)
    ours, texts = catalogue.ours(recipe), field_texts()
    table = new_table("", header=False)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for field in fields(Recipe):
        if field.name in ("name", "summary", "evidence"):
            continue
        note = OUR_CHOICE if field.name in ours else texts.get(field.name, "")
        table.add_row(field.name, _value(recipe, field.name), note)
    output.print(table)


def _headline(recipe: Recipe) -> str:
    row = catalogue.paper_row(recipe)
    return "" if row is None else next((row.cells[name] for name in ACCURACY if name in row.cells), "").split()[0]


def _value(recipe: Recipe, name: str) -> str:
    value = getattr(recipe, name)
    if name == "model":
        return value.name + "".join(f"\n{option}={setting}" for option, setting in value.options.items())
    if name == "lr" and value is None:
        return f"{recipe.lr_base * recipe.batch / recipe.lr_base_size:g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(f"{number:g}" for number in value) or "none"
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _where(recipe: Recipe) -> str:
    """The option that says where images are which can neither be drawn nor downloaded."""
    if recipe.data.startswith(("shapes", "cifar")):
        return ""
    return " --data folder/PATH" if recipe.data.startswith("folder/") else " --data-dir PATH"


def _with_paper(recipe: Recipe) -> dict[str, Any]:
    row = catalogue.paper_row(recipe)
    return asdict(recipe) | {"paper": None if row is None else row.cells, "command": f"aaconv train {recipe.name}"}
