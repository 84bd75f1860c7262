"""The explorer's page inside a notebook: `aaconv.explore.show(model, images)` as the last line of a cell."""

from __future__ import annotations

import html
from typing import Any

from .page import LARGEST_PAGE, page_text

HEIGHT = 760


class Shown:
    """What a notebook shows as the page, in a frame of its own; elsewhere it says what it is."""

    def __init__(self, text: str, height: int) -> None:
        self.text, self.height = text, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.text)}" style="width: 100%; height: {self.height}px; border: 0" '
            'title="What the network attends to"></iframe>'
        )

    def __repr__(self) -> str:
        return f"a page of {len(self.text) / 1e6:.1f} MB, which a notebook shows; write_page writes it to a file"


def show(source: Any, images: Any, *, height: int = HEIGHT, largest: float = LARGEST_PAGE, **options: Any) -> Shown:
    """The page that `write_page` writes, for the output of a notebook's cell, `height` pixels high.

    source, images, largest and the options (names, layers, size, weights, pretrained, augment) are those of
    `write_page`.
    """
    text, _ = page_text(source, images, largest=largest, **options)
    return Shown(text, height)
