"""The course of one run or of several: loss and accuracy by epoch, with the paper's value where the recipe knows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import recipes
from .files import replacing
from .plots import BLUE, GREY, INK, RED, STYLE
from .recipes.recipe import Recipe
from .run_folder import METRICS, RECIPE, is_run, read_metrics

COLOURS = (RED, BLUE, GREY, "#2f8f5b", "#b7791f", "#7a4fa3", "#0f8b8d", "#a8425b")
ENDINGS = (".png", ".svg", ".pdf")
HEADLINES = {"top1": ("top-1 accuracy (%)", "top-1"), "mAP": ("mAP (%)", "mAP")}
"""Column of metrics.csv -> the label of its axis, and the column of the paper's tables."""


@dataclass(frozen=True)
class Course:
    """A run as it is drawn."""

    label: str
    recipe: Recipe
    rows: list[dict[str, Any]]
    colour: str

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """(epochs, values) of the epochs in which the column was measured."""
        pairs = [(row["epoch"], row[column]) for row in self.rows if row.get(column) is not None]
        return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def draw(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Draw the curves of runs into a .png, .svg or .pdf file, which is replaced whole."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"the file must end in {', '.join(ENDINGS)}, got {str(path)!r}")
    courses = _read(runs)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with rc_context(STYLE), replacing(path) as draft:
        figure(courses).savefig(draft, dpi=160, metadata=metadata, facecolor="white")
    return path


def _read(runs: Sequence[str | Path]) -> list[Course]:
    courses, labels = [], _labels([Path(run) for run in runs])
    for run, label, colour in zip(map(Path, runs), labels, cycle(COLOURS), strict=False):
        if not is_run(run):
            raise ValueError(f"{run} is no run folder, it has no {RECIPE}")
        rows = read_metrics(run) if (run / METRICS).is_file() else []
        if not rows:
            raise ValueError(f"{run} has no finished epoch yet: there is nothing to draw")
        courses.append(Course(label, recipes.load(run / RECIPE), rows, colour))
    return courses


def _labels(runs: list[Path]) -> list[str]:
    """The folders' names, with as much of the way to them as tells them apart."""
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    common = Path(os.path.commonpath(paths))
    return [str(path.relative_to(common)) if path != common else path.name for path in paths]


def figure(courses: list[Course]) -> Figure:
    """Loss on the left, the headline accuracy on the right; solid is the test, dotted the training."""
    headline = next((name for name in HEADLINES if any(course.points(name)[1] for course in courses)), None)
    drawn = Figure(figsize=(10.5 if headline else 6, 4.2), layout="constrained")
    panels = drawn.subplots(1, 2 if headline else 1, squeeze=False)[0]
    loss, *rest = panels
    _title(loss, "loss")
    for course in courses:
        _lines(loss, course, "train_loss", "loss")
    if len({course.recipe.label_smoothing for course in courses} - {0.0}):
        loss.text(0.99, 0.98, "training loss with label smoothing", transform=loss.transAxes, **_SMALL)
    for axes in rest:
        _title(axes, HEADLINES[headline][0])
        for course in courses:
            _lines(axes, course, f"train_{headline}", headline)
        _paper_values(axes, courses, HEADLINES[headline][1])
    _legend(drawn, panels[-1], courses)
    return drawn


_SMALL = {"ha": "right", "va": "top", "fontsize": 8.5, "color": GREY}


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, color=INK)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _lines(axes: Axes, course: Course, training: str, test: str) -> None:
    x, y = course.points(training)
    axes.plot(x, y, linestyle=(0, (1, 1.6)), color=course.colour, linewidth=1.4, marker="." if len(x) == 1 else None)
    x, y = course.points(test)
    axes.plot(x, y, color=course.colour, linewidth=1.9, marker="o" if len(x) < 12 else None, markersize=4)
    if test in HEADLINES and y:
        axes.annotate(
            f"{y[-1]:.1f}", (x[-1], y[-1]), (6, 0), textcoords="offset points", va="center", fontsize=9.5,
            color=course.colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _paper_values(axes: Axes, courses: list[Course], column: str) -> None:
    """A line at each value that the paper prints for one of the runs."""
    values = {}
    for course in courses:
        value = recipes.paper_value(course.recipe, column)
        if value is not None:
            values.setdefault(value, course)
    for value, course in values.items():
        axes.axhline(value, color=course.colour, linewidth=1, linestyle=(0, (6, 4)), alpha=0.8)
        name = course.recipe.evidence.row
        axes.annotate(
            f"the paper's {name}: {value:g}", (0, value), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=9, color=course.colour,
        )  # fmt: skip


def _legend(drawn: Figure, axes: Axes, courses: list[Course]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=course.colour, linewidth=2, label=course.label) for course in courses]
    handles += [
        Line2D([], [], color=INK, linewidth=1.6, label="test"),
        Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (1, 1.6)), label="training"),
    ]
    columns = len(handles) if len(handles) <= 5 else 4
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)
