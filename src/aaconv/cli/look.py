"""Commands that show what there is: models and their cost, the paper's tables and figures, data, this machine."""

import argparse
from pathlib import Path
from typing import Any

from .parsing import add, nearest, positive, seed

PLOTS = ("params", "flops", "mnasnet-params", "mnasnet-flops", "ratios")


def add_commands(commands: Any) -> None:
    cost = add(commands, "cost", _cost, "parameters, FLOPs and map memory of a model", "aa_resnet50 --layers")
    cost.add_argument("model", help="a registered name; `aaconv models` lists them")
    cost.add_argument("--size", type=positive, nargs="+", metavar="N", help="height and width, or one for both")
    cost.add_argument("--layers", action="store_true", help="layer by layer")
    cost.add_argument("--json", action="store_true", help="print JSON")

    models = add(commands, "models", _models, "list the models with parameters and FLOPs", "'aa_*'")
    models.add_argument("pattern", nargs="?", default="*", help="a wildcard pattern or a part of the name")
    models.add_argument("--json", action="store_true", help="print JSON")

    table = add(commands, "table", _table, "the paper's tables 1 to 9, cell by cell, with ours beside them", "3")
    table.add_argument("number", nargs="?", default="all", type=table_number, metavar="N|all", help="default: all")
    table.add_argument("--results", metavar="DIR", help="where `aaconv record` kept our runs, default: results")
    table.add_argument("--json", action="store_true", help="print JSON")

    plot = add(
        commands, "plot", _plot, "draw the curves of runs, or a figure of the paper", "runs/demo-* -o curves.png"
    )
    plot.add_argument(
        "what",
        nargs="+",
        metavar="RUN|FIGURE",
        help=f"run folders or recorded results (.json), of which seeds are averaged; or one of {', '.join(PLOTS)}",
    )
    plot.add_argument(
        "-o", "--output", metavar="FILE", help="a .png, .svg or .pdf file; default: FIGURE.png or curves.png"
    )

    data = add(commands, "data", None, "look at a data set: preview")
    _add_preview(data.add_subparsers(title="commands", dest="look", metavar="command", required=True))

    add(commands, "doctor", _doctor, "what this machine can run, and which backend each model would take")


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


def table_number(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 9 or 'all', got {text!r}")
    return text if text == "all" else int(text)


def _cost(chosen: argparse.Namespace) -> None:
    from ..cost import print_cost

    size = None
    if chosen.size:
        if len(chosen.size) > 2:
            raise ValueError(f"--size takes height and width, or one for both, got {len(chosen.size)} numbers")
        size = (chosen.size[0], chosen.size[-1])
    print_cost(chosen.model, size, layers=chosen.layers, as_json=chosen.json)


def _models(chosen: argparse.Namespace) -> None:
    from ..cost import print_models

    print_models(chosen.pattern, as_json=chosen.json)


def _table(chosen: argparse.Namespace) -> None:
    from ..results import RESULTS
    from ..tables import print_tables

    if chosen.results is not None and not Path(chosen.results).is_dir():
        raise FileNotFoundError(f"there is no folder {chosen.results} with results; `aaconv record` makes one")
    numbers = [] if chosen.number == "all" else [[chosen.number]]
    print_tables(*numbers, as_json=chosen.json, folder=chosen.results or RESULTS)


def _plot(chosen: argparse.Namespace) -> None:
    from ..curves import draw, is_recorded
    from ..plots import save
    from ..run_folder import is_run

    first, *others = chosen.what
    if any(what in PLOTS for what in chosen.what):
        if others:
            raise ValueError(f"one figure at a time, and without runs, got {' '.join(chosen.what)}")
        print(f"drew {save(first, chosen.output or f'{first}.png')}")
        return
    for place in chosen.what:
        if is_run(place) or is_recorded(place):
            continue
        if place.endswith(".json") and Path(place).is_file():
            raise ValueError(f"{place} has no metrics beside it, {Path(place).with_suffix('.csv').name}")
        raise ValueError(f"there is no run or figure {place!r}{nearest(place, list(PLOTS))}")
    print(f"drew {draw(chosen.what, chosen.output or 'curves.png')}")


def _data_preview(chosen: argparse.Namespace) -> None:
    from ..data import preview

    path = chosen.output or f"{chosen.name.rstrip('/').rpartition('/')[2]}.png"
    preview.save(chosen.name, path, data_dir=chosen.data_dir, split=chosen.split, count=chosen.count, seed=chosen.seed)
    print(f"drew {path}")


def _doctor(chosen: argparse.Namespace) -> None:
    from ..doctor import print_report

    print_report()
