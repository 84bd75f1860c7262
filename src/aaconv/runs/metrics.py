"""The metrics of a run by their titles, beside the paper's."""

from __future__ import annotations

from .. import recipes
from .load import TrainedModel

METRICS = {"top1": "top-1", "top5": "top-5", "mAP": "mAP", "mAP50": "mAP50", "mAP75": "mAP75"}
"""Names in summary.json -> columns of the paper's tables; all in percent."""


def metric_rows(loaded: TrainedModel) -> list[tuple[str, float | None, float | None]]:
    """(name, ours, the paper's) of every metric that the run has, or that the paper prints for it."""
    measured = loaded.metrics or {}
    rows = []
    for key, column in METRICS.items():
        ours, paper = measured.get(key), recipes.paper_value(loaded.recipe, column)
        if ours is not None or paper is not None:
            rows.append((column, ours, paper))
    return rows
