"""`aaconv recipes`."""

import argparse

from .parsing import Parser
from .source import add_json


def add_commands(commands: Parser) -> None:
    recipes = commands.add("recipes", _recipes, "list the recipes, or show one", "show cifar100-small-aa")
    recipes.add_argument(
        "pattern", nargs="?", default="*", metavar="PATTERN", help="a wildcard pattern, a part of the name, or `show`"
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="after `show`: the recipe to show, field by field")
    add_json(recipes)


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
