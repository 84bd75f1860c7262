"""What an attention is made of, for one image, and how a page holds it.

An attention map [heads, HW, HW] is large, and its factors are small: the paper's equation makes any row of it from the
query of that pixel, all keys and the two tables. So these are kept, in 16 bits, and the page computes the rows. What
this costs in precision is measured on every map, against the network's own weights.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..attention.windows import Axis, Window
from .grid import Grid

TOLERANCE = 0.004
"""Of the largest weight of a row: beyond it 16 bits are not enough, and 32 are kept."""
NUMBERS = {"int16": "<i2", "float32": "<f4"}
Parts = dict[str, np.ndarray]
"""By name: q (scaled) [heads, queries, depth] and k [heads, keys, depth], of all blocks one after the other; and where
positions are relative, either tables, rel_h and rel_w [heads or 1, distances, depth], or what each query gives to the
rows and columns of its keys, rows [heads, queries, key rows] and columns."""


@dataclass(frozen=True)
class Factors:
    """One layer's attention for one image; `window`: that of an AAConv2d."""

    parts: Parts
    grid: Grid
    window: Window | None = None

    @property
    def heads(self) -> int:
        return len(self.parts["q"])

    @property
    def keys_seen(self) -> int:
        """By a query, at most."""
        return self.grid.keys_of_block if self.window is None else math.prod(self.window.keys(*self.grid.keys))

    def block_weights(self, head: int, block: int) -> np.ndarray:
        """The equation as the page computes it: [queries of the block, its keys]."""
        grid = self.grid
        own = slice(block * grid.queries_of_block, (block + 1) * grid.queries_of_block)
        keys = slice(block * grid.keys_of_block, (block + 1) * grid.keys_of_block)
        logits = self.parts["q"][head, own] @ self.parts["k"][head, keys].T
        placed = logits[:, grid.leading :].reshape(-1, *grid.keys)
        placed = placed + self._bias(head, own, 0)[:, :, None] + self._bias(head, own, 1)[:, None, :]
        logits[:, grid.leading :] = placed.reshape(len(placed), -1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _bias(self, head: int, own: slice, axis: int) -> np.ndarray:
        """What the queries of a block give to every row of keys, or to every column."""
        lines = self.parts.get(("rows", "columns")[axis])
        if lines is not None:
            return lines[head, own]
        place = np.indices(self.grid.queries)[axis].ravel()
        length = self.grid.keys[axis]
        around = self.window[axis] if self.window else Axis(length)
        seen, distance = (part.numpy() for part in around.sees(length, torch.device("cpu")))
        bias = np.zeros((len(place), length))
        table = self.parts.get(("rel_h", "rel_w")[axis])
        if table is not None:
            by_distance = self.parts["q"][head, own] @ table[min(head, len(table) - 1)].T
            bias = np.take_along_axis(by_distance, distance[place], axis=1)
        return np.where(seen[place], bias, -np.inf)

    def row(self, row: int, column: int) -> np.ndarray:
        """What the query in a cell of the map gives to all cells, of every head: [heads, cells of the keys' map]."""
        block, place = self.grid.place(row, column)
        weights = np.stack([self.block_weights(head, block)[place] for head in range(self.heads)])
        return self.grid.on_map(weights, block)


@dataclass(frozen=True)
class Packed:
    """Factors as text: one array after the other in base64; 16-bit numbers have one scale per head."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    scales: dict[str, list[float]]
    text: str
    error: float = 0.0
    """The largest difference between the page's weights and the network's, as a part of its row's largest weight."""
    focus: tuple[int, int] = (0, 0)
    """Row and column of the cell whose heads look most sharply,"""
    peak: float = 0.0
    """and how sharply: their largest weights on average, times the number of keys that it sees."""

    window: Window | None = None

    def unpack(self, grid: Grid) -> Factors:
        """The factors, as the page reads them."""
        numbers = np.frombuffer(base64.b64decode(self.text), NUMBERS[self.kind])
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + int(np.prod(shape))
            parts[name] = numbers[start:stop].reshape(shape) * np.array(self.scales[name])[:, None, None]
            start = stop
        return Factors(parts, grid, self.window)


def pack(factors: Factors, exact: Tensor) -> Packed:
    """In 16 bits, or in 32 where weights would come out too far from the exact ones, [blocks, heads, queries of a
    block, its keys]."""
    for kind in NUMBERS:
        packed = _pack(factors, kind)
        error = max(_errors(packed.unpack(factors.grid), exact))
        if error <= TOLERANCE:
            break
    row, column = factors.grid.query_cells()
    height, width = factors.grid.query_map
    peaks = exact.amax(-1).mean(1).flatten().double().cpu().numpy()
    peaks = np.where((row < height) & (column < width), peaks, 0.0)
    sharpest = int(peaks.argmax())
    focus = int(row[sharpest]), int(column[sharpest])
    return replace(packed, error=error, focus=focus, peak=float(peaks.max() * factors.keys_seen))


def _pack(factors: Factors, kind: str) -> Packed:
    scales, raw = {}, b""
    for name, part in factors.parts.items():
        scale = np.ones(len(part))
        if kind == "int16":
            scale = np.abs(part).max(axis=(1, 2)).clip(min=1e-30) / 32767
            part = np.rint(part / scale[:, None, None])
        scales[name] = scale.tolist()
        raw += part.astype(NUMBERS[kind]).tobytes()
    shapes = {name: part.shape for name, part in factors.parts.items()}
    return Packed(kind, shapes, scales, base64.b64encode(raw).decode(), window=factors.window)


def _errors(factors: Factors, exact: Tensor) -> Iterator[float]:
    """Of every head of every block: all weights at once can be gigabytes."""
    for block, head in np.ndindex(*exact.shape[:2]):
        right = exact[block, head].double().cpu().numpy()
        off = np.abs(factors.block_weights(head, block) - right)
        yield float((off.max(-1) / right.max(-1)).max())
