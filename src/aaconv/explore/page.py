"""The explorer's page: one HTML file with everything in it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from ..utils.files import check_writable, replacing
from ..utils.html import base_style, fill, read
from ..utils.terminal import plural
from ..version import __version__
from .images import png
from .study import Picture, Study, study

COLOUR_MAP = "inferno"
LARGEST_PAGE = 50
"""Megabytes: a page that can still be sent and opened."""


@dataclass(frozen=True)
class Written:
    """Where the page is, its size, and how far its weights are from attention_maps (parts of a row's largest)."""

    path: Path
    bytes: int
    layers: int
    images: int
    error: float

    def __str__(self) -> str:
        size = f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e5 else f"{self.bytes / 1e3:.0f} kB"
        return f"wrote {self.path}: {plural(self.images, 'image')}, {plural(self.layers, 'layer')}, {size}"


def write_page(
    source: Any,
    images: Any,
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    size: int | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    augment: Mapping[str, Any] | None = None,
    largest: float = LARGEST_PAGE,
) -> Written:
    """Write one self-contained page that shows what a network attends to.

    source: a run folder, a registered model's name, a network in hand, or what aaconv.load_model gives.
    images: files, folders, patterns, PIL images, or arrays and tensors [height, width, 3] or [3, height, width], one or
        several; names: their captions.
    layers: wildcard patterns of layer names, default all. size: of the images, default the network's own.
    weights: "last", "best" or "ema" of a run. augment: of a name, the keywords of aaconv.augment, `where` among them.
    largest: the most megabytes the page may have.
    """
    check_writable(path)
    options = {"names": names, "layers": layers, "size": size, "weights": weights, "pretrained": pretrained}
    text, looked_at = page_text(source, images, largest=largest, augment=augment, **options)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return Written(Path(path), len(text.encode()), len(looked_at.layers), len(looked_at.pictures), looked_at.error)


def page_text(source: Any, images: Any, *, largest: float = LARGEST_PAGE, **options: Any) -> tuple[str, Study]:
    """The page's text, and what it shows; the arguments are those of `write_page`."""

    def look(picture: Picture, number: int) -> None:
        each = len(png(picture.pixels)) + sum(len(packed.text) for packed in picture.attention.values())
        fitting = int(largest * 1e6 / each)
        _check_size(number * each, largest, f" (about {plural(fitting, 'image')} fit)" if fitting else "")

    looked_at = study(source, images, look=look, **options)
    text = render(looked_at)
    _check_size(len(text), largest)
    return text, looked_at


def _check_size(letters: int, largest: float, hint: str = "") -> None:
    if letters > largest * 1e6:
        raise ValueError(
            f"the page would have {letters / 1e6:.3g} MB, the limit is {largest:g}; "
            f"choose fewer layers or images{hint}, a smaller size, or a higher limit"
        )


def render(looked_at: Study) -> str:
    """The page's text."""
    data = {
        "title": looked_at.title,
        "facts": looked_at.facts,
        "trained": looked_at.trained,
        "size": looked_at.size,
        "error": looked_at.error,
        "version": __version__,
        "colours": base64.b64encode(colours().tobytes()).decode(),
        "layers": [asdict(layer) for layer in looked_at.layers],
        "images": [
            {
                "name": picture.name,
                "png": png(picture.pixels),
                "top": picture.top,
                "attention": [asdict(picture.attention[layer.name]) for layer in looked_at.layers],
            }
            for picture in looked_at.pictures
        ],
    }
    return fill(
        read(__package__, "page.html"),
        title=html.escape(f"What {looked_at.title} attends to"),
        style=base_style() + read(__package__, "page.css"),
        attention=read(__package__, "attention.js"),
        script=read(__package__, "page.js"),
        # Inside <script> only "</" could end the text early.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def colours() -> np.ndarray:
    """The colour map, 256 x 3 bytes: equal steps of weight look like equal steps."""
    return (colormaps[COLOUR_MAP](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
