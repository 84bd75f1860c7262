"""Where the output pixels of a convolution lie on its input, and so the pixels of its attention map.

A map has rows and columns; a sequence is a map of one row, whose axis of rows is `Axis()`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..attention import windows
from .pooling import average


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution. `pads_to_same`: it pads itself, to length / stride pixels, whatever `padding` is."""

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    pads_to_same: bool = False
    window: tuple[int, int, int] = field(init=False)
    """Pixels to add (negative: to cut) before and after the axis, and the window to average there.

    The window of output pixel i is centred where the convolution's is: the paper's 3 pixels for an odd kernel with
    stride 2, exactly the pixels of the stride for an even kernel with an even stride.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", self._window())

    def _window(self) -> tuple[int, int, int]:
        reach = self.dilation * (self.kernel - 1)
        odd = self.stride + 1 - self.stride % 2
        if self.pads_to_same:
            return 0, 0, odd
        if reach % 2 and self.stride % 2 == 0:
            side = self.padding - (reach + 1) // 2 + self.stride // 2
            return side, side, self.stride
        total = 2 * self.padding - reach
        return -(-total // 2), total // 2, odd

    def output_length(self, length: int) -> int:
        before, after, window = self.window
        reach = 1 if window % 2 else window  # an odd window is padded to its middle
        return (length + before + after - reach) // self.stride + 1


@dataclass(frozen=True)
class Geometry:
    """Both axes of a map, and how often attention halves it."""

    rows: Axis
    columns: Axis
    halvings: int = 0

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the output for a map of height x width."""
        return self.rows.output_length(height), self.columns.output_length(width)

    def attention_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that attention works at for a map of height x width."""
        height, width = self.output_size(height, width)
        for _ in range(self.halvings):
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
        return height, width

    def pool(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """[batch, channels, height, width] at the attention's resolution, and the (height, width) of the output."""
        (top, bottom, window_height), (left, right, window_width) = self.rows.window, self.columns.window
        if top or bottom or left or right:
            x = F.pad(x, (left, right, top, bottom))
        stride = (self.rows.stride, self.columns.stride)
        if stride != (1, 1):
            x = average(x, (window_height, window_width), stride)
        out_size = x.shape[-2], x.shape[-1]
        for _ in range(self.halvings):
            x = average(x, (3, 3), (2, 2))
        return x, out_size


def resolve_window(dimensions: int, window: Any, stride: Any, dilation: Any, size: Any) -> windows.Window | None:
    """The windows of a layer, None where it attends to the whole map."""
    if window is None:
        windows.refuse_without_window(stride, dilation)
        return None
    if size is not None:
        raise ValueError(f"size={size} has no meaning with a window, for which the tables are made; leave it out")
    if dimensions == 2:
        return windows.make_window(window, stride, dilation)
    for name, value in (("window", window), ("window_stride", stride), ("window_dilation", dilation)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} of a sequence must be a whole number from 1, got {name}={value!r}")
    return windows.make_window(window, stride, dilation)._replace(rows=windows.Axis(1))
