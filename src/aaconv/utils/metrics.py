"""The metrics of results by name and by title."""

from collections.abc import Mapping
from typing import Any

TITLES = {"top1": "top-1", "top5": "top-5", "mAP": "mAP", "mAP50": "mAP50", "mAP75": "mAP75"}
TITLES |= {f"mAP_{size}": f"mAP {size}" for size in ("small", "medium", "large")}  # of objects
"""Names in metrics.csv and summary.json -> columns of tables, first the paper's; all in percent, the headline first."""
_NAMES = {title: name for name, title in TITLES.items()}


def metric_title(name: str) -> str:
    """What people call a metric."""
    return TITLES.get(name, name)


def metric_name(title: str) -> str:
    """The name of a column of the paper's tables in our files."""
    return _NAMES.get(title, title)


def says_nothing(name: str, value: float) -> bool:
    """The top-5 of a handful of classes is 100 whatever a network does."""
    return name == "top5" and value >= 99.995


def telling(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those metrics in percent that were measured and say something, in the order of `TITLES`."""
    return {
        name: metrics[name]
        for name in TITLES
        if isinstance(metrics.get(name), int | float) and not says_nothing(name, metrics[name])
    }
