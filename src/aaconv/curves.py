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

KINDS = {"aa": RED, "se": BLUE, "plain": GREY}
OTHERS = ("#2f8f5b", "#b7791f", "#7a4fa3", "#0f8b8d", "#a8425b", "#4b5d16")
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
    courses = []
    for run, label in zip(map(Path, runs), _labels([Path(run) for run in runs]), strict=True):
        if not is_run(run):
            raise ValueError(f"{run} is no run folder, it has no {RECIPE}")
        rows = read_metrics(run) if (run / METRICS).is_file() else []
        if not rows:
            raise ValueError(f"{run} has no finished epoch yet: there is nothing to draw")
        courses.append((label, recipes.load(run / RECIPE), rows))
    colours = _colours([recipe for _, recipe, _ in courses])
    return [Course(*course, colour) for course, colour in zip(courses, colours, strict=True)]


def _colours(found: list[Recipe]) -> list[str]:
    """Attention is red, SE blue and convolutions grey, as in the paper's figures; a second one of a kind is another."""
    others, used, colours = cycle(OTHERS), set(), []
    for recipe in found:
        colour = KINDS.get(recipe.model.name.partition("_")[0])
        colours.append(next(others) if colour is None or colour in used else colour)
        used.add(colours[-1])
    return colours


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
        _zoom(axes, courses, headline)
        _paper_values(axes, courses, HEADLINES[headline][1])
        _end_values(axes, courses, headline)
    _legend(drawn, panels[-1], courses)
    return drawn


_PANEL_HEIGHT = 3.0  # inches, about
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


def _zoom(axes: Axes, courses: list[Course], column: str) -> None:
    """Leave the steep beginning of long runs below the picture."""
    low, high = axes.get_ylim()
    values = []
    for course in courses:
        epochs, accuracies = course.points(column)
        begun = len(epochs) // 10 if len(epochs) > 20 else 0
        values += accuracies[begun:]
    axes.set_ylim(max(low, min(values) - 0.05 * (high - min(values))), high)


def _spread(axes: Axes, values: list[float]) -> list[float]:
    """How many points each of some sorted values has to be moved up so that text beside them can be read."""
    low, high = axes.get_ylim()
    unit = (high - low) / (_PANEL_HEIGHT * 72)  # of the axis, a point
    below, moves = float("-inf"), []
    for value in values:
        below = max(value, below + 12 * unit)
        moves.append((below - value) / unit)
    return moves


def _end_values(axes: Axes, courses: list[Course], column: str) -> None:
    """The last value of each run beside its end."""
    ends = sorted((y[-1], x[-1], course.colour) for course in courses for x, y in [course.points(column)] if y)
    for (value, epoch, colour), up in zip(ends, _spread(axes, [end[0] for end in ends]), strict=True):
        axes.annotate(
            f"{value:.1f}", (epoch, value), (7, up), textcoords="offset points", va="center",
            fontsize=9.5, color=colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _paper_values(axes: Axes, courses: list[Course], column: str) -> None:
    """A line at each value that the paper prints for one of the runs, named above the highest."""
    values: dict[float, Course] = {}
    for course in courses:
        value = recipes.paper_value(course.recipe, column)
        if value is not None:
            values.setdefault(value, course)
    if not values:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, max(values) + (0.03 + 0.06 * len(values)) * (high - low)))
    for line, (value, course) in enumerate(sorted(values.items())):
        axes.axhline(value, color=course.colour, linewidth=1, linestyle=(0, (6, 4)), alpha=0.8)
        axes.annotate(
            f"{value:.1f} in the paper, {course.recipe.evidence.row}", (0, max(values)), (4, 4 + 12 * line),
            xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=9, color=course.colour,
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
