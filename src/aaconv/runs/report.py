"""One page about one or several runs: what was trained, on what, how it went, and what it costs: `aaconv report`."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from torch import nn

from .. import recipes
from ..cost.counting import count
from ..cost.totals import Cost
from ..recipes import diff
from ..recipes.recipe import Recipe
from ..tasks.task import create_task
from ..utils.files import check_writable, replacing, resolved
from ..utils.html import base_style, fill, read
from ..utils.terminal import plural, readable_bytes
from . import curves
from .load import TrainedModel
from .metrics import metric_rows
from .run_folder import (
    CONFIG,
    ENVIRONMENT,
    RECIPE,
    SUMMARY,
    check_run,
    naming_the_way_out,
    read_config,
    read_environment,
    read_epochs,
    read_speed,
    read_summary,
)
from .run_types import data_info_of

DASH = "\N{EN DASH}"
MANY = 8
"""Runs that stand side by side, a column each; more stand one below the other."""
MOST_CURVES = 40
"""Experiments that one figure can still tell apart."""


@dataclass(frozen=True)
class Network:
    """One in hand: of what a report shows it has the cost alone."""

    name: str
    cost: Cost


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    path: Path
    name: str
    """Of its folder, with as much of the way to it as tells it from the others of a report."""
    recipe: Recipe
    summary: dict[str, Any] | None
    """None: it is not finished."""
    cost: Cost
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    speed: list[dict[str, Any]]


def write_report(
    runs: str | Path | nn.Module | TrainedModel | Sequence[str | Path | nn.Module | TrainedModel],
    path: str | Path,
    *,
    explorer: str | Path | None = None,
) -> Path:
    """Write a self-contained page about runs, in the look of the explorer; `explorer` is a page to link to.

    Of networks in hand among them it shows what they cost.
    """
    path = Path(path)
    check_writable(path)
    if explorer is not None and not Path(explorer).is_file():
        raise FileNotFoundError(f"there is no page {explorer} to link to; aaconv explore writes one")
    given = [runs] if isinstance(runs, str | Path | nn.Module | TrainedModel) else runs
    counted: dict[str, Cost] = {}
    folders = [run for run in given if isinstance(run, str | Path)]
    found = [_read(run, name, counted) for run, name in curves.places(folders).items()]
    networks = [_count(one) for one in given if not isinstance(one, str | Path)]
    if not found and not networks:
        raise ValueError("name at least one run folder")
    text = render(found, None if explorer is None else _relative(Path(explorer), path), networks)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path


def _read(path: Path, name: str, counted: dict[str, Cost]) -> Run:
    """Without its weights: hundreds of networks would not fit into memory. Those that are alike are counted once."""
    check_run(path)
    recipe, info = recipes.load(path / RECIPE), data_info_of(read_config(path), path / CONFIG)
    known = read_environment(path) if (path / ENVIRONMENT).is_file() else {}
    metrics = read_epochs(path)
    if not metrics:
        raise ValueError(f"{path} has no finished epoch yet: there is nothing to report")
    network = json.dumps([recipe.task, asdict(recipe.model), len(info.classes), info.size], sort_keys=True)
    if network not in counted:
        model = create_task(recipe).build(info)
        counted[network] = count(model, (info.size, info.size), name=recipe.model.name)
    with naming_the_way_out(path):
        summary = read_summary(path) if (path / SUMMARY).is_file() else None
        return Run(path, name, recipe, summary, counted[network], known, metrics, read_speed(path))


def _count(model: nn.Module | TrainedModel) -> Network:
    if isinstance(model, TrainedModel):
        return Network(model.source, count(model.model, (model.size, model.size), name=model.source))
    cost = count(model)
    return Network(cost.model, cost)


def _relative(page: Path, report: Path) -> str:
    """The way from the report's folder to the page, as a link."""
    return quote(Path(os.path.relpath(resolved(page), resolved(report).parent)).as_posix())


