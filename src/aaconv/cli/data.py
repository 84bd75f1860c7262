"""Commands about data sets: data preview."""

import argparse

from .parsing import Parser, one_of, positive, seed


def add_commands(commands: Parser) -> None:
    data = commands.add("data", None, "look at a data set")
    data.expect("command")
    preview = data.add("preview", _preview, "draw a sheet of examples", "shapes -o sheet.png")
    preview.add_argument(
        "name",
        metavar="NAME",
        help="shapes, cifar10, cifar100, tiny-imagenet, imagenet, coco/PATH, folder/PATH, wds/PATH, hfds/NAME",
    )
    preview.add_argument("-o", "--output", metavar="FILE", help="an image file; default: NAME.png")
    preview.add_argument("--data-dir", metavar="DIR", help="where the data set is")
    preview.add_argument("--split", **one_of("split", ("train", "test")), default="train", help="train (default), test")
    preview.add_argument("--count", type=positive, default=24, metavar="N", help="examples, default: 24")
    preview.add_argument("--seed", type=seed, default=0, metavar="N", help="chooses the examples, default: 0")


def _preview(chosen: argparse.Namespace) -> None:
    from ..data import preview

    path = chosen.output or f"{chosen.name.rstrip('/').rpartition('/')[2]}.png"
    preview.save(chosen.name, path, data_dir=chosen.data_dir, split=chosen.split, count=chosen.count, seed=chosen.seed)
    print(f"drew {path}")
