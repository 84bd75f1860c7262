"""A batch norm without a learned scale."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from ..layers.tracing import leaf


class ShiftBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that learns a shift only; its scale of one is a buffer, so that fused kernels still take it.

    The buffer is a frozen nn.Parameter: SyncBatchNorm.convert_sync_batchnorm makes it the new layer's weight. Without a
    weight at all the GPU kernels would leave the shift without its gradient.

    `_apply` is private to torch: it is what to(), half() and cuda() call, and there is no hook behind it.
    """

    def __init__(self, num_features: int, **options: Any):
        super().__init__(num_features, **options)
        _keep_scale(self)
        self.register_load_state_dict_post_hook(_keep_scale)  # assign=True makes it a parameter

    forward = leaf(nn.BatchNorm2d.forward)  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _keep_scale(self)  # moved or cast it is a plain tensor
        return self


def _keep_scale(norm: ShiftBatchNorm2d, *_: Any) -> None:
    scale = nn.Parameter(norm.weight.detach(), requires_grad=False)
    del norm.weight  # setattr would make it a parameter again
    norm.register_buffer("weight", scale)
