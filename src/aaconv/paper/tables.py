"""The paper's tables beside ours, cell by cell: `aaconv table N`.

Parameters, FLOPs and map memory are those of the built models. Accuracies come from recorded results, one file per run
(see runs/results.py), and are means over the seeds; all runs on a table's data stand below it, each experiment with its
command, and those on other data behind the last table; `aaconv table DATASET` prints those of one data set alone.
Latencies come from `benchmarks/table2.json`, which `aaconv bench table2` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import recipes
from ..recipes.paper import TABLES
from ..runs import results
from ..runs.results import Experiment
from ..utils.metrics import TITLES, metric_name
from ..utils.terminal import console, new_table
from .cells import COUNTED, TRUE_GFLOPS, Cell, cells_of, of_table, on_other_data
from .differences import comparisons, print_comparisons
from .other_data import print_on_other_data, rows_on_other_data


def print_tables(
    numbers: Sequence[int] = tuple(TABLES), *, as_json: bool = False, folder: str | Path | None = None
) -> None:
    """Print these tables of the paper with our values beside them, and how many of the counted cells agree."""
    ours = results.experiments(results.read(folder))
    found = cells_of(numbers, ours)
    elsewhere = on_other_data(ours) if set(numbers) >= set(TABLES) else {}
    if as_json:
        records = [_as_json(number, one) for number in numbers for one in of_table(TABLES[number], ours)]
        records += [_as_json(None, one) for some in elsewhere.values() for one in some]
        others = [
            {"row": own.row.name, "column": title} | _as_json(number, one)
            for number in numbers
            for own in rows_on_other_data(TABLES[number], ours)
            for title, one in own.on.items()
        ]
        content = {"cells": [asdict(cell) for cell in found], "runs": records, "on_other_data": others}
        print(json.dumps(content, indent=2))
        return
    output = console()
    for number, of_number in groupby(found, key=lambda cell: cell.table):
        table, notes = _render(list(of_number), _marks(output.encoding))
        output.print(f"[bold]Table {number}[/bold]  {TABLES[number].title}", highlight=False)
        output.print(table)
        for mark, note in enumerate(notes, 1):
            output.print(f"  {mark}) {note}", highlight=False, markup=False)
        output.print()
        print_on_other_data(output, TABLES[number], ours)
        if runs := of_table(TABLES[number], ours):
            _print_runs(output, "our runs", runs)
    for dataset, runs in elsewhere.items():
        _print_runs(output, f"our runs on {dataset}", runs)
    counted = [cell for cell in found if cell.column in COUNTED]
    if counted:
        agree = sum(cell.match is True for cell in counted)
        output.print(f"{agree} of {len(counted)} counted cells agree to the printed precision", highlight=False)


def print_runs_on(
    dataset: str, *, against: str | None = None, as_json: bool = False, folder: str | Path | None = None
) -> None:
    """Print our runs on one data set, by its name, each experiment with the interval of its mean and its command.

    against: a recipe that the others are compared with, each with its runs of as many epochs that were trained alike.
    """
    ours = results.experiments(results.read(folder))
    found = [one for one in ours if one.dataset == dataset]
    if not found:
        there = ", ".join(dict.fromkeys(re.sub(r"-\d+$", "-N", one.dataset) for one in ours))
        known = f"a table is 1 to 9 or 'all', and our runs are on {there}" if there else "`aaconv record` keeps some"
        raise ValueError(f"there are no results on {dataset!r}; {known}")
    compared = [] if against is None else comparisons(found, against)
    if as_json:
        gained = {} if against is None else {"against": {against: [one for some in compared for one in some.as_json()]}}
        print(json.dumps({"runs": [_as_json(None, one) for one in found], **gained}, indent=2))
        return
    output = console()
    _print_runs(output, f"our runs on {dataset}", found)
    if against is not None:
        print_comparisons(output, compared)


def _marks(encoding: str) -> dict[bool, str]:
    """What stands behind a cell that agrees and one that does not."""
    try:
        "✓✗".encode(encoding)
    except UnicodeEncodeError:
        return {True: "=", False: "!="}
    return {True: "✓", False: "✗"}


def _render(of_table: list[Cell], marks: dict[bool, str]) -> tuple[Table, list[str]]:
    """One row per row of the paper; our value in full beside the printed one, with a mark and its note's number."""
    columns = list(dict.fromkeys(cell.column for cell in of_table))
    with_ours = {cell.column for cell in of_table if cell.ours is not None or cell.column in COUNTED}
    table = new_table("")
    for column in columns:
        if column == TRUE_GFLOPS:
            table.add_column("true", justify="right", no_wrap=True)
            continue
        table.add_column(column, justify="right", no_wrap=True)
        if column in with_ours:
            table.add_column("ours", justify="left", no_wrap=True)
    notes: list[str] = []
    for name, row in groupby(of_table, key=lambda cell: cell.row):
        texts, by_column = [Text(name)], {cell.column: cell for cell in row}
        for column in columns:
            cell = by_column.get(column)
            if column != TRUE_GFLOPS:
                texts.append(Text((cell and cell.paper) or ""))
            if column in with_ours:
                texts.append(_ours(cell, marks) if cell else Text())
            if cell and cell.note:
                if cell.note not in notes:
                    notes.append(cell.note)
                texts[-1].append(f" {notes.index(cell.note) + 1})", "dim")
        table.add_row(*texts)
    return table, notes


