"""Commands about networks: models, cost."""

import argparse

from .parsing import Parser, positive
from .source import add_augment, add_json, augmentation


def add_commands(commands: Parser) -> None:
    models = commands.add("models", _models, "list the models with their parameters and FLOPs", "'aa_*'")
    models.add_argument(
        "pattern", nargs="?", default="*", metavar="PATTERN", help="a wildcard pattern or a part of the name"
    )
    add_json(models)

    about = "count parameters, FLOPs and attention-map memory of a model"
    cost = commands.add("cost", _cost, about, "aa_resnet50 --layers")
    cost.add_argument("model", metavar="MODEL", help="a name of ours (`aaconv models`) or of timm's")
    cost.add_argument("--size", type=positive, nargs="+", metavar="N", help="height and width, or one number for both")
    cost.add_argument("--layers", action="store_true", help="layer by layer")
    add_augment(cost)
    add_json(cost)


def _models(chosen: argparse.Namespace) -> None:
    from ..cost.show import print_models

    print_models(chosen.pattern, as_json=chosen.json)


def _cost(chosen: argparse.Namespace) -> None:
    from ..cost.show import print_cost

    size = None
    if chosen.size:
        if len(chosen.size) > 2:
            raise ValueError(f"--size takes height and width, or one for both, got {len(chosen.size)} numbers")
        size = (chosen.size[0], chosen.size[-1])
    augment = augmentation(chosen)
    print_cost(chosen.model, size, augment=augment, layers=chosen.layers, as_json=chosen.json)
