"""Rows of the paper's tables on data of our own: the same networks, where our runs have them on other images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ..recipes.diff import options_of
from ..recipes.paper import ACCURACY, TABLES, PaperTable, Row
from ..runs.results import Experiment, common_epochs, recipe_of
from ..utils.metrics import metric_name
from ..utils.terminal import new_table, plural

PARTS = "-part"
"""How `aaconv record` ends the name of a data set of which only a part was used."""
FOR_SMALL_IMAGES = {"stem_pool": False}
"""Options that fit a network to the images, and do not make another row of it."""


@dataclass(frozen=True)
class OwnRow:
    """A row of a table, and our experiment with its network in each column: on a data set, in a way of training."""

    row: Row
    on: dict[str, Experiment]


def rows_on_other_data(table: PaperTable, ours: list[Experiment]) -> list[OwnRow]:
    """Of each row and column the experiment that changes least, then that with most runs; first the smaller networks
    that the paper does not have. None of a table that has no accuracies."""
    if not any(name in table.columns for name in ACCURACY):
        return []
    headline = metric_name(_headline(table))
    known = {other.dataset for other in TABLES.values()}
    others = [one for one in ours if one.dataset not in known and not one.dataset.endswith(PARTS)]
    others = [one for one in others if one.values(headline)]
    # The paper's networks and the smaller ones may have been trained for other lengths: each kind has its columns.
    kinds = [
        [(row, [one for one in others if _is_of(row, one)]) for row in rows] for rows in (table.smaller, table.rows)
    ]
    shown = [one for rows in kinds for _, some in rows for one in some]
    found = []
    for rows in kinds:
        columns = _columns([one for _, some in rows for one in some], shown)
        for row, some in rows:
            some.sort(key=lambda one: (-len(one.changes), len(one.values(headline))))
            best = {title: [one for one in some if one in column] for title, column in columns.items()}
            if on := {title: of_column[-1] for title, of_column in best.items() if of_column}:
                found.append(OwnRow(row, on))
    return found


def _columns(ours: list[Experiment], shown: list[Experiment]) -> dict[str, list[Experiment]]:
    """Title -> experiments that can stand below each other: of a data set, of as many epochs as most networks have
    there, trained in one way. A way that one network alone was trained in is left out where others have more.

    shown: all that the table may show; the title names what is not as most of them were trained.
    """
    found = {}
    for dataset in dict.fromkeys(one.dataset for one in ours):
        there = [one for one in ours if one.dataset == dataset]
        usual = _ways(one for one in shown if one.dataset == dataset)[0][0].training
        epochs = common_epochs(there)
        ways = _ways(one for one in there if one.epochs == epochs)
        for way in ways:
            if _networks(way) >= min(2, _networks(ways[0])):
                otherwise = {name: value for name, value in way[0].training.items() if value != usual[name]}
                options = options_of(recipe_of(way[0].runs[0]), otherwise)
                length = [] if epochs is None else [plural(epochs, "epoch")]
                found[", ".join([dataset, *length, *options])] = way
    return found


def _ways(ours: Iterable[Experiment]) -> list[list[Experiment]]:
    """The experiments that were trained alike together, first the way that most networks were trained in."""
    ways: list[list[Experiment]] = []
    for one in ours:
        alike = [way for way in ways if way[0].training == one.training]
        if alike:
            alike[0].append(one)
        else:
            ways.append([one])
    return sorted(ways, key=_networks, reverse=True)


def _networks(ours: list[Experiment]) -> int:
    return len({f"{one.model} {sorted(one.options.items())}" for one in ours})


def _is_of(row: Row, one: Experiment) -> bool:
    """Whether the experiment trained the row's network."""
    options = {key: value for key, value in one.options.items() if FOR_SMALL_IMAGES.get(key) != value}
    return one.model == row.model and options == row.options


def print_on_other_data(output: Console, table: PaperTable, ours: list[Experiment]) -> None:
    """The rows that our runs have on other data, each with its mean, interval and number of runs in every column."""
    rows = rows_on_other_data(table, ours)
    if not rows:
        return
    column = _headline(table)
    titles = list(dict.fromkeys(title for one in rows for title in one.on))
    shown = new_table("the same networks on other data", f"paper's {column}", *titles)
    for one in rows:
        values = [measured(one.on[title], metric_name(column)) if title in one.on else "" for title in titles]
        shown.add_row(Text(one.row.name), one.row.cells.get(column, ""), *values)
    output.print(shown)
    about = f"{column}, mean ± 95 % interval of the mean (n runs)"
    if missing := [one.row.name for one in rows if column not in one.row.cells]:
        about += f"; the paper has no {', '.join(missing)}"
    output.print(f"  {about}", highlight=False, markup=False, soft_wrap=True)
    output.print()


def measured(one: Experiment, metric: str) -> str:
    """91.23 ± 0.45 (3), or without an interval where there is one run."""
    interval, number = one.interval(metric), len(one.values(metric))
    return f"{one.mean(metric):.2f}" + ("" if interval is None else f" ± {interval:.2f}") + f" ({number})"


def _headline(table: PaperTable) -> str:
    return next(name for name in ACCURACY if name in table.columns)
