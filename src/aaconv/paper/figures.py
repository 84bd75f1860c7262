"""The paper's figures 1 and 3 to 6 from its printed values, with ours beside them where measured: `aaconv plot KIND`.

Filled marks are the paper's, open ones the means of our own runs (see `tables.py` on where they are kept). Of figure 4
the paper prints only the values of the relative encoding; of the curve without positions its text and table 7 give the
two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..recipes.paper import TABLES, Row
from ..utils import figures
from ..utils.figures import BLUE, GREY, INK, RED, STYLE
from .cells import measured
from .our_figures import OUR_FIGURES

AXES = {"Params": "parameters (millions)", "GFlops": "GFlops, as the paper counts"}
FULLY_ATTENTIONAL_GAIN = 2.8
"""What relative positions give the fully attentional ResNet-50, in percent of top-1, by the paper's text."""


@dataclass(frozen=True)
class Series:
    """Rows of one table joined by a line, its label beside the last point; sizes stand above, below or nowhere."""

    label: str
    color: str
    rows: tuple[Row, ...]
    sizes: str | None = None
    label_height: float = 0  # points above the last point


def save(kind: str, path: str | Path) -> Path:
    """Draw a figure, the paper's or of our runs, into a .png, .svg or .pdf file, replaced whole, in a folder that is
    there."""
    path = Path(path)
    known = FIGURES | OUR_FIGURES
    if kind not in known:
        raise ValueError(f"unknown figure {kind!r}; choose one of {', '.join(known)}")
    figures.check_ending(path)
    figures.write(known[kind], path, STYLE)
    return path


def _resnets(column: str, number: int) -> Figure:
    rows = TABLES[3].rows
    series = (
        Series("ResNet", GREY, rows[0::3], "below", label_height=2),
        Series("SE-ResNet", BLUE, rows[1::3], label_height=-5),
        Series("AA-ResNet", RED, rows[2::3], "above", label_height=5),
    )
    return _accuracy_against(3, column, series, f"ResNets on ImageNet (figure {number} of the paper)")


def _mnasnets(column: str, number: int) -> Figure:
    rows = TABLES[4].rows
    series = (
        Series("MnasNet", INK, rows[0::2], "below", label_height=2),
        Series("AA-MnasNet", RED, rows[1::2], "above"),
    )
    return _accuracy_against(4, column, series, f"MnasNets on ImageNet (figure {number} of the paper)")


def _accuracy_against(table: int, column: str, series: tuple[Series, ...], title: str) -> Figure:
    figure, axes = _new_figure(title, AXES[column])
    any_measured = False
    for one in series:
        x = [_number(row.cells[column]) for row in one.rows]
        y = [_number(row.cells["top-1"]) for row in one.rows]
        axes.plot(x, y, "o-", color=one.color, markersize=6, linewidth=1.8)
        _label(axes, one.label, (x[-1], y[-1]), one.color, (10, one.label_height))
        if one.sizes:
            side, offset = ("right", (-5, 7)) if one.sizes == "above" else ("left", (5, -11))
            for row, point in zip(one.rows, zip(x, y, strict=True), strict=True):
                size = row.name.rpartition("-")[2]
                _label(axes, size, point, one.color, offset, ha=side, fontsize=9, fontweight="normal")
        any_measured |= _add_measured(axes, table, one.rows, x, one.color)
    _leave_room(axes)
    _explain(axes, any_measured)
    return figure


def _ratios() -> Figure:
    figure, axes = _new_figure(
        "More and more attention in ResNet-50 (figure 4 of the paper)", "ratio of attentional channels"
    )
    base, ablation, positions = TABLES[6].rows[1], TABLES[6].rows[2:], TABLES[7].rows
    x = [row.options["value_ratio"] for row in ablation]
    y = [_number(row.cells["top-1"]) for row in ablation]
    axes.plot(x, y, "o-", color=RED, markersize=6, linewidth=1.8)
    _label(axes, "relative positions", (x[1], y[1]), RED, (6, 10))

    default_ratio = 0.1  # table 7 is on the default AA-ResNet-50
    without, relative = (_number(positions[index].cells["top-1"]) for index in (4, 7))
    unaware = round(y[-1] - FULLY_ATTENTIONAL_GAIN, 1)
    axes.plot([default_ratio], [relative], "o", color=RED, markersize=6)
    axes.plot([default_ratio, 1.0], [without, unaware], "s", color=BLUE, markersize=6)
    _label(axes, "no positions", (1.0, unaware), BLUE, (-10, 0), ha="right")
    below = {"ha": "center", "fontsize": 9, "fontweight": "normal"}
    _label(axes, "(key ratio 0.2)", (default_ratio, without), INK, (0, -13), **below)
    arrow = {"arrowstyle": "<->", "color": "#999999"}
    axes.annotate("", (1.0, unaware + 0.15), xytext=(1.0, y[-1] - 0.15), arrowprops=arrow)
    _label(axes, f"+{FULLY_ATTENTIONAL_GAIN}", (1.0, (unaware + y[-1]) / 2), INK, (7, 0), fontweight="normal")

    plain = _number(base.cells["top-1"])
    axes.axhline(plain, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
    _label(axes, "ResNet-50, convolutions only", (0.0, plain), GREY, (4, -11))
    any_measured = _add_measured(axes, 6, ablation, x, RED)
    axes.set_xlim(-0.03, 1.1)
    axes.set_ylim(70.5, 78.5)
    _explain(axes, any_measured)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "params": lambda: _resnets("Params", 1),
    "mnasnet-params": lambda: _mnasnets("Params", 3),
    "ratios": _ratios,
    "flops": lambda: _resnets("GFlops", 5),
    "mnasnet-flops": lambda: _mnasnets("GFlops", 6),
}


def _new_figure(title: str, x_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel(x_label)
    axes.set_ylabel("top-1 accuracy (%)")
    return figure, axes


def _label(
    axes: Axes, text: str, point: tuple[float, float], color: str, offset: tuple[float, float], **how: Any
) -> None:
    axes.annotate(
        text, point, offset, textcoords="offset points", color=color, va="center", **({"fontweight": "bold"} | how)
    )


def _add_measured(axes: Axes, table: int, rows: tuple[Row, ...], x: list[float], color: str) -> bool:
    ours = [(place, value) for place, row in zip(x, rows, strict=True) if (value := measured(table, row, "top-1"))]
    if ours:
        axes.plot(*zip(*ours, strict=True), "D", color=color, markerfacecolor="white", markersize=7)
    return bool(ours)


def _leave_room(axes: Axes) -> None:
    """Widen the axes by fractions of their range, so that the labels stay inside."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    axes.set_xlim(left - 0.03 * (right - left), right + 0.2 * (right - left))
    axes.set_ylim(bottom - 0.04 * (top - bottom), top + 0.05 * (top - bottom))


def _explain(axes: Axes, any_measured: bool) -> None:
    if any_measured:
        text = "filled: the paper, open: our runs"
        axes.text(0.99, 0.02, text, transform=axes.transAxes, ha="right", fontsize=9, color=GREY)


def _number(printed: str) -> float:
    return float(printed.rstrip("M"))
