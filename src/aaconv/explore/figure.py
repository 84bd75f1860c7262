"""The paper's figure for print: the input with numbered crosses, and the attention of every head from each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..utils import figures
from ..utils.files import check_writable
from .capture import Layer
from .images import each_image
from .page import COLOUR_MAP
from .study import Picture, Study, study

SPREAD = ((0.3, 0.3), (0.7, 0.3), (0.3, 0.7), (0.7, 0.7))
"""Where the crosses stand unless told, as in the paper: x and y as parts of the image."""
MOST_POSITIONS = 12
NOTABLE, DIM, LIT = 4, 0.2, 0.68  # as in the page
FINE = 4  # drawn pixels a pixel of the image: cells may begin at half ones
CELL, GAP, LABEL = 1.0, 0.06, 0.62  # inches
STYLE = {"font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none"}
OUTLINE = [patheffects.withStroke(linewidth=2.6, foreground="black", alpha=0.7)]


def write_figure(
    source: Any,
    images: Any,
    path: str | Path,
    *,
    at: Sequence[tuple[float, float]] | None = None,
    layers: Sequence[str] | None = None,
    size: int | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    augment: Mapping[str, Any] | None = None,
) -> Path:
    """Draw heads by positions for one image and one layer into a .png, .pdf or .svg file.

    at: positions (x, y) in pixels of the image as the network sees it. layers: patterns of names; of the layers that
    fit, the one that looks most sharply is drawn.
    """
    path = Path(path)
    figures.check_ending(path)
    images = each_image(images)
    if len(images) != 1:
        raise ValueError(f"a figure shows one image, got {len(images)}; a page takes several")
    check_writable(path)
    looked_at = study(source, images, layers=layers, size=size, weights=weights, pretrained=pretrained, augment=augment)
    positions = _positions(at, looked_at.size)
    sharpest = max(looked_at.layers, key=lambda layer: looked_at.pictures[0].attention[layer.name].peak)
    figures.write(lambda: draw(looked_at, sharpest, positions), path, STYLE, dpi=200)
    return path


def _positions(at: Sequence[tuple[float, float]] | None, size: int) -> list[tuple[float, float]]:
    """Pixels to parts of the image."""
    if not at:
        return list(SPREAD)
    if len(at) > MOST_POSITIONS:
        raise ValueError(f"a figure takes at most {MOST_POSITIONS} positions, got {len(at)}")
    for x, y in at:
        if not (0 <= x < size and 0 <= y < size):
            raise ValueError(f"a position must be 0 to {size - 1} pixels from left and top, got {x:g},{y:g}")
    return [((x + 0.5) / size, (y + 0.5) / size) for x, y in at]


def draw(looked_at: Study, layer: Layer, positions: Sequence[tuple[float, float]]) -> Figure:
    """The first image at the left, beside it a row a head and a column a position."""
    picture = looked_at.pictures[0]
    factors = picture.attention[layer.name].unpack(layer.grid)
    maps = [factors.row(*layer.cell(x, y)) for x, y in positions]
    height = layer.heads * (CELL + GAP) + 0.72
    left = min(3.4, height - 0.72)
    width = left + LABEL + len(positions) * (CELL + GAP) + 0.3
    figure = Figure(figsize=(width, height))

    def place(x: float, top: float, side: float) -> Axes:
        axes = figure.add_axes((x / width, 1 - (top + side) / height, side / width, side / height))
        axes.set_axis_off()
        return axes

    title = f"{looked_at.title}, {layer.name}, {layer.height} x {layer.width}"
    title += "" if looked_at.trained else " (untrained)"
    figure.text(0.1 / width, 1 - 0.3 / height, title, fontsize=11, fontweight="bold")
    axes = place(0.1, 0.5, left)
    _show(axes, _pixels(picture))
    for number, (x, y) in enumerate(positions, 1):
        _cross(axes, x, y, 7, str(number))
    for head in range(layer.heads):
        top = 0.5 + head * (CELL + GAP)
        middle = 1 - (top + CELL / 2) / height
        figure.text((0.1 + left + LABEL - 0.08) / width, middle, f"head {head + 1}", ha="right", va="center")
        for index, (x, y) in enumerate(positions):
            row, column = layer.cell(x, y)
            axes = place(0.1 + left + LABEL + index * (CELL + GAP), top, CELL)
            _show(axes, overlay(picture, maps[index][head], layer))
            _cross(axes, *layer.centre(row, column), 4)
            if head == 0:
                axes.text(0.5, 1.03, str(index + 1), transform=axes.transAxes, ha="center", fontweight="bold")
    return figure


def overlay(picture: Picture, weights: np.ndarray, layer: Layer) -> np.ndarray:
    """The image in grey under one row of a map [cells of the keys], as the page draws it: [side, side, 3], 0 to 1."""
    part = np.minimum(1, weights / max(weights.max(), NOTABLE / layer.keys_seen)).reshape(layer.grid.key_map)
    pixels = np.repeat(np.repeat(_pixels(picture), FINE, axis=0), FINE, axis=1)
    place = (np.arange(len(pixels)) + 0.5) / len(pixels)
    cells = [layer.key_cell(x, x) for x in place]
    part = part[np.ix_([row for row, _ in cells], [column for _, column in cells])]
    grey = pixels @ np.array([0.3, 0.59, 0.11])
    base = 0.15 * pixels + 0.85 * grey[..., None]
    alpha = (DIM + LIT * part)[..., None]
    return (1 - alpha) * base + alpha * colormaps[COLOUR_MAP](part)[..., :3]


def _pixels(picture: Picture) -> np.ndarray:
    return picture.pixels.permute(1, 2, 0).numpy() / 255


def _show(axes: Axes, pixels: np.ndarray) -> None:
    axes.imshow(pixels, interpolation="nearest", extent=(0, 1, 1, 0), aspect="auto")


def _cross(axes: Axes, x: float, y: float, size: float, text: str = "") -> None:
    axes.plot(x, y, "+", color="white", markersize=size + 3, markeredgewidth=1.2, path_effects=OUTLINE)
    if text:
        offset = (-6 if x > 0.9 else 6, -12 if y < 0.1 else 4)
        axes.annotate(
            text, (x, y), offset, textcoords="offset points", color="white", fontweight="bold", path_effects=OUTLINE,
            ha="right" if x > 0.9 else "left", fontsize=11,
        )  # fmt: skip
