"""The metrics of a run by their titles, beside the paper's."""

from __future__ import annotations

from typing import Any

from .. import recipes
from ..recipes.recipe import Recipe
from ..utils.metrics import TITLES, telling


def metric_rows(recipe: Recipe, metrics: dict[str, Any] | None) -> list[tuple[str, float | None, float | None]]:
    """(title, ours, the paper's) of every metric that a run has, or that the paper prints for its recipe."""
    measured = telling(metrics or {})
    rows = []
    for name, column in TITLES.items():
        ours, paper = measured.get(name), recipes.paper_value(recipe, column)
        if ours is not None or paper is not None:
            rows.append((column, ours, paper))
    return rows
