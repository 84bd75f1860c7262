"""Local attention by fused kernels: how a call is cut into programs, and their launches.

Memory is linear in the pixels: the inputs, the output, the log-sum-exp and the gradients, and what the kernels lay out
for each other, of as many images at a time as fit SCRATCH.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .triton_launch import Launcher, Program, gpu_at
from .triton_plan import SMALL_SCRATCH, ceil_div, padded, power_of_two, two_steps
from .windows import Window

MAX_DEPTH, MAX_WINDOW = 64, 32
SCRATCH = 2.0
"""Most the scratch may hold, in multiples of the input's bytes, where that is more than SMALL_SCRATCH bytes."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")
BLOCK = 64
"""Pixels of a program that goes over them one by one."""
BLOCK_OF_LINES = 16
"""Rows, or columns, whose relative logits the keys' kernel reads at once: no tile may have more."""
MOST_LINES = 128
"""Rows, or columns, for which a pixel has a relative logit: of windows up to MAX_WINDOW."""


class Tile(NamedTuple):
    """Queries of a program and keys of a step (in the keys' kernel the other way round), and triton's launch options.
    At most 2 warps, for the reason of triton_tiles.Tile."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


TILES = {
    "window_forward": Tile(32, 32, 1, 3, 168),
    "window_backward_queries": Tile(16, 32, 1, 3),
    "window_backward_keys": Tile(32, 32, 1, 3),
}
"""Among the fastest of one short sweep on an H200, of windows of 7 and 13 on maps of 56 x 56, heads of 20/3 and 32/32,
before the last change of the layout."""
EXACT_TILE = Tile(16, 32, 2, 1)
"""Of all kernels in float32."""


class Cut(NamedTuple):
    """The sides of a tile of queries, and of the keys of a step."""

    tile_rows: int
    tile_columns: int
    key_rows: int
    key_columns: int


def cut(tile: Tile, lines: int, windows: tuple[int, ...], shared: tuple[int, ...]) -> Cut | None:
    """The tile of so many queries that looks at the fewest keys. All columns that it looks at are in a step, and no two
    rows or columns that it looks at are so many `lines` apart; None if there is no such tile."""

    def rows_looked_at(found: Cut) -> int:
        # The first is a multiple of the rows of a step.
        span = _span(found.tile_rows, windows[0], shared[0]) + found.key_rows - 1
        return ceil_div(span, found.key_rows) * found.key_rows

    found = []
    for columns in (1, 2, 4, 8, 16):
        key_columns = max(8, power_of_two(_span(columns, windows[1], shared[1])))
        found.append(Cut(tile.queries // columns, columns, max(1, tile.keys // key_columns), key_columns))
    fitting = (
        one
        for one in found
        if one.key_columns <= lines and rows_looked_at(one) <= lines and 1 <= one.tile_rows <= BLOCK_OF_LINES
    )
    return min(fitting, key=lambda one: rows_looked_at(one) * one.key_columns, default=None)


def _span(queries: int, window: int, shared: int) -> int:
    """Keys along a side that so many neighbours see."""
    return window + ceil_div(queries - 1, shared) * shared


class WindowPlan:
    """One kind of call in windows: what triton_plan.Plan is for global attention."""

    is_wide = False

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        table_dimensions: int,
        table_dtype: torch.dtype,  # the kernels are compiled for it
        height: int,
        num_heads: int,
        key_channels: int,
        full_precision: bool,
        backward: bool,
        device: int | None,
        window: tuple[int, ...],
    ) -> None:
        self.batch, self.pixels, channels = shape
        self.height, self.width, self.heads = height, self.pixels // max(1, height), num_heads
        self.image_heads, self.value_channels = self.batch * num_heads, channels - 2 * key_channels
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        exact, scale = dtype == torch.float32, math.log2(math.e) / math.sqrt(depth)
        values = max(8, power_of_two(value_depth))
        (self.windows, self.shared, self.apart) = window[0:2], window[2:4], window[4:6]
        self.per_head = table_dimensions == 3
        lines, self.cuts = BLOCK_OF_LINES // 2, dict[str, Cut]()
        self.tiles = {name: EXACT_TILE if exact else tile for name, tile in TILES.items()}
        while len(self.cuts) < len(self.tiles):
            lines *= 2
            cuts = {name: cut(tile, lines, self.windows, self.shared) for name, tile in self.tiles.items()}
            self.cuts = {name: found for name, found in cuts.items() if found is not None}
        self.constants: dict[str, Any] = {
            "STRIDE": strides[1],
            "HEADS": num_heads,
            "D": depth,
            "DV": value_depth,
            "D_PAD": padded(depth),
            "V_PAD": max(16, values),
            "V_OUT": values,
            "ONES": value_depth < values,
            "LINES": lines,
            "LINE": min(64, padded(max(self.height, self.width))),
            "OFFSETS": padded(2 * max(self.windows) - 1),
            "RELATIVE": table_dimensions > 0,
            "TABLES_PER_HEAD": self.per_head,
            # In half precision the keys bring the factor of the exponent; in float32 it would cost them a digit.
            "KEY_SCALE": 1.0 if exact else scale,
            "SCALE": scale if exact else 1.0,
            "LOGIT_SCALE": 1 / math.sqrt(depth),
            "EXACT": exact,
            "PRECISION": "ieee" if exact and full_precision else "tf32",
            # bfloat16 has float32's range: nothing is taken off the logits, unless a sum is out of these bounds.
            "ONLINE": dtype != torch.bfloat16,
            "SMALLEST_SUM": 1e-20,
            "LARGEST_SUM": 1e20,
            "BACKWARD": backward,
            # Finite, because products spread it with zeros: far below any logit, within the dtype.
            "OUT": -60000.0 if dtype == torch.float16 else -1e30,
            # Whether there is room beside keys and values for what is taken off.
            "LOG_SUM": not exact and depth + 3 <= padded(depth),
            "DELTA": not exact and value_depth + 2 <= max(16, values),
            "BLOCK": BLOCK,
        }
        for name, pair in (("WINDOW", self.windows), ("SHARED", self.shared), ("APART", self.apart)):
            self.constants |= {f"{name}_H": pair[0], f"{name}_W": pair[1]}
        key, value, relative = self.constants["D_PAD"], self.constants["V_PAD"], 2 * lines
        # Elements of a pixel of a head; of what the backward alone needs the forward has names.
        self.sizes = {"keys": key, "values": value, "relative": relative}
        self.sizes |= {"queries": key, "grads": value} if backward else {}
        self.backward, self.itemsize = backward, dtype.itemsize
        of_an_image = num_heads * (self.pixels + 1) * sum(self.sizes.values())
        room = max(SCRATCH * math.prod(shape), SMALL_SCRATCH / dtype.itemsize)
        launches = ceil_div(self.batch, max(1, int(room // max(1, of_an_image))))
        self.images_at_a_time = max(1, ceil_div(self.batch, max(1, launches)))  # of an empty batch too
        needs_delta = backward and not self.constants["DELTA"]
        self.deltas = self.images_at_a_time * num_heads * self.pixels if needs_delta else 0
        owners = num_heads if self.per_head else 1
        blocks = self.images_at_a_time * num_heads * ceil_div(self.pixels, BLOCK)
        self.splits = max(1, min(ceil_div(4 * gpu_at(device).multiprocessors, owners), blocks // owners))
        self.table_programs = owners * self.splits
        self.partial_shape, self.partial_sums = self._partial_sums(depth, table_dimensions)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch: whole images."""
        for first in range(0, self.batch, self.images_at_a_time):
            yield first * self.heads, min(self.images_at_a_time, self.batch - first) * self.heads

    def _partial_sums(self, depth: int, table_dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the parts of the tables' gradient, and the dimensions to sum one after the other."""
        if not table_dimensions:
            return (0,), ()
        parts = len(list(self.chunks())) * self.splits
        first = two_steps(parts) or (parts,)
        of_tables = (2 * sum(self.windows) - 2, depth)
        return (*first, *((self.heads,) if self.per_head else ()), *of_tables), (0,) * len(first)

    @functools.cached_property
    def program(self) -> Program:
        """All kernels of the call, which are compiled when it first runs."""
        pixels = self.images_at_a_time * self.heads * (self.pixels + 1)
        scratch = {name: pixels * size for name, size in self.sizes.items()}
        if not self.backward:  # `window_pack` has names for these, and does not touch them
            scratch |= dict.fromkeys(("grad_out", "queries", "grads"), 16)
        if not self.deltas:
            scratch["delta"] = 16
        return Program(self._steps(), scratch, self.itemsize)

    def _steps(self) -> Iterator[tuple[Launcher, tuple[int, ...]]]:
        launchers: dict[tuple[str, int], Launcher] = {}
        for chunk, (first, heads) in enumerate(self.chunks()):
            for name in self.kernels:
                if (name, heads) not in launchers:
                    launchers[name, heads] = self._launcher(name, heads)
                more = (heads, chunk * self.splits, self.splits) if name == "window_backward_tables" else ()
                yield launchers[name, heads], (first, self.height, self.width, *more)

    @property
    def kernels(self) -> list[str]:
        """Their names, in the order in which they count on each other."""
        if not self.backward:
            return ["window_pack", "window_forward"]
        last = ["window_backward_tables"] if self.constants["RELATIVE"] else []
        return ["window_pack", "window_backward_keys", "window_backward_queries", *last]

    def _launcher(self, name: str, heads: int) -> Launcher:
        from . import triton_window_backward, triton_window_kernels

        kernel = getattr(triton_window_kernels, name, None) or getattr(triton_window_backward, name)
        constants = self.launch_constants(name)
        chosen = {known: constants[known] for known in kernel.arg_names if known in constants}
        options = {option: constants[option] for option in OPTIONS if option in constants}
        return Launcher(kernel, self.programs(name, heads), chosen | options)

    def launch_constants(self, name: str) -> dict[str, Any]:
        """What a kernel is specialised by, and triton's options."""
        if name not in self.tiles:
            return self.constants | {"num_warps": 2, "num_stages": 1}
        tile, sides = self.tiles[name], ("TILE_H", "TILE_W", "KEY_ROWS", "KEY_COLS")
        constants = self.constants | dict(zip(sides, self.cuts[name], strict=True))
        constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
        return constants | ({} if tile.registers is None else {"maxnreg": tile.registers})

    def programs(self, name: str, heads: int) -> int:
        if name == "window_backward_tables":
            return self.table_programs
        if name == "window_pack":
            line = self.constants["LINE"]
            return heads * (self.height * ceil_div(self.width, line) + self.width * ceil_div(self.height, line))
        programs = heads
        for length, apart, tile in zip((self.height, self.width), self.apart, self.cuts[name][:2], strict=True):
            programs *= min(apart, length) * ceil_div(ceil_div(length, apart), tile)
        return programs


plan_windows = functools.lru_cache(maxsize=1024)(WindowPlan)


def why_not(shape: tuple[int, ...], depth: int, value_depth: int, window: Window) -> str | None:
    """None if the kernels can take a qkv of this shape, and heads and windows of these sizes, else the reason."""
    _, height, width, channels = shape
    if max(depth, value_depth) > MAX_DEPTH:
        return f"a head of {max(depth, value_depth)} channels is larger than {MAX_DEPTH}, in windows"
    if max(window.size) > MAX_WINDOW:
        return f"a window of {window.size[0]} x {window.size[1]} is larger than {MAX_WINDOW} x {MAX_WINDOW}"
    # Not asked of symbols: torch.export would take it for a bound.
    if isinstance(height * width, int) and height * width * max(channels, 2 * MOST_LINES) >= 2**31:
        return f"a map of {height} x {width} with {channels} channels is larger than int32 counts, in windows"
    return None
