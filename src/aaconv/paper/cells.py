"""The cells of the paper's tables, each with what our models count or our runs measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from itertools import groupby
from pathlib import Path

from ..cost import AttentionCost, Totals, cost_of
from ..recipes import diff
from ..recipes.paper import ACCURACY, LATENCY, TABLES, PaperTable, Row
from ..runs import results
from ..runs.results import Experiment
from ..utils.json_file import read_json
from ..utils.metrics import metric_name

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "KB": 2**10, "MB": 2**20, "": 1}
COUNTED = ("GFlops", "Params", "Memory", "FLOPS")
TRUE_GFLOPS = "GFlops (true)"
LATENCIES = Path("benchmarks/table2.json")
"""Measured here, or else what comes with the package."""


@dataclass(frozen=True)
class Cell:
    """One value of the paper and ours: as printed, rounded like it, and in full."""

    table: int
    row: str
    column: str
    paper: str | None
    ours: str | None
    exact: int | float | None
    match: bool | None
    setting: str | None
    note: str | None


def compare(paper: str, exact: float, unit: str = "") -> tuple[str, bool]:
    """Our value rounded and written like the printed one, and whether the two are equal.

    The digits in print decide: 8.3 has one decimal, and zeros that end a whole number do not count, so that 190k has
    two digits. Halves round up.
    """
    parts = re.fullmatch(r"\+?(-?[\d.]+)\s*([A-Za-z%]*).*", paper, re.DOTALL)
    assert parts is not None
    number, printed_unit = parts.groups()
    printed = Decimal(number)
    exponent = (printed if "." in number else printed.normalize()).as_tuple().exponent
    step = Decimal(1).scaleb(int(exponent))
    scaled = Decimal(exact) / UNITS.get(printed_unit or unit, 1)
    ours = (scaled / step).quantize(Decimal(1), ROUND_HALF_UP) * step + 0  # no -0
    sign = "+" if paper.startswith("+") and ours >= 0 else ""
    return f"{sign}{ours:f}{printed_unit}", ours == printed


def cells(numbers: Iterable[int] = tuple(TABLES), folder: str | Path | None = None) -> list[Cell]:
    """Every cell of these tables, row by row; where a row has GFlops, the true count follows them."""
    return cells_of(numbers, results.experiments(results.read(folder)))


def cells_of(numbers: Iterable[int], ours: list[Experiment]) -> list[Cell]:
    latencies = _latencies()
    found = []
    for number in numbers:
        if number not in TABLES:
            raise ValueError(f"unknown table {number}; the paper has tables {min(TABLES)} to {max(TABLES)}")
        table = TABLES[number]
        for index, row in enumerate(table.rows):
            found += _row_cells(table, row, _counted(table, row, index), ours, latencies)
            if row.start:
                begun = _row_cells(table, row.started, {}, ours, latencies)
                found += begun if any(cell.exact is not None for cell in begun) else []
    return found


def _row_cells(
    table: PaperTable, row: Row, counted: dict[str, int], ours: list[Experiment], latencies: dict
) -> list[Cell]:
    found = []
    for column, paper in row.cells.items():
        exact: float | None = None
        note, match = _fill(row.cell_notes.get(column), table, row), None
        if column in COUNTED:
            exact = counted.get(column)
            note = _joined(_fill(row.note, table, row), note)
        elif column in ACCURACY:
            behind = _experiments(ours, table, row, column)
            exact = behind[0].mean(metric_name(column)) if behind else None
            about, other = _about(behind, column, row.fitted), _other_network(behind, table, row)
            note = _joined(note, about, other)
        elif column in LATENCY:
            exact = latencies.get((row.model, _key(row.options)), {}).get(column)
        text = None
        if exact is not None and paper != "-":
            text, match = compare(paper, exact, "G" if column == "GFlops" else "")
        # Another GPU, or a run that did not do what the paper's did: nothing to agree with.
        if column in LATENCY or (column in ACCURACY and exact is not None and behind[0].changes):
            match = None
        found.append(Cell(table.number, row.name, column, paper, text, exact, match, _setting(table, row), note))
        if column == "GFlops" and TRUE_GFLOPS in counted:
            true = counted[TRUE_GFLOPS]
            text = compare(paper, true, "G")[0]
            found.append(Cell(table.number, row.name, TRUE_GFLOPS, None, text, true, None, _setting(table, row), None))
    return found


def _cost(table: PaperTable, row: Row, **options: object) -> Totals:
    return cost_of(row.model, table.size, **row.options, **options)


def _counted(table: PaperTable, row: Row, index: int) -> dict[str, int]:
    """Column -> our exact value, of the columns that are counted."""
    if not any(column in COUNTED for column in row.cells):
        return {}
    cost = _cost(table, row, **row.fitted)
    if table.number == 9:
        return _attention_costs(cost.attention)[index]
    return {"Params": cost.params, "GFlops": cost.flops, TRUE_GFLOPS: cost.true_flops}


def _attention_costs(branches: list[AttentionCost]) -> list[dict[str, int]]:
    """The rows of table 9: a layer without stride of each stage, all layers in training, all layers at inference."""
    stages = [list(stage) for _, stage in groupby(branches, key=lambda branch: branch.params)]
    rows = [{"Memory": s[-1].map_bytes, "Params": s[-1].params, "FLOPS": s[-1].flops} for s in stages]
    params, flops = sum(branch.params for branch in branches), sum(branch.flops for branch in branches)
    maps = [branch.map_bytes for branch in branches]
    return [*rows, *({"Memory": memory, "Params": params, "FLOPS": flops} for memory in (sum(maps), max(maps)))]


def _setting(table: PaperTable, row: Row) -> str:
    options = "".join(f", {name}={value!r}" for name, value in (row.options | row.fitted).items())
    return f"{row.model}{options}, {table.size[0]} x {table.size[1]}"


def _joined(*notes: str | None) -> str | None:
    return "; ".join(filter(None, notes)) or None


def _fill(note: str | None, table: PaperTable, row: Row) -> str | None:
    if note is None or "{" not in note:
        return note
    return note.format(ours=_cost(table, row, **row.fitted), usual=_cost(table, row))


def _key(options: dict) -> tuple:
    return tuple(sorted(options.items()))


def measured(number: int, row: Row, column: str) -> float | None:
    """The mean of our own runs for an accuracy cell, if there are any."""
    ours = results.experiments(results.read())
    behind = _experiments(ours, TABLES[number], row, column)
    return behind[0].mean(metric_name(column)) if behind else None


def _experiments(ours: list[Experiment], table: PaperTable, row: Row, column: str) -> list[Experiment]:
    """The longest of our experiments behind a cell; first those with the network as it is built today, of them the one
    that changes least of the paper's settings, then the one with the most runs that have the value."""
    wanted, name = (table.dataset, row.model, row.options), metric_name(column)
    found = [one for one in ours if (one.dataset, one.model, one.options) == wanted and one.values(name)]
    longest = max((one.epochs or 0 for one in found), default=0)
    found = [one for one in found if (one.epochs or 0) == longest]
    return sorted(found, key=lambda one: (_is_another(one, table, row), len(one.changes), -len(one.values(name))))


