"""The metrics of a run by their titles, beside the paper's."""

from __future__ import annotations

from .. import recipes
from ..utils.metrics import TITLES, telling
from .load import TrainedModel


def metric_rows(loaded: TrainedModel) -> list[tuple[str, float | None, float | None]]:
    """(title, ours, the paper's) of every metric that the run has, or that the paper prints for it."""
    measured = telling(loaded.metrics or {})
    rows = []
    for name, column in TITLES.items():
        ours, paper = measured.get(name), recipes.paper_value(loaded.run_recipe, column)
        if ours is not None or paper is not None:
            rows.append((column, ours, paper))
    return rows
