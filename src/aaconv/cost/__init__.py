"""Parameters, FLOPs (a multiply-add is two) and attention-map memory of any torch model, without running it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .known import cost_of
from .totals import AttentionCost, Cost, LayerCost, Totals

if TYPE_CHECKING:
    from .counting import count, count_named

__all__ = ["AttentionCost", "Cost", "LayerCost", "Totals", "cost_of", "count", "count_named"]


def __getattr__(name: str) -> Any:
    """What counts needs torch and timm; what is known already does not."""
    if name not in ("count", "count_named"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".counting", __name__), name)