def _is_another(one: Experiment, table: PaperTable, row: Row) -> bool:
    """Did its network have other parameters than the row's has today? Of another size of image it has anyway."""
    if one.parameters is None or "size" in one.changes:
        return False
    return one.parameters != _cost(table, row).params


def _about(behind: list[Experiment], column: str, fitted: dict[str, object]) -> str | None:
    """What stands behind a mean: how many runs, how long, and where they differ from the paper's or from the count;
    then what the same network reached in other ways, which the rows beside it may have been trained in."""
    if not behind:
        return None
    experiment, *others = behind
    number, deviation = len(experiment.values(metric_name(column))), experiment.deviation(metric_name(column))
    length = f" of {experiment.epochs} epochs" if experiment.epochs else ""
    about = f"ours: {'the mean of ' if number > 1 else ''}{number} run{'s' * (number > 1)}{length}"
    if changed := _changed(experiment):
        about += f" with {changed}"
    if fitted:
        about += f" without {', '.join(f'{name}={value!r}' for name, value in fitted.items())}"
    if deviation is not None:
        interval = experiment.interval(metric_name(column))
        about += f", standard deviation {deviation:.2f}, 95 % interval of the mean ± {interval:.2f}"
    ways = [f"{one.mean(metric_name(column)):.1f} with {_changed(one) or one.name}" for one in others]
    return "; ".join([about, *ways])


def _other_network(behind: list[Experiment], table: PaperTable, row: Row) -> str | None:
    if not behind or not _is_another(behind[0], table, row):
        return None
    return f"that network had {behind[0].parameters:,} parameters, today's has {_cost(table, row).params:,}"


def _changed(experiment: Experiment) -> str:
    """The changes of a recipe of the catalogue, as options; all but the length."""
    changes = {name: value for name, value in experiment.changes.items() if name != "epochs"}
    return " ".join(diff.options_of(experiment.recipe, changes)) if experiment.recipe else ""


def of_table(table: PaperTable, ours: list[Experiment]) -> list[Experiment]:
    """Our experiments on the table's data with one of its networks; ones with a network of no table in the first."""
    first = next(number for number, other in TABLES.items() if other.dataset == table.dataset)
    models = {number: {row.model for row in other.rows} for number, other in TABLES.items()}
    anywhere = set().union(*models.values())
    return [
        one
        for one in ours
        if one.dataset == table.dataset
        and (one.model in models[table.number] or (table.number == first and one.model not in anywhere))
    ]


def on_other_data(ours: list[Experiment]) -> dict[str, list[Experiment]]:
    """Data set -> our experiments, of the data that no table is about."""
    known = {table.dataset for table in TABLES.values()}
    found: dict[str, list[Experiment]] = {}
    for one in ours:
        if one.dataset not in known:
            found.setdefault(one.dataset, []).append(one)
    return found


def _latencies() -> dict[tuple, dict[str, float]]:
    """(model, options) -> column -> percent over ResNet-50 in the same run: a completed file is of several."""
    path = LATENCIES if LATENCIES.exists() else results.RECORDED / LATENCIES
    records = read_json(path)
    try:
        return {
            (record["model"], _key(record.get("options", {}))): {
                column: 100 * (_to_first(record[column]) - 1) for column in LATENCY
            }
            for record in records
        }
    except (KeyError, TypeError):
        raise ValueError(f"{path} is not what `aaconv bench table2 --json {path}` writes") from None


def _to_first(measured: dict[str, float]) -> float:
    return measured["graph_to_first" if "graph_to_first" in measured else "launched_to_first"]
