"""Parameters, FLOPs and attention-map memory of any torch model, without running it at real size."""

from .counting import AttentionCost, Cost, LayerCost, count, count_named

__all__ = ["AttentionCost", "Cost", "LayerCost", "count", "count_named"]
