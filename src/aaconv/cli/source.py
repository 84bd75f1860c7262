"""Options of the commands that take a network: which one, and with which weights."""

import argparse

SOURCE = "a run folder, or a registered model's name"


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a file of weights")
    parser.add_argument(
        "--pretrained", action="store_true", help="of a model's name: with its own weights, ours or timm's"
    )
