"""Local attention: every query sees the keys of a window around it, with relative positions inside the window.

Along one axis of a map a window holds `window` keys. It lies around the query and is pushed inwards at the edge of the
map, so that every query sees as many keys. With a stride, that many neighbouring queries share the window of the one in
their middle; with a dilation, a query sees every dilation-th key. What a window shows is a condition on rows and one on
columns, so it fits into the two parts of attend_decomposed's bias: the fused backends walk over tiles of queries, each
with the part of the map that its windows cover. Time and memory are linear in the pixels.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .heads import relative_logits_by, split_heads

OUT_OF_SIGHT = {torch.float16: -3e4}
"""A bias that leaves no weight, and is finite: a product with zero must be zero."""
SMALLEST_TILE = 8
"""Queries along one side of a tile: a program of the fused kernels takes 64."""
LARGEST = 2**16
"""Of a window, a stride or a dilation: more pixels than a side of any map has."""
MAPS_AT_ONCE = 2**14
"""Smaller maps in one call, which a dilation cuts a batch into: a GPU starts at most 65,535 programs along an axis."""


class Axis(NamedTuple):
    """The windows along one side of a map."""

    window: int
    stride: int = 1
    dilation: int = 1

    def covers(self, length: int) -> bool:
        """Whether every query sees the whole side."""
        return self.dilation == 1 and self.window >= length

    def keys(self, length: int) -> int:
        """Keys that a query sees, at most."""
        return min(self.window, math.ceil(length / self.dilation))

    def start(self, query: int, length: int) -> int:
        """The first key that a query sees, for a dilation of 1."""
        middle = min(query // self.stride * self.stride + self.stride // 2, length - 1)
        return min(max(middle - self.window // 2, 0), max(length - self.window, 0))

    def starts(self, query: Tensor, length: int | Tensor) -> Tensor:
        """`start` of many queries, in sides of several lengths."""
        length = torch.as_tensor(length, device=query.device)
        middle = (query // self.stride * self.stride + self.stride // 2).minimum(length - 1)
        return (middle - self.window // 2).clamp(min=0).minimum((length - self.window).clamp(min=0))

    def sees(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each query and each key of the side [length, length]: whether it is seen, and the row of the table."""
        place = torch.arange(length, device=device)
        mate, first = place // self.dilation, place % self.dilation  # the pixels that share a remainder are a side
        lengths = (length - first + self.dilation - 1) // self.dilation
        from_start = mate[None, :] - self.starts(mate, lengths)[:, None]
        seen = (first[None, :] == first[:, None]) & (from_start >= 0) & (from_start < self.window)
        row = mate[None, :] - mate[:, None] + self.window - 1
        return seen, row.clamp(0, 2 * self.window - 2)


class Window(NamedTuple):
    """The windows of a map."""

    rows: Axis
    columns: Axis

    @property
    def size(self) -> tuple[int, int]:
        """(rows, columns) that the tables are made for."""
        return self.rows.window, self.columns.window

    def __str__(self) -> str:
        names = ("window", "window_stride", "window_dilation")
        pairs = zip(names, zip(*self, strict=True), (0, 1, 1), strict=True)
        return ", ".join(f"{name}={pair}" for name, pair, usual in pairs if set(pair) != {usual})

    @property
    def numbers(self) -> tuple[int, ...]:
        """The two windows, strides and dilations one after the other, as operators take them."""
        return tuple(number for pair in zip(*self, strict=True) for number in pair)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "Window | None":
        return cls(Axis(*numbers[0::2]), Axis(*numbers[1::2])) if numbers else None

    def keys(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) that a query sees on a map of height x width, at most."""
        return self.rows.keys(height), self.columns.keys(width)

    def covers(self, height: int, width: int) -> bool:
        return self.rows.covers(height) and self.columns.covers(width)


Sizes = int | tuple[int, int]


def make_window(window: Sizes | Window, stride: Sizes = 1, dilation: Sizes = 1) -> Window:
    """From what a person writes: a number for both sides, a pair (rows, columns), or the Window of another call."""
    if isinstance(window, Window):
        if (stride, dilation) != (1, 1):
            raise ValueError(f"{window} has a stride and a dilation of its own, got {stride=}, {dilation=}")
        return window
    pairs = [_pair(name, value) for name, value in (("", window), ("_stride", stride), ("_dilation", dilation))]
    axes = [Axis(*of_axis) for of_axis in zip(*pairs, strict=True)]
    for axis in axes:
        if axis.stride > axis.window:
            raise ValueError(
                f"window_stride must be at most the window, {axis.window}, so that every query sees itself, "
                f"got window_stride={stride}"
            )
    return Window(*axes)


def refuse_without_window(stride: Sizes, dilation: Sizes) -> None:
    """A ValueError for what only windows have."""
    for name, value in (("window_stride", stride), ("window_dilation", dilation)):
        if value != 1:
            raise ValueError(f"{name}={value} has no meaning without a window; pass window=K as well")


def _pair(name: str, value: Sizes) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(type(one) is int and one >= 1 for one in pair):
        hint = "; on a command line 7 or [7, 5]" if isinstance(value, str) else ""
        raise ValueError(f"window{name} must be a whole number from 1, or a pair (rows, columns), got {value!r}{hint}")
    if max(pair) > LARGEST:
        whole = "; a window as large as the map sees all of it" if not name else ""
        raise ValueError(f"window{name} must be at most {LARGEST}, got {value!r}{whole}")
    return pair


def middle_of(table: Tensor, length: int) -> Tensor:
    """The vectors of a window's table that a side of this length needs: [..., 2 length - 1, depth]."""
    spare = (table.shape[-2] + 1) // 2 - length
    return table[..., spare : table.shape[-2] - spare, :]


