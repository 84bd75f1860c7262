"""The attention of an augmented convolution: from the layer's input to what joins the convolution's output."""

import functools

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..attention import attend_2d, attention_maps
from ..attention.windows import Window
from .at_once import attend_at_once
from .geometry import Geometry
from .lazy import initialize
from .pointwise import project_in, project_out
from .pooling import resize
from .position import NoPosition
from .projections import normalize_queries, table_statistics
from .tables import RelativeTables, TableSpec


class AttentionBranch(RelativeTables):
    """A module that attends over a map [batch, channels, height, width]; a sequence is a map of one row.

    Whoever inherits it makes the parts named here.
    """

    dimensions: int
    in_channels: int
    kernel_size: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    num_heads: int
    key_channels: int
    share_heads: bool
    downsample: int
    init: str
    backend: str | None
    window: Window | None
    geometry: Geometry
    position: NoPosition
    qkv: nn.Conv2d
    project: nn.Conv2d
    temperature: nn.Parameter | None

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(qkv, rel_h, rel_w): what attend_2d works on for the input x [batch, in_channels, height, width].

        qkv [batch, height', width', 2*key_channels + value_channels] at the attention's resolution (attention_size);
        rel_h [2*height' - 1, key_channels / num_heads] (of the window, where there is one), with a first axis of
        num_heads if they share none, rel_w alike; both None if the position is not relative. Of a sequence
        [batch, in_channels, length] the map has one row, whose rel_h is zero. Tables that are still lazy are made.
        """
        self._check_input(x)
        self.make_tables(*self._as_map(x).shape[-2:])
        qkv = self._project(self.position.encode(self.geometry.pool(self._as_map(x))[0]))
        return qkv, *self.fitted_tables(*qkv.shape[1:3])

    def attention_maps(self, x: Tensor) -> Tensor:
        """The weight pixel i gives to pixel j: [batch, num_heads, HW (i), HW (j)] at the attention's resolution."""
        inputs = self.attention_inputs(x)
        return attention_maps(*inputs, num_heads=self.num_heads, key_channels=self.key_channels, window=self.window)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the output for an input of height x width."""
        return self.geometry.output_size(height, width)

    def attention_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the attention map for an input of height x width."""
        return self.geometry.attention_size(height, width)

    def make_tables(self, height: int, width: int) -> None:
        """Make tables that are still lazy for inputs of height x width, without a forward; others stay as they are."""
        if self.rel_w is not None and is_lazy(self.rel_w):
            map_seen = torch.empty(1, self.in_channels, height, width, device="meta")
            initialize(self, self._from_map(map_seen))

    def table_size(self, input: Tensor) -> tuple[int, int]:
        """(height, width) that lazy tables get for an input."""
        self._check_input(input)
        return self.attention_size(*self._as_map(input).shape[-2:])

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != self.dimensions + 2 or x.shape[1] != self.in_channels:
            axes = "height, width" if self.dimensions == 2 else "length"
            raise ValueError(f"expected input [batch, {self.in_channels}, {axes}], got shape {list(x.shape)}")
        if min(self.output_size(*self._as_map(x).shape[-2:])) < 1:
            raise ValueError(
                f"an input of shape {list(x.shape)} is too small for kernel_size={self.kernel_size}, "
                f"padding={self.padding}, dilation={self.dilation}: no output pixel is left"
            )

    def _attend(self, x: Tensor) -> Tensor:
        """The attention branch: [batch, in_channels, ...] -> [batch, value_channels, ...] of the output's size, or
        [batch, out_channels, ...] with combine="add"."""
        pooled, out_size = self.geometry.pool(self._as_map(x))
        encoded = self.position.encode(pooled)
        fit_tables = functools.partial(self.fitted_tables, *pooled.shape[-2:])
        attended = None
        if self.temperature is None and self.window is None:
            sizes = self.num_heads, self.key_channels
            attended = attend_at_once(encoded, self.qkv, self.project, fit_tables, *sizes, self.backend)
        if attended is None:
            attended = attend_2d(
                self._project(encoded),
                *fit_tables(),
                num_heads=self.num_heads,
                key_channels=self.key_channels,
                backend=self.backend,
                window=self.window,
            )
            attended = project_out(self.project, attended)
        if self.downsample:
            attended = resize(attended, out_size)
        return self._from_map(attended)

    def _project(self, encoded: Tensor) -> Tensor:
        """qkv [batch, height', width', 2*key_channels + value_channels]."""
        qkv = project_in(self.qkv, encoded)
        return qkv if self.temperature is None else normalize_queries(qkv, self.temperature, self.key_channels)

    def _table_spec(self) -> TableSpec:
        depth = self.key_channels // self.num_heads
        mean, std = table_statistics(self.init, depth)
        names = ("rel_h", "rel_w")[-self.dimensions :] if self.position.has_tables else ()
        steps = tuple(axis.dilation for axis in self.window)[-len(names) :] if self.window and names else ()
        return TableSpec(names, depth, None if self.share_heads else self.num_heads, mean, std, steps)

    def _as_map(self, x: Tensor) -> Tensor:
        return x

    def _from_map(self, x: Tensor) -> Tensor:
        return x
