"""Rows of the paper's tables on data of our own: the same networks, where our runs have them on other images."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ..recipes.paper import ACCURACY, TABLES, PaperTable, Row
from ..runs.results import Experiment, common_epochs
from ..utils.metrics import metric_name
from ..utils.terminal import new_table, plural

PARTS = "-part"
"""How `aaconv record` ends the name of a data set of which only a part was used."""
FOR_SMALL_IMAGES = {"stem_pool": False}
"""Options that fit a network to the images, and do not make another row of it."""


@dataclass(frozen=True)
class OwnRow:
    """A row of a table, and our experiment with its network on each of the other data sets, by name."""

    row: Row
    on: dict[str, Experiment]


def rows_on_other_data(table: PaperTable, ours: list[Experiment]) -> list[OwnRow]:
    """Of each row and data set the experiment that changes least, then that with most runs, among those of as many
    epochs as most rows have there: others cannot be compared. None of a table that has no accuracies."""
    if not any(name in table.columns for name in ACCURACY):
        return []
    headline = metric_name(_headline(table))
    known = {other.dataset for other in TABLES.values()}
    others = [one for one in ours if one.dataset not in known and not one.dataset.endswith(PARTS)]
    fitting = [[one for one in others if _is_of(row, one) and one.values(headline)] for row in table.rows]
    epochs = {
        dataset: common_epochs(one for some in fitting for one in some if one.dataset == dataset)
        for dataset in {one.dataset for some in fitting for one in some}
    }
    found = []
    for row, some in zip(table.rows, fitting, strict=True):
        alike = [one for one in some if one.epochs == epochs[one.dataset]]
        alike.sort(key=lambda one: (-len(one.changes), len(one.values(headline))))
        if on := {one.dataset: one for one in alike}:
            found.append(OwnRow(row, on))
    return found


def _is_of(row: Row, one: Experiment) -> bool:
    """Whether the experiment trained the row's network."""
    options = {key: value for key, value in one.options.items() if FOR_SMALL_IMAGES.get(key) != value}
    return one.model == row.model and options == row.options


def print_on_other_data(output: Console, table: PaperTable, ours: list[Experiment]) -> None:
    """The rows that our runs have on other data, each with its mean, interval and number of runs."""
    rows = rows_on_other_data(table, ours)
    if not rows:
        return
    column = _headline(table)
    epochs = {name: experiment.epochs for one in rows for name, experiment in one.on.items()}
    datasets = list(epochs)
    titles = [name if number is None else f"{name}, {plural(number, 'epoch')}" for name, number in epochs.items()]
    shown = new_table("the same networks on other data", f"paper's {column}", *titles)
    for one in rows:
        values = [measured(one.on[name], metric_name(column)) if name in one.on else "" for name in datasets]
        shown.add_row(Text(one.row.name), one.row.cells[column], *values)
    output.print(shown)
    about = f"{column}, mean ± 95 % interval of the mean (n runs)"
    output.print(f"  {about}", highlight=False, markup=False, soft_wrap=True)
    output.print()


def measured(one: Experiment, metric: str) -> str:
    """91.23 ± 0.45 (3), or without an interval where there is one run."""
    interval, number = one.interval(metric), len(one.values(metric))
    return f"{one.mean(metric):.2f}" + ("" if interval is None else f" ± {interval:.2f}") + f" ({number})"


def _headline(table: PaperTable) -> str:
    return next(name for name in ACCURACY if name in table.columns)
