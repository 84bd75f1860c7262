"""Commands about the paper: table, plot."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from .parsing import Parser, nearest
from .source import add_json

PLOTS = ("params", "flops", "mnasnet-params", "mnasnet-flops", "ratios", "ablation", "distance")


def add_commands(commands: Parser) -> None:
    about = "print the paper's tables with our numbers beside them"
    table = commands.add("table", _table, about, "3")
    table.add_argument(
        "which",
        nargs="?",
        default="all",
        type=table_number,
        metavar="N|all|DATASET",
        help="1 to 9; or the data of recorded runs, such as cifar100; default: all tables",
    )
    table.add_argument(
        "--results",
        metavar="DIR",
        help="read our runs from here; default: those of the package, and what `aaconv record` kept in results",
    )
    differences = "with DATASET: the difference of the others to this recipe, trained alike, with 95 %% intervals"
    table.add_argument("--against", metavar="RECIPE", help=differences)
    add_json(table)

    about = "draw the learning curves of runs, or a figure of the paper"
    plot = commands.add("plot", _plot, about, "runs/demo-* -o curves.png")
    plot.add_argument(
        "what",
        nargs="+",
        metavar="RUN|FIGURE",
        help="run folders, recorded results (.json files, or patterns such as 'cifar100/*wrn16_4*' of those that come "
        f"with the package), averaged over seeds; or one of the paper's figures: {', '.join(PLOTS[:5])}; or one of our "
        "own results: ablation (accuracy over the ratio of attention), distance (over that of two objects)",
    )
    plot.add_argument(
        "-o", "--output", metavar="FILE", help="a .png, .svg or .pdf file; default: FIGURE.png or curves.png"
    )


def table_number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _table(chosen: argparse.Namespace) -> None:
    from ..paper.tables import print_runs_on, print_tables

    if chosen.results is not None and not Path(chosen.results).is_dir():
        raise FileNotFoundError(f"there is no folder {chosen.results} with results; `aaconv record` makes one")
    if isinstance(chosen.which, str) and chosen.which != "all":
        print_runs_on(chosen.which, against=chosen.against, as_json=chosen.json, folder=chosen.results)
        return
    if chosen.against is not None:
        raise ValueError("--against goes with the name of a data set, such as aaconv table cifar100")
    numbers = [] if chosen.which == "all" else [[chosen.which]]
    print_tables(*numbers, as_json=chosen.json, folder=chosen.results)


def _plot(chosen: argparse.Namespace) -> None:
    first, *others = chosen.what
    if not any(what in PLOTS for what in chosen.what):
        from ..runs.curves import draw

        print(f"drew {draw(_courses(chosen.what), chosen.output or 'curves.png')}")
        return
    if others:
        raise ValueError(f"one figure at a time, and without runs, got {' '.join(chosen.what)}")
    from ..paper.figures import save

    print(f"drew {save(first, chosen.output or f'{first}.png')}")


def _courses(places: Iterable[str]) -> list[str]:
    """Run folders and recorded results; of the package's, those that fit a pattern."""
    from ..runs.curves import is_recorded
    from ..runs.results import fitting
    from ..runs.run_folder import is_run

    found: list[str] = []
    for place in places:
        if is_run(place) or is_recorded(place):
            found.append(place)
        elif place.endswith(".json") and Path(place).is_file():
            raise ValueError(f"{place} has no metrics beside it, {Path(place).with_suffix('.csv').name}")
        elif recorded := fitting(place):
            found += map(str, recorded)
        else:
            raise ValueError(f"unknown run or figure {place!r}{nearest(place, PLOTS)}")
    return found
