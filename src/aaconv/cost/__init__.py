"""Parameters, FLOPs (a multiply-add is two) and attention-map memory of any torch model, without running it."""

from .counting import AttentionCost, Cost, LayerCost, count, count_named

__all__ = ["AttentionCost", "Cost", "LayerCost", "count", "count_named"]