class Tiles(NamedTuple):
    """How a side is cut: `number` tiles of `size` queries, each with the `region` keys from `before` its first on."""

    number: int
    size: int
    before: int
    region: int


def cut(axis: Axis, length: int) -> Tiles:
    """Tiles of a side whose windows have a dilation of 1. All regions have one size and lie the same way about their
    tile, so that they are a sliding view of the padded map, whose gradient has one order of additions."""
    smallest = max(SMALLEST_TILE, 1 << (min(axis.window, length) - 1).bit_length())
    size = min(math.ceil(smallest / axis.stride) * axis.stride, length)
    firsts = range(0, length, size)
    lasts = [min(first + size, length) - 1 for first in firsts]
    before = max(first - axis.start(first, length) for first in firsts)
    after = max(axis.start(last, length) - first for first, last in zip(firsts, lasts, strict=True))
    return Tiles(len(firsts), size, before, before + after + min(axis.window, length))


Decomposed = Callable[..., Tensor]


def attend(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    window: Window,
    *,
    num_heads: int,
    key_channels: int,
    attend_decomposed: Decomposed,
) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv], through attend_decomposed."""
    down, across = window.rows.dilation, window.columns.dilation
    alone = Window(window.rows._replace(dilation=1), window.columns._replace(dilation=1))

    def attend_part(part: Tensor) -> Tensor:
        return _attend_tiles(part, rel_h, rel_w, alone, num_heads, key_channels, attend_decomposed)

    if down == across == 1:
        return attend_part(qkv)
    # Pixels that a dilation keeps apart never see each other: so many smaller maps.
    height, width = _known(qkv.shape[1]), _known(qkv.shape[2])
    rows = []
    for of_rows in _strands(height, down, max(1, MAPS_AT_ONCE // max(1, qkv.shape[0] * across))):
        lines = of_rows.cut(qkv, 1)
        columns = []
        for of_columns in _strands(width, across):
            maps = of_columns.cut(lines, 3).permute(0, 2, 4, 1, 3, 5)
            out = attend_part(maps.flatten(0, 2)).unflatten(0, maps.shape[:3])
            columns.append(out.permute(0, 3, 1, 4, 2, 5))
        rows.append(_interleave(columns, width, 3))
    return _interleave(rows, height, 1)


class Strands(NamedTuple):
    """Lines of a side that a dilation keeps apart: those from the `first` on, `number` of them beside each other, each
    with `length` pixels."""

    first: int
    number: int
    length: int
    dilation: int

    def cut(self, part: Tensor, dim: int) -> Tensor:
        """A side as [..., length, number, ...]."""
        whole = self.length * self.dilation
        part = _pad(part, dim, 0, whole - part.shape[dim])
        return part.unflatten(dim, (self.length, self.dilation)).narrow(dim + 1, self.first, self.number)


def _strands(length: int, dilation: int, at_once: int = LARGEST) -> list[Strands]:
    """All strands of a side, in groups of one length; the longer ones, which have a last pixel more, come first."""
    dilation = min(dilation, length)
    least, longer = divmod(length, dilation)
    groups = [(0, longer, least + 1), (longer, dilation, least)]
    return [
        Strands(first, min(at_once, end - first), pixels, dilation)
        for begin, end, pixels in groups
        for first in range(begin, end, at_once)
    ]


def _known(length: int) -> int:
    """A size of the map that is a number, not a symbol."""
    if torch.compiler.is_exporting() and not isinstance(length, int):
        raise RuntimeError("windows are cut into tiles for one height and width")
    return int(length)


def _interleave(parts: list[Tensor], length: int, dim: int) -> Tensor:
    """The strands of a side [..., pixels, strands, ...] beside each other again: [..., length, ...]."""
    longest = parts[0].shape[dim]
    widened = [_pad(part, dim, 0, longest - part.shape[dim]) for part in parts]
    return torch.cat(widened, dim + 1).flatten(dim, dim + 1).narrow(dim, 0, length)


def _attend_tiles(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    window: Window,
    num_heads: int,
    key_channels: int,
    attend_decomposed: Decomposed,
) -> Tensor:
    batch, height, width = qkv.shape[0], _known(qkv.shape[1]), _known(qkv.shape[2])
    down, across = cut(window.rows, height), cut(window.columns, width)
    q, k, v = split_heads(qkv, num_heads, key_channels)
    q = q * q.shape[-1] ** -0.5
    q = _pad(_pad(q, 2, 0, down.number * down.size - height), 3, 0, across.number * across.size - width)
    rows = _bias(q, rel_h, window.rows, down, height, 2)
    columns = _bias(q, rel_w, window.columns, across, width, 3)
    q, rows, columns = (_tiles(part, down, across) for part in (q, rows, columns))
    k, v = (_regions(part, down, across) for part in (k, v))
    out = attend_decomposed(q, k, v, rows, columns, scale=1.0)
    shape = batch, down.number, across.number, num_heads, down.size, across.size
    out = out.unflatten(0, shape[:3]).unflatten(4, shape[4:]).permute(0, 1, 4, 2, 5, 3, 6)
    return out.flatten(5).flatten(3, 4).flatten(1, 2)[:, :height, :width]


def _bias(q: Tensor, table: Tensor | None, axis: Axis, tiles: Tiles, length: int, dim: int) -> Tensor:
    """[batch, heads, rows, columns, region]: relative logits of a query for the lines of its tile's region, and
    OUT_OF_SIGHT for the lines beyond its window. `dim` is the one of q that the axis runs along."""
    seen, row = _of_tiles(axis, tiles, length, q.device)
    shape = [1, 1, 1, 1, tiles.region]
    shape[dim] = seen.shape[0]
    hidden = ~seen.view(shape)
    if table is None:
        logits = q.new_zeros(1).expand(*q.shape[:4], tiles.region)
    else:
        logits = relative_logits_by(q, table.to(q.dtype)[..., row, :], dim)
    return logits.masked_fill(hidden, OUT_OF_SIGHT.get(q.dtype, -1e30))


def _of_tiles(axis: Axis, tiles: Tiles, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each query of the tiles and each line of its region: whether it is seen, and the row of the table."""
    query = torch.arange(tiles.number * tiles.size, device=device)
    line = query[:, None] // tiles.size * tiles.size - tiles.before + torch.arange(tiles.region, device=device)
    query = query.clamp(max=length - 1)  # beyond the map: any that has a window, nobody looks at what comes of it
    start = axis.starts(query, length)[:, None]
    seen = (line >= start) & (line < start + axis.window) & (line >= 0) & (line < length)
    row = line - query[:, None] + axis.window - 1
    return seen, row.clamp(0, 2 * axis.window - 2)


def _tiles(part: Tensor, down: Tiles, across: Tiles) -> Tensor:
    """[batch, heads, rows, columns, depth] -> [batch * tiles, heads, queries of a tile, depth]."""
    part = part.unflatten(3, (across.number, across.size)).unflatten(2, (down.number, down.size))
    return part.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def _regions(part: Tensor, down: Tiles, across: Tiles) -> Tensor:
    """[batch, heads, height, width, depth] -> [batch * tiles, heads, keys of a region, depth]."""
    for dim, tiles in ((2, down), (3, across)):
        needed = (tiles.number - 1) * tiles.size + tiles.region
        part = _pad(part, dim, tiles.before, needed - tiles.before - part.shape[dim])
    part = part.unfold(2, down.region, down.size).unfold(3, across.region, across.size)
    return part.permute(0, 2, 3, 1, 5, 6, 4).flatten(4, 5).flatten(0, 2)


def _pad(part: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zeros along one dimension; a negative number takes off that many."""
    if before == after == 0:
        return part
    return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (before, after))
