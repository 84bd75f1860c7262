"""Options that several commands share: which network, which weights, which device."""

import argparse
from typing import Any

from .parsing import Parser
from .recipe_options import parse_pairs

SOURCE = "a run folder, or the name of a model"


def add_source(parser: Parser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help=SOURCE)


def add_weights(parser: Parser) -> None:
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a .safetensors file")
    parser.add_argument("--pretrained", action="store_true", help="of a model: its pretrained weights, ours or timm's")


def add_augment(parser: Parser) -> None:
    help = "of a model: put attention into these convolutions, a wildcard pattern of names"
    parser.add_argument("--augment", metavar="WHERE", help=help)
    parser.add_argument(
        "--augment.OPTION",
        dest="attention",
        action="append",
        default=[],
        metavar="VALUE",
        help="a keyword of augment: --augment.num-heads 4 --augment.value-ratio 0.2",
    )


def augmentation(chosen: argparse.Namespace) -> dict[str, Any] | None:
    """The keywords of aaconv.augment: {"where": "layer4.*.conv2", "num_heads": 4}; None where nothing is augmented."""
    if chosen.augment is None:
        if chosen.attention:
            raise ValueError(f"--augment.{chosen.attention[0].partition('=')[0]} needs --augment WHERE beside it")
        return None
    return {"where": chosen.augment, **parse_pairs(chosen.attention)}


def add_device(parser: Parser, condition: str = "") -> None:
    """`condition`: what the option depends on, at the beginning of its help."""
    help = f"{condition}cuda, cuda:1 or cpu; default: a GPU if there is one"
    parser.add_argument("--device", metavar="DEVICE", help=help)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
