"""Figures as files, replaced whole. The same figure is the same file: no date, no random names within."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .files import replacing

GREY, BLUE, RED, INK = "#6b6b6b", "#2a6fbb", "#c8322b", "#222222"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#ececec",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
}

ENDINGS = (".png", ".svg", ".pdf")
_SALT = {"svg.hashsalt": "aaconv"}
_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def check_ending(path: Path, endings: tuple[str, ...] = ENDINGS) -> None:
    """A ValueError that names the endings unless the path has one of them."""
    if path.suffix.lower() not in endings:
        raise ValueError(f"the file must end in {', '.join(endings[:-1])} or {endings[-1]}, got {str(path)!r}")


def write(draw: Callable[[], Figure], path: Path, style: Mapping[str, Any], *, dpi: int = 160) -> None:
    """Draw a figure in a style into a file; its folder must be there."""
    settings: Any = {**style, **_SALT}  # matplotlib lists every name
    with rc_context(settings), replacing(path) as draft:
        draw().savefig(draft, dpi=dpi, metadata=_DATES.get(path.suffix.lower()), facecolor="white")
