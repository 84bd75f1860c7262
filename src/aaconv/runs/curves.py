"""Learning curves of runs: loss and accuracy by epoch, with the paper's value where the recipe knows it.

Runs that differ in the seed alone are one line, their mean, in a band from the lowest to the highest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from math import ceil, isfinite
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .. import recipes
from ..recipes import diff
from ..recipes.recipe import Recipe
from ..utils import figures
from ..utils.figures import BLUE, GREY, INK, RED, STYLE
from ..utils.files import resolved
from ..utils.json_file import read_json
from ..utils.metrics import metric_title
from . import results
from .run_folder import RECIPE, check_epochs, check_run, read_epochs, read_rows

KINDS = {"aa": RED, "se": BLUE, "plain": GREY}
OTHERS = ("#2f8f5b", "#b7791f", "#7a4fa3", "#0f8b8d", "#a8425b", "#4b5d16")
MANY = 4
"""Learning curves beyond which the accuracies of training are left out: those of the test lie close together."""
LONG = 20
"""Epochs from which on the last quarter of many curves is drawn once more."""
HEADLINES = {"top1": f"{metric_title('top1')} accuracy (%)", "mAP": f"{metric_title('mAP')} (%)"}
"""Column of metrics.csv -> the label of its axis."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LearningCurve:
    """A run as it is drawn, or all seeds of an experiment; `runs` are the rows of their metrics."""

    label: str
    recipe: Recipe
    runs: list[Rows]
    colour: str

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """(epochs, means) of the epochs in which the column was measured, by all runs that have it at all."""
        return self._over_runs(column, mean)

    def band(self, column: str) -> tuple[list[float], list[float], list[float]]:
        """(epochs, lowest, highest) of the same epochs."""
        epochs, lowest = self._over_runs(column, min)
        return epochs, lowest, self._over_runs(column, max)[1]

    def last(self, column: str) -> str:
        """The value of the last epoch, with its standard deviation over the runs."""
        final = f"{self.points(column)[1][-1]:.2f}"
        return final if len(self.runs) == 1 else f"{final} ± {self._over_runs(column, stdev)[1][-1]:.2f}"

    def _over_runs(self, column: str, summarise: Callable[[list[float]], float]) -> tuple[list[float], list[float]]:
        found = [{row["epoch"]: row[column] for row in rows if row.get(column) is not None} for rows in self.runs]
        found = [values for values in found if values]
        epochs = sorted(set.intersection(*map(set, found))) if found else []
        if summarise is stdev and len(found) < 2:
            return epochs, [0.0] * len(epochs)
        return epochs, [summarise([values[epoch] for values in found]) for epoch in epochs]


