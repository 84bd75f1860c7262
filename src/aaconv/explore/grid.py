"""Where the queries and the keys of an attention lie on the image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Size = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """Blocks of queries, each with keys of its own; all sizes are (height, width).

    One block is a whole map. SAM's windows are blocks whose keys are their queries; a HaloNet's keys surround their
    block. What lies beyond `query_map` and `key_map`, the cells that the image has, is padding, which takes part.
    """

    blocks: Size
    queries: Size
    """Of a block,"""
    keys: Size
    """and its keys that have a place; `leading` ones, such as a class token's, stand before them and have none."""
    query_map: Size
    key_map: Size
    step: Size = (0, 0)
    """Key cells from the first key of a block to that of the next,"""
    halo: Size = (0, 0)
    """and how many the first block's keys begin above and left of the image."""
    leading: int = 0

    @classmethod
    def whole(cls, height: int, width: int) -> Grid:
        """Every pixel of a map attends to every other."""
        size = height, width
        return cls((1, 1), size, size, size, size)

    @property
    def number(self) -> int:
        """Of blocks."""
        return self.blocks[0] * self.blocks[1]

    @property
    def queries_of_block(self) -> int:
        return self.queries[0] * self.queries[1]

    @property
    def keys_of_block(self) -> int:
        return self.leading + self.keys[0] * self.keys[1]

    @property
    def weights(self) -> int:
        """Of one head."""
        return self.number * self.queries_of_block * self.keys_of_block

    def query_cells(self) -> np.ndarray:
        """Row and column on the map of every query, block by block: [2, queries]."""
        return self._cells(self.queries, self.queries, (0, 0))

    def key_cells(self) -> np.ndarray:
        """The same of every key that has a place."""
        return self._cells(self.keys, self.step, self.halo)

    def _cells(self, size: Size, step: Size, halo: Size) -> np.ndarray:
        """[2, blocks * cells of one]."""

        def of_axis(axis: int) -> Iterator[np.ndarray]:
            for block in np.ndindex(*self.blocks):
                yield block[axis] * step[axis] - halo[axis] + np.indices(size)[axis].ravel()

        return np.stack([np.concatenate(list(of_axis(axis))) for axis in (0, 1)])

    def place(self, row: int, column: int) -> tuple[int, int]:
        """The block of the query in a cell of the map, and its number within."""
        (down, y), (across, x) = divmod(row, self.queries[0]), divmod(column, self.queries[1])
        return down * self.blocks[1] + across, y * self.queries[1] + x

    def on_map(self, weights: np.ndarray, block: int) -> np.ndarray:
        """Weights [..., keys of the block] on the map: [..., cells of key_map]; what is not on it is left out."""
        number = self.keys[0] * self.keys[1]
        row, column = self.key_cells().reshape(2, self.number, number)[:, block]
        inside = (row >= 0) & (row < self.key_map[0]) & (column >= 0) & (column < self.key_map[1])
        shown = np.zeros((*weights.shape[:-1], self.key_map[0] * self.key_map[1]))
        shown[..., (row * self.key_map[1] + column)[inside]] = weights[..., self.leading :][..., inside]
        return shown
