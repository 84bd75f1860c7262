"""`aaconv recipes`."""

import argparse
from typing import Any

from .parsing import add


def add_commands(commands: Any) -> None:
    _add_recipes(commands)


def _add_recipes(commands: Any) -> None:
    recipes = add(commands, "recipes", _recipes, "list the recipes, or show one", "show cifar100-small-aa")
    recipes.add_argument("pattern", nargs="?", default="*", help="a wildcard pattern, a part of the name, or `show`")
    recipes.add_argument("name", nargs="?", help="with `show`: the recipe to show, field by field")
    recipes.add_argument("--json", action="store_true", help="print JSON")


def _recipes(chosen: argparse.Namespace) -> None:
    from .recipe_listing import print_recipe, print_recipes

    if chosen.pattern == "show":
        if chosen.name is None:
            raise ValueError("which recipe? aaconv recipes show NAME")
        print_recipe(chosen.name, as_json=chosen.json)
    elif chosen.name is not None:
        raise ValueError(f"one pattern at a time, got {chosen.pattern!r} and {chosen.name!r}; quote it: 'cifar100-*'")
    else:
        print_recipes(chosen.pattern, as_json=chosen.json)