def _ours(cell: Cell, marks: dict[bool, str]) -> Text:
    text = Text(_in_full(cell))
    if cell.match is not None:
        text.append(f" {marks[cell.match]}", "green" if cell.match else "red")
    return text


def _in_full(cell: Cell) -> str:
    if cell.exact is None:
        return ""
    if cell.column in ("GFlops", TRUE_GFLOPS):
        return f"{cell.exact / 1e9:.3f}"
    if cell.column == "Memory":
        return f"{cell.exact / 2**20:.2f} MiB" if cell.exact >= 2**20 else f"{cell.exact / 2**10:.1f} KiB"
    if cell.column in COUNTED:
        return f"{cell.exact:,}"
    return cell.ours or ""


def _as_json(number: int | None, one: Experiment) -> dict[str, object]:
    about: dict[str, Any] = {"table": number, "dataset": one.dataset, "recipe": one.name}
    about |= {"model": one.model, "options": one.options, "parameters": one.parameters, "epochs": one.epochs}
    means = {
        metric: {
            "mean": one.mean(metric),
            "deviation": one.deviation(metric),
            "interval": one.interval(metric),
            "values": one.values(metric),
        }
        for metric in (*TITLES, "train_loss")
        if one.values(metric)
    }
    return about | {"runs": len(one.runs), "seeds": one.seeds} | means | {"command": one.command}


def _print_runs(output: Console, title: str, ours: list[Experiment]) -> None:
    """Our runs on some data: one line per experiment, with the interval of its mean, and what trains it."""
    columns = [column for metric, column in TITLES.items() if any(one.values(metric) for one in ours)]
    in_the_paper = [column for column in columns if any(_of_the_paper(one, column) for one in ours)]
    numbers = ("n", "epochs", "s / epoch")
    shown = new_table(title, *numbers, right=numbers)
    for column in columns:
        shown.add_column(column, no_wrap=True)
        if column in in_the_paper:
            shown.add_column("paper", justify="right", no_wrap=True)
    notes = list(dict.fromkeys(one.note for one in ours if one.note))
    for one in ours:
        seconds = one.mean("seconds_per_epoch")
        mark = f" {notes.index(one.note) + 1})" if one.note else ""
        values, number = [], next((len(some) for column in columns if (some := one.values(metric_name(column)))), 0)
        for column in columns:
            values.append(_with_interval(one, metric_name(column), number))
            values += [_of_the_paper(one, column)] if column in in_the_paper else []
        shown.add_row(
            Text(one.name).append(mark, "dim"), str(number), str(one.epochs or ""),
            "" if seconds is None else f"{seconds:.1f}", *values,
        )  # fmt: skip
    output.print(shown)
    devices = sorted({str(run["device"]) for one in ours for run in one.runs if run.get("device")})
    where = f"; on {', '.join(devices)}" if devices else ""
    about = "the last epoch of n runs, mean ± 95 % interval of the mean; each command trains the first of them"
    output.print(f"  {about}{where}", highlight=False, markup=False, soft_wrap=True)
    for place, note in enumerate(notes, 1):
        output.print(f"  {place}) {note}", highlight=False, markup=False, soft_wrap=True)
    for one in ours:
        for seed, files in one.repeated.items():
            about = f"{one.name}: n counts {len(files)} different runs of seed {seed}: {', '.join(files)}"
            output.print(f"  {about}; move away what should not count", highlight=False, markup=False, soft_wrap=True)
    output.print()


def _with_interval(one: Experiment, metric: str, usual: int) -> str:
    """The mean over the runs that have the metric, and their number where it is not the usual one."""
    value, interval, number = one.mean(metric), one.interval(metric), len(one.values(metric))
    if value is None:
        return ""
    width = "" if interval is None else f" ± {interval:.2f}"
    return f"{value:.2f}{width}{'' if number == usual else f' (n = {number})'}"


def _of_the_paper(one: Experiment, column: str) -> str:
    """What the paper prints for the recipe, as long as it is the recipe's network on all images."""
    if one.recipe is None or not {"model", *recipes.PARTIAL}.isdisjoint(one.changes):
        return ""
    value = recipes.paper_value(one.recipe, column)
    return "" if value is None else f"{value:.1f}"