def draw(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Draw the curves of runs into a .png, .svg or .pdf file, which is replaced whole."""
    path = Path(path)
    figures.check_ending(path)
    curves = _read(runs)
    figures.write(lambda: figure(curves), path, STYLE)
    return path


def is_recorded(place: str | Path) -> bool:
    """Is this a result that `aaconv record` has kept, with its metrics beside it?"""
    return Path(place).suffix == ".json" and Path(place).with_suffix(".csv").is_file()


@dataclass(frozen=True)
class _Run:
    place: str
    recorded: bool
    recipe: Recipe
    rows: Rows


def _read(runs: Sequence[str | Path]) -> list[LearningCurve]:
    """A curve an experiment, in the order of their first runs; a seed that is there twice keeps its runs apart.

    What is named twice is drawn once, and so is a record and its copy.
    """
    groups: dict[str, list[_Run]] = {}
    for path, place in places(runs).items():
        recorded = is_recorded(path)
        recipe, rows = _of_record(path) if recorded else _of_run(path)
        if not rows:
            raise ValueError(f"{path} has no finished epoch yet: there is nothing to draw")
        group = groups.setdefault(diff.experiment_key(recipe), [])
        copied = any(run.recorded and (run.recipe.seed, run.rows) == (recipe.seed, rows) for run in group)
        if not (recorded and copied):
            group.append(_Run(place, recorded, recipe, rows))
    labelled: list[tuple[str, list[_Run]]] = []
    titles = _titles([group[0].recipe for group in groups.values()])
    for title, group in zip(titles, groups.values(), strict=True):
        seeds = {run.recipe.seed for run in group}
        if 1 < len(seeds) == len(group):
            labelled.append((f"{title} ({len(seeds)} seeds)", group))
        else:
            labelled += [(title if run.recorded else run.place, [run]) for run in group]
    labels = _distinct([(label, group[0].place) for label, group in labelled])
    colours = _colours([group[0].recipe for _, group in labelled])
    return [
        LearningCurve(label, group[0].recipe, [run.rows for run in group], colour)
        for label, (_, group), colour in zip(labels, labelled, colours, strict=True)
    ]


def _distinct(labels: list[tuple[str, str]]) -> list[str]:
    """(label, place) -> labels, with the place behind those that are not alone. The seed would not do: runs of one
    title are of one seed, or of other networks or data under a name that the catalogue does not have."""
    often = Counter(label for label, _ in labels)
    return [label if often[label] == 1 or label == place else f"{label}, {place}" for label, place in labels]


def _of_run(run: Path) -> tuple[Recipe, Rows]:
    check_run(run)
    return recipes.load(run / RECIPE), read_epochs(run)


def _of_record(path: Path) -> tuple[Recipe, Rows]:
    record, metrics = results.as_record(read_json(path), path), path.with_suffix(".csv")
    try:
        rows = read_rows(metrics)
        check_epochs(rows, metrics, record, path.name)
    except ValueError as error:
        raise ValueError(f"{error}; record its run again: aaconv record RUN") from None
    return results.recipe_of(record), rows


def _titles(found: list[Recipe]) -> list[str]:
    """The names of recipes, each with what was changed in it and not in all alike; always with images held out.

    Of a name that the catalogue does not have, every field is a change: what all of that name share is left out.
    """
    changes = [diff.changes_in(recipe) for recipe in found]
    titles = []
    for recipe, own in zip(found, changes, strict=True):
        if recipe.name in recipes.names():
            beside = changes
        else:
            beside = [asdict(other) for other in found if other.name == recipe.name]
        shown = {
            name: value
            for name, value in own.items()
            if name == "holdout" or any(name not in other or other[name] != value for other in beside)
        }
        usual = diff.usual(recipe.name, recipe.model, recipe.data, recipe.epochs)
        titles.append(" ".join([recipe.name, *diff.options_of(usual, shown)]))
    return titles


def _colours(found: list[Recipe]) -> list[str]:
    """Attention is red, SE blue and convolutions grey, as in the paper's figures; a second one of a kind is another.

    The first is one without options and with the fewest changes.
    """
    tab20b = colormaps["tab20b"]
    shades = [to_hex(tab20b(place)) for shade in range(4) for place in range(shade, tab20b.N, 4)]
    others = cycle((*OTHERS, *shades))
    colours: dict[int, str] = {}
    changes = [len(diff.changes_in(recipe)) for recipe in found]
    for place in sorted(range(len(found)), key=lambda place: (bool(found[place].model.options), changes[place])):
        colour = KINDS.get(found[place].model.name.partition("_")[0])
        colours[place] = next(others) if colour is None or colour in colours.values() else colour
    return [colours[place] for place in range(len(found))]


def places(runs: Sequence[str | Path]) -> dict[Path, str]:
    """Path -> the name of a folder or file, with as much of the way to it as tells it from others; each once."""
    paths = {resolved(run): Path(run) for run in runs}
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([path.parent for path in paths])
        names = [str(path.relative_to(common)) for path in paths]
    return dict(zip(paths.values(), names, strict=True))


def figure(curves: list[LearningCurve]) -> Figure:
    """Loss on the left, the headline accuracy on the right; solid is the test, dotted the training."""
    headline = next((name for name in HEADLINES if any(curve.points(name)[1] for curve in curves)), None)
    height = max(3.0, (len(curves) + 1) * _LINE / 72)  # inches of a panel: the values beside its edge have to fit
    drawn = Figure(figsize=(10.5 if headline else 6, height + 0.9), layout="constrained")
    panels = drawn.subplots(1, 2 if headline else 1, squeeze=False)[0]
    loss, *rest = panels
    _title(loss, "loss")
    for curve in curves:
        _lines(loss, curve, "train_loss", "loss")
    if len({curve.recipe.label_smoothing for curve in curves} - {0.0}):
        loss.text(0.99, 0.98, "training loss with label smoothing", transform=loss.transAxes, **_SMALL)
    for axes in rest:
        assert headline is not None  # without one there is no second panel
        _title(axes, HEADLINES[headline])
        for curve in curves:
            _lines(axes, curve, f"train_{headline}" if len(curves) <= MANY else None, headline)
        _zoom(axes, curves, headline)
        _paper_values(axes, curves, metric_title(headline))
        _end_values(axes, curves, headline, height * 72)
        if len(curves) > MANY:
            _inset(axes, curves, headline)
    _legend(drawn, curves)
    return drawn


_LINE = 12  # points, of a text
_LEGEND_WIDTH = 120  # letters
_ABOVE_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
_SMALL = {"ha": "right", "va": "top", "fontsize": 8.5, "color": GREY}


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, color=INK)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _lines(axes: Axes, curve: LearningCurve, training: str | None, test: str) -> None:
    if training:
        x, y = curve.points(training)
        single = "." if len(x) == 1 else None
        axes.plot(x, y, linestyle=(0, (1, 1.6)), color=curve.colour, linewidth=1.4, marker=single)
    x, y = curve.points(test)
    axes.plot(x, y, color=curve.colour, linewidth=1.9, marker="o" if len(x) < 12 else None, markersize=4)
    if len(curve.runs) > 1:
        axes.fill_between(*curve.band(test), color=curve.colour, alpha=0.18, linewidth=0)


def _inset(axes: Axes, curves: list[LearningCurve], column: str) -> None:
    """The last quarter of many long runs once more, larger, where the steep beginning leaves room."""
    longest = max(curve.points(column)[0][-1] for curve in curves if curve.points(column)[0])
    begin = longest - longest // 4
    ends = [
        value
        for curve in curves
        for epoch, value in zip(*curve.points(column), strict=True)
        if epoch >= begin and isfinite(value)
    ]
    if longest < LONG or not ends:
        return
    inset = axes.inset_axes((0.4, 0.06, 0.58, 0.52))
    for curve in curves:
        inset.plot(*curve.points(column), color=curve.colour, linewidth=1.4)
    margin = 0.08 * (max(ends) - min(ends) or 1)
    inset.set_xlim(begin, longest)
    inset.set_ylim(min(ends) - margin, max(ends) + margin)
    inset.tick_params(labelsize=7.5, length=2)
    inset.set_title("the last epochs", fontsize=8, color=GREY, pad=2)


def _zoom(axes: Axes, curves: list[LearningCurve], column: str) -> None:
    """Leave the steep beginning of long runs below the picture."""
    low, high = axes.get_ylim()
    values = []
    for curve in curves:
        epochs, lowest, _ = curve.band(column)
        begun = len(epochs) // 10 if len(epochs) > 20 else 0
        values += lowest[begun:]
    axes.set_ylim(max(low, min(values) - 0.05 * (high - min(values))), high)


def _spread(axes: Axes, values: list[float], height: float) -> list[float]:
    """How many points each of some sorted values has to be moved up so that text beside them can be read, in a panel
    of `height` points."""
    low, high = axes.get_ylim()
    points = [(value - low) * height / (high - low) for value in values]
    # Blocks of texts with no room between them, each around the middle of its values; those that meet become one.
    blocks: list[list[float]] = []
    for point in points:
        blocks.append([point])
        while len(blocks) > 1 and _edge(blocks[-2], 1) > _edge(blocks[-1], -1):
            upper = blocks.pop()
            blocks[-1] += upper
    places = [_edge(block, -1) + _LINE * (index + 0.5) for block in blocks for index in range(len(block))]
    # None beside the title or below the axis: each leaves room for those above it, and for those below.
    places = [min(place, height - _LINE * (len(places) - index - 0.5)) for index, place in enumerate(places)]
    places = [max(place, _LINE * (index + 0.5)) for index, place in enumerate(places)]
    return [place - point for place, point in zip(places, points, strict=True)]


def _edge(block: list[float], side: int) -> float:
    return mean(block) + side * _LINE * len(block) / 2


def _end_values(axes: Axes, curves: list[LearningCurve], column: str, height: float) -> None:
    """The last value of each curve beside its end, in a panel of `height` points."""
    found = [(curve, *curve.points(column)) for curve in curves]
    ends = [(y[-1], x[-1], curve) for curve, x, y in found if y and isfinite(y[-1])]
    ends.sort(key=lambda end: end[:2])
    for (value, epoch, curve), up in zip(ends, _spread(axes, [end[0] for end in ends], height), strict=True):
        axes.annotate(
            curve.last(column), (epoch, value), (7, up), textcoords="offset points", va="center",
            fontsize=9.5, color=curve.colour, fontweight="bold", annotation_clip=False, bbox=_ABOVE_LINES,
        )  # fmt: skip


def _paper_values(axes: Axes, curves: list[LearningCurve], column: str) -> None:
    """A line at each value that the paper prints for one of the runs, named above the highest; in the colour of the
    curve whose recipe is nearest to the paper's."""
    values: dict[float, LearningCurve] = {}
    for curve in sorted(curves, key=lambda curve: len(diff.changes_in(curve.recipe))):
        value = recipes.paper_value(curve.recipe, column)
        if value is not None:
            values.setdefault(value, curve)
    if not values:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, max(values) + (0.03 + 0.06 * len(values)) * (high - low)))
    for line, (value, curve) in enumerate(sorted(values.items())):
        assert curve.recipe.evidence is not None  # it is what the value is of
        axes.axhline(value, color=curve.colour, linewidth=1, linestyle=(0, (6, 4)), alpha=0.8)
        axes.annotate(
            f"{value:.1f} in the paper, {curve.recipe.evidence.row}", (0, max(values)), (4, 4 + 12 * line),
            xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=9, color=curve.colour,
            bbox=_ABOVE_LINES,
        )  # fmt: skip


def _tested(curves: list[LearningCurve]) -> str:
    return "test: mean, lowest to highest" if any(len(curve.runs) > 1 for curve in curves) else "test"


def _legend(drawn: Figure, curves: list[LearningCurve]) -> None:
    """Below the panels, in a figure that grows by its lines."""
    from matplotlib.lines import Line2D

    labels = [fill(curve.label, _LEGEND_WIDTH, break_on_hyphens=False) for curve in curves]
    handles = [
        Line2D([], [], color=curve.colour, linewidth=2, label=label)
        for curve, label in zip(curves, labels, strict=True)
    ]
    handles += [
        Line2D([], [], color=INK, linewidth=1.6, label=_tested(curves)),
        Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (1, 1.6)), label="training"),
    ]
    lines = [str(handle.get_label()).splitlines() for handle in handles]
    widest = max(len(line) for label in lines for line in label)
    columns = max(1, min(len(handles) if len(handles) <= 5 else 4, int(drawn.get_figwidth() / (0.5 + 0.075 * widest))))
    drawn.set_figheight(drawn.get_figheight() + 0.2 * ceil(sum(map(len, lines)) / columns))
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)
