"""Commands about the paper: table, plot."""

import argparse
from pathlib import Path
from typing import Any

from .parsing import add, nearest

PLOTS = ("params", "flops", "mnasnet-params", "mnasnet-flops", "ratios")


def add_commands(commands: Any) -> None:
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


def table_number(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 9 or 'all', got {text!r}")
    return text if text == "all" else int(text)


def _table(chosen: argparse.Namespace) -> None:
    from ..paper.tables import print_tables
    from ..runs.results import RESULTS

    if chosen.results is not None and not Path(chosen.results).is_dir():
        raise FileNotFoundError(f"there is no folder {chosen.results} with results; `aaconv record` makes one")
    numbers = [] if chosen.number == "all" else [[chosen.number]]
    print_tables(*numbers, as_json=chosen.json, folder=chosen.results or RESULTS)


def _plot(chosen: argparse.Namespace) -> None:
    from ..paper.figures import save
    from ..runs.curves import draw, is_recorded
    from ..runs.run_folder import is_run

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
