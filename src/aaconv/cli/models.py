"""Commands about networks: cost, models."""

import argparse
from typing import Any

from .parsing import add, positive


def add_commands(commands: Any) -> None:
    cost = add(commands, "cost", _cost, "parameters, FLOPs and map memory of a model", "aa_resnet50 --layers")
    cost.add_argument("model", help="a registered name; `aaconv models` lists them")
    cost.add_argument("--size", type=positive, nargs="+", metavar="N", help="height and width, or one for both")
    cost.add_argument("--layers", action="store_true", help="layer by layer")
    cost.add_argument("--json", action="store_true", help="print JSON")

    models = add(commands, "models", _models, "list the models with parameters and FLOPs", "'aa_*'")
    models.add_argument("pattern", nargs="?", default="*", help="a wildcard pattern or a part of the name")
    models.add_argument("--json", action="store_true", help="print JSON")


def _cost(chosen: argparse.Namespace) -> None:
    from ..cost.counting import print_cost

    size = None
    if chosen.size:
        if len(chosen.size) > 2:
            raise ValueError(f"--size takes height and width, or one for both, got {len(chosen.size)} numbers")
        size = (chosen.size[0], chosen.size[-1])
    print_cost(chosen.model, size, layers=chosen.layers, as_json=chosen.json)


def _models(chosen: argparse.Namespace) -> None:
    from ..cost.counting import print_models

    print_models(chosen.pattern, as_json=chosen.json)
