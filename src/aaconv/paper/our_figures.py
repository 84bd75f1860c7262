"""Figures of our own runs alone: `aaconv plot ablation` and `aaconv plot distance`.

Points are means over seeds, bars their 95 % intervals, small marks single runs; see `runs/results.py` on where results
are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..runs import results
from ..runs.results import Experiment, common_epochs
from ..utils.figures import BLUE, GREY, INK, RED
from ..utils.terminal import plural

ABLATION_DATA, SHAPES_DATA = "imagenette160", "shapes-distance-"
QUEUE = "python examples/queue_runs.py"
SMALL_STRIDES = (2, 2, 1)
GRADED = {
    "plain_small": (GREY, "convolutions only", "o-"),
    "se_small": (BLUE, "with SE", "s-"),
    "aa_small": (RED, "with attention", "D-"),
}
BY_PARTS = 75.0
"""Percent: what a network can reach on `shapes` whose windows never hold both objects; data/shapes.py has the proof."""

Point = tuple[float, Experiment]


def ablation() -> Figure:
    """Accuracy of ResNet-50 over the ratio of attentional channels, with and without relative positions."""
    ours, epochs = _of_one_length(one for one in _recorded() if one.dataset == ABLATION_DATA)
    relative, without = (_over_ratio(ours, options) for options in ({}, {"position": "none"}))
    if not relative and not without:
        raise ValueError(_nothing("imagenette-ablation-*"))
    title = "More and more attention in ResNet-50, on Imagenette"
    figure, axes = _new_figure(title, "ratio of attentional channels", epochs)
    _draw(axes, relative, RED, "relative positions", "o-")
    _draw(axes, without, BLUE, "no positions", "s-")
    _draw(axes, _points(ours, "aa_resnet50", {}, 0.1), RED, "AA as in the paper, key ratio 0.2", "o", open_mark=True)
    for model, label, color in (("plain_resnet50", "convolutions only", GREY), ("se_resnet50", "SE", INK)):
        for _, one in _points(ours, model, {}, 0.0):
            value, spread = one.mean("top1") or 0.0, one.interval("top1") or 0.0
            number = f"{label} (n = {len(one.values('top1'))})"
            axes.axhline(value, color=color, linewidth=1.2, linestyle=(0, (4, 3)), label=number)
            axes.axhspan(value - spread, value + spread, color=color, alpha=0.1, linewidth=0)
    axes.set_xlim(0, 1.05)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)  # lines cross all of the width
    return figure


def distance() -> Figure:
    """Accuracy of small networks on `shapes` over the distance of the objects, relative to the receptive field: a panel
    for each length of training in which networks can be compared."""
    by_epochs: dict[int, list[Experiment]] = {}
    for one in _recorded():
        if one.model in GRADED and re.fullmatch(rf"{SHAPES_DATA}\d+", one.dataset):
            by_epochs.setdefault(one.epochs or 0, []).append(one)
    if not by_epochs:
        raise ValueError(_nothing("shapes-distance-*"))
    networks = {epochs: len({one.model for one in ours}) for epochs, ours in by_epochs.items()}
    enough = min(2, max(networks.values()))
    lengths = sorted(epochs for epochs in by_epochs if networks[epochs] >= enough)
    figure = Figure(figsize=(2.5 + 4.5 * len(lengths), 4.6), layout="constrained")
    figure.suptitle("Have two objects the same colour, further and further apart?", x=0.01, ha="left", color=INK)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, epochs in zip(panels, lengths, strict=True):
        axes.set_title(f"after {plural(epochs, 'epoch')}", loc="left", fontsize=11, color=INK)
        axes.set_xlabel("distance of the objects / receptive field")
        axes.set_ylim(40, 102)
        _draw_distances(axes, by_epochs[epochs])
    panels[0].set_ylabel("top-1 accuracy (%)")
    return figure


def _draw_distances(axes: Axes, ours: list[Experiment]) -> None:
    found: dict[str, list[Point]] = {model: [] for model in GRADED}
    for one in _most_runs(ours):
        columns = int(one.dataset.removeprefix(SHAPES_DATA))
        found[one.model].append((columns / receptive_field(one.options.get("strides", SMALL_STRIDES)), one))
    for model, points in found.items():
        _draw(axes, points, *GRADED[model], single_runs=True)
    axes.axhline(BY_PARTS, color=INK, linewidth=1, linestyle=(0, (1, 3)))
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    about = f"no window of a convolution holds both:\n{BY_PARTS:.0f} % at best"
    axes.text(
        0.99, BY_PARTS - 1, about, va="top", ha="right", fontsize=9, color=INK, transform=axes.get_yaxis_transform()
    )
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.37))


OUR_FIGURES: dict[str, Callable[[], Figure]] = {"ablation": ablation, "distance": distance}


def receptive_field(strides: Sequence[int]) -> int:
    """Pixels that a 3x3 convolution for each of the strides, one behind the other, sees along an axis."""
    field, step = 1, 1
    for stride in strides:
        field, step = field + 2 * step, step * stride
    return field


def _recorded() -> list[Experiment]:
    return results.experiments(results.read())


def _nothing(recipes: str) -> str:
    return f"no results to draw yet; train and record them: {QUEUE} '{recipes}' --seeds 0 1 2"


def _over_ratio(ours: list[Experiment], options: dict[str, Any]) -> list[Point]:
    found = []
    for one in ours:
        ratio = one.options.get("value_ratio")
        if ratio is not None and one.options == {"key_ratio": ratio, "value_ratio": ratio, **options}:
            found += _points(ours, "aa_resnet50", one.options, ratio)
    return list({ratio: (ratio, one) for ratio, one in found}.values())


def _points(ours: list[Experiment], model: str, options: dict[str, Any], place: float) -> list[Point]:
    """The experiment with that network at a place of the axis; none where there is none."""
    fitting = [one for one in ours if one.model == model and one.options == options and one.values("top1")]
    return [(place, one) for one in _most_runs(fitting)]


def _of_one_length(found: Iterable[Experiment]) -> tuple[list[Experiment], str]:
    """Those that can be compared, and how many epochs they have."""
    ours = list(found)
    epochs = common_epochs(ours)
    return [one for one in ours if one.epochs == epochs], plural(epochs or 0, "epoch")


def _most_runs(ours: Iterable[Experiment]) -> list[Experiment]:
    """Of each network on each data set the experiment with the most runs."""
    best: dict[str, Experiment] = {}
    for one in ours:
        key = f"{one.dataset} {one.model} {sorted(one.options.items())}"
        if key not in best or len(one.values("top1")) > len(best[key].values("top1")):
            best[key] = one
    return list(best.values())


def _new_figure(title: str, x_label: str, epochs: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"top-1 accuracy (%) after {epochs}")
    return figure, axes


def _draw(
    axes: Axes,
    points: list[Point],
    color: str,
    label: str,
    form: str,
    *,
    open_mark: bool = False,
    single_runs: bool = False,
) -> None:
    """Means joined by a line, with their intervals, or with every run as a small mark where some learn and others do
    not, which an interval does not tell; the label says over how many runs."""
    if not points:
        return
    points = sorted(points, key=lambda point: point[0])
    x, y = [place for place, _ in points], [one.mean("top1") or 0.0 for _, one in points]
    spread = None if single_runs else [one.interval("top1") or 0.0 for _, one in points]
    numbers = sorted({len(one.values("top1")) for _, one in points})
    label += f" (n = {numbers[0]})" if len(numbers) == 1 else f" (n = {numbers[0]} to {numbers[-1]})"
    face = "white" if open_mark else color
    how: Any = {"color": color, "markerfacecolor": face, "markersize": 6, "linewidth": 1.8, "capsize": 3}
    axes.errorbar(x, y, yerr=spread, fmt=form, label=label, **how)
    if single_runs:
        places, values = zip(*((place, value) for place, one in points for value in one.values("top1")), strict=True)
        axes.scatter(places, values, s=16, color=color, alpha=0.5, linewidths=0)