def render(runs: Sequence[Run], explorer: str | None = None, networks: Sequence[Network] = ()) -> str:
    """The page's text."""
    shown: list[Run | Network] = [*runs, *networks]
    names = " and ".join(one.name for one in shown) if len(shown) < 3 else f"{len(shown)} runs"
    sections = {"Cost": _compared(shown, _cost(shown)) + _branches(shown)}
    if runs:
        sections = {
            "Results": _compared(runs, _results(runs)),
            "Curves": _curves(runs),
            **sections,
            "Recipes": _recipes(runs),
            "Environment": _compared(runs, _environment(runs), "words"),
        }
    if explorer:
        link = f'<p><a href="{html.escape(explorer, quote=True)}">What it attends to: the explorer</a></p>'
        first, *others = sections.items()
        sections = dict([first, ("Attention", link), *others])
    return fill(
        read(__package__, "report.html"),
        title=html.escape(names),
        summary=html.escape("; ".join(dict.fromkeys(run.recipe.summary for run in runs))),
        style=base_style() + read(__package__, "report.css"),
        sections="\n".join(_section(title, body) for title, body in sections.items()),
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{body}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """The first column names the rows; everything in it is text."""
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _compared(runs: Sequence[Run | Network], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """The values of the runs, a row each as [name, value of each run]: side by side, or of many one below the other."""
    table = [["", *(run.name for run in runs)], *rows]
    head, *body = table if len(runs) <= MANY else zip(*table, strict=True)
    return _table(head, body, kind)


def _results(runs: Sequence[Run]) -> list[list[str]]:
    measured = [{name: (ours, paper) for name, ours, paper in _metrics(run)} for run in runs]
    rows = []
    for name in dict.fromkeys(name for run in measured for name in run):
        pairs = [run.get(name, (None, None)) for run in measured]
        rows.append([f"{name} (%)", *(_number(ours, "{:.2f}") for ours, _ in pairs)])
        if any(paper is not None for _, paper in pairs):
            rows.append([f"{name} in the paper", *(_number(paper, "{:g}") for _, paper in pairs)])
    rows.append(["loss", *(_number(run.metrics[-1].get("loss"), "{:.4f}") for run in runs)])
    rows.append(["epochs", *(f"{run.metrics[-1]['epoch']} of {run.recipe.epochs}" for run in runs)])
    rows.append(["seconds per epoch", *(_number(_median(run.speed, "seconds"), "{:.1f}") for run in runs)])
    rows.append(["images per second", *(_number(_median(run.speed, "images_per_second"), "{:,.0f}") for run in runs)])
    memory = (max((row.get("peak_memory_bytes") or 0 for row in run.speed), default=0) for run in runs)
    rows.append(["peak memory", *(readable_bytes(most) if most else DASH for most in memory)])
    return rows


def _metrics(run: Run) -> list[tuple[str, float | None, float | None]]:
    """As in summary.json, or for a run that is not finished those of its last evaluation."""
    last = next((row for row in reversed(run.metrics) if row.get("loss") is not None), run.metrics[-1])
    return metric_rows(run.recipe, run.summary or last)


def _cost(runs: Sequence[Run | Network]) -> list[list[str]]:
    return [
        ["parameters", *(f"{run.cost.params:,}" for run in runs)],
        ["GFLOPs, as the paper counts", *(f"{run.cost.gflops:.4g}" for run in runs)],
        ["GFLOPs, with the batched products", *(f"{run.cost.true_gflops:.4g}" for run in runs)],
        [
            "attention maps, bfloat16",
            *(readable_bytes(run.cost.map_bytes) if run.cost.map_bytes else DASH for run in runs),
        ],
        ["image", *("{} x {}".format(*run.cost.size) for run in runs)],
    ]


def _branches(runs: Sequence[Run | Network]) -> str:
    """The attention of each network, layer by layer; once for runs of the same network."""
    alike: dict[int, list[Run | Network]] = {}
    for run in runs:
        alike.setdefault(id(run.cost), []).append(run)
    tables = []
    for group in alike.values():
        if group[0].cost.attention:
            rows = [
                [branch.name, f"{branch.height} x {branch.width}", str(branch.num_heads), str(branch.key_channels),
                 str(branch.value_channels), f"{branch.params:,}", f"{branch.flops:,}", f"{branch.true_flops:,}",
                 readable_bytes(branch.map_bytes)]
                for branch in group[0].cost.attention
            ]  # fmt: skip
            head = ["layer", "map", "heads", "keys", "values", "parameters", "FLOPs (paper)", "FLOPs (true)", "maps"]
            others = f" and {plural(len(group) - 1, 'other run')}" if len(group) > 1 else ""
            summary = f"<summary>The attention branches of {html.escape(group[0].name)}{others}</summary>"
            tables.append(f"<details>{summary}{_table(head, rows)}</details>")
    return "".join(tables)


def _curves(runs: Sequence[Run]) -> str:
    """The figure of `aaconv plot`, inline; of too many experiments those that came out best."""
    experiments: dict[str, list[Run]] = {}
    for run in runs:
        experiments.setdefault(diff.experiment_key(run.recipe), []).append(run)
    best = sorted(experiments.values(), key=lambda group: max(map(_headline, group)), reverse=True)[:MOST_CURVES]
    drawn = {run.path for group in best for run in group}
    with TemporaryDirectory() as place:
        paths = [run.path for run in runs if run.path in drawn]
        drawing = curves.draw(paths, Path(place) / "curves.svg").read_bytes()
    source = f"data:image/svg+xml;base64,{base64.b64encode(drawing).decode()}"
    figure = f'<img class="curves" src="{source}" alt="Loss and accuracy by epoch">'
    if len(experiments) == len(best):
        return figure
    return f"<p>The {len(best)} of {len(experiments)} experiments with the best results.</p>{figure}"


def _headline(run: Run) -> float:
    """The first of its metrics, more is better; the lowest of all where it has none."""
    value = next((ours for _, ours, _ in _metrics(run) if ours is not None), None)
    return value if value is not None and isfinite(value) else -inf


def _recipes(runs: Sequence[Run]) -> str:
    """The fields in which the recipes differ from a recipe's defaults, side by side; each one whole below."""
    fields = [asdict(run.recipe) for run in runs]
    for one in fields:
        one["model"] = ", ".join([one["model"]["name"], *filter(None, [_plain(one["model"]["options"], "")])])
    usual = {name: field.default for name, field in type(runs[0].recipe).__dataclass_fields__.items()}
    changed = [name for name in fields[0] if any(one[name] != usual[name] for one in fields) and name != "evidence"]
    rows = [[name, *(_plain(one[name]) for one in fields)] for name in changed if name not in ("name", "summary")]
    whole = "".join(
        f"<details><summary>All of {html.escape(run.name)}</summary>"
        f"<pre>{html.escape((run.path / RECIPE).read_text(encoding='utf-8'))}</pre></details>"
        for run in runs
    )
    evidence = [_evidence(run) for run in runs]
    if any(text != DASH for text in evidence):
        rows.append(["stands behind", *evidence])
    if len(runs) > MANY:
        whole = f"<details><summary>All of the {len(runs)} recipes</summary>{whole}</details>"
    return _compared(runs, rows, "words") + whole


def _evidence(run: Run) -> str:
    cell = run.recipe.evidence
    return DASH if cell is None else f"table {cell.table}, {cell.row}"


def _environment(runs: Sequence[Run]) -> list[list[str]]:
    names = dict.fromkeys(name for run in runs for name in run.environment)
    return [[name, *(_plain(run.environment.get(name)) for run in runs)] for name in names]


def _plain(value: Any, nothing: str = DASH) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_plain(part)}" for key, part in value.items()) or nothing
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or nothing
    return nothing if value is None else str(value)


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else form.format(value)


def _median(rows: Sequence[dict[str, Any]], column: str) -> float | None:
    values = sorted(row[column] for row in rows if row.get(column) is not None)
    return values[len(values) // 2] if values else None
