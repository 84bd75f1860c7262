"""Whether what a network gives is finite."""

from __future__ import annotations

import math

from ..runs.load import TrainedModel


def not_finite(loaded: TrainedModel, what: str) -> ValueError:
    """The error where something of a network is infinite or not a number: images are finite, so it is the weights, or
    they are too large for half precision."""
    reason = f"the weights {loaded.file or f'of {loaded.source}'} are damaged or diverged in training"
    return ValueError(f"{what} is not finite: {reason}; take others with --weights")


def check_finite(loaded: TrainedModel, data: str, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise not_finite(loaded, f"the {name} on {data}")
