"""Commands about data sets: data preview."""

import argparse
from typing import Any

from .parsing import add, positive, seed


def add_commands(commands: Any) -> None:
    data = add(commands, "data", None, "look at a data set: preview")
    _add_preview(data.add_subparsers(title="commands", dest="look", metavar="command", required=True))


def _add_preview(looks: Any) -> None:
    preview = add(looks, "preview", _data_preview, "draw a sheet of examples", "shapes -o sheet.png")
    preview.add_argument(
        "name", help="shapes, cifar10, cifar100, imagenet, coco/PATH, folder/PATH, wds/PATH or hfds/NAME"
    )
    preview.add_argument("-o", "--output", metavar="FILE", help="an image file; default: NAME.png")
    preview.add_argument("--data-dir", metavar="DIR", help="where the data lie")
    preview.add_argument(
        "--split", choices=("train", "test"), default="train", metavar="split", help="train (default) or test"
    )
    preview.add_argument("--count", type=positive, default=24, metavar="N", help="examples, default: 24")
    preview.add_argument("--seed", type=seed, default=0, metavar="N", help="chooses the examples, default: 0")


def _data_preview(chosen: argparse.Namespace) -> None:
    from ..data import preview

    path = chosen.output or f"{chosen.name.rstrip('/').rpartition('/')[2]}.png"
    preview.save(chosen.name, path, data_dir=chosen.data_dir, split=chosen.split, count=chosen.count, seed=chosen.seed)
    print(f"drew {path}")
