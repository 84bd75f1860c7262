"""Local attention by fused kernels: how a call is cut into programs, and their launches.

Memory is linear in the pixels: the inputs, the output, the log-sum-exp and the gradients, and what the kernels lay out
for each other, of as many images at a time as leave all that a call holds within MEMORY.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .triton_launch import Launcher, Program, Step, gpu_at
from .triton_plan import ceil_div, padded, power_of_two, scratch_of_sums, sum_steps, table_sums
from .windows import Window

MAX_DEPTH, MAX_WINDOW = 64, 32
MEMORY, SMALL_SCRATCH = 3.9, 2**26
"""Most that a call holds, in multiples of its input, all inputs, gradients and results included. What they leave is
the scratch's, or these bytes where that is more, or what one image takes: a batch of 1 may hold more."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")
BLOCK_OF_LINES = 16
"""Rows, or columns, whose relative logits the keys' kernel reads at once: no tile may have more. Of half as many it
reads both at once."""
MOST_LINES = 128
"""Rows, or columns, for which a pixel has a relative logit: of windows up to MAX_WINDOW."""
TABLE_PROGRAMS = 8
"""Programs per multiprocessor that sum the tables' gradients; each has a part of its own."""
TABLE_SHARE = 1 / 16
"""Of the input's bytes: where a part for every row of the map is more, programs take several rows. All programs above
have a part in any case."""
TAIL = 16
"""Elements that the last channels of a small head's key share with its values."""


class Tile(NamedTuple):
    """Queries of a program and keys of a step (in the keys' kernel the other way round), and triton's launch options.
    At most 2 warps, for the reason of triton_tiles.Tile."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


TILES = {
    "window_forward": Tile(32, 32, 1, 3, 128),
    "window_backward_queries": Tile(16, 32, 1, 3),
    "window_backward_keys": Tile(32, 32, 1, 3),
}
"""Of small heads, whose keys and values share a row. From a sweep on an H200, of windows of 7 and 13 on 32 maps of
56 x 56. Tiles of 64 keys with two warps were 6 and 16 % faster, and have not gone through tests/gpu."""
LARGER_TILES = {
    "window_forward": Tile(32, 32, 1, 3, 168),
    "window_backward_queries": Tile(16, 32, 1, 3),
    "window_backward_keys": Tile(32, 32, 1, 3),
}
"""Of all other heads. Among the fastest of one short sweep on an H200, of windows of 7 and 13 on maps of 56 x 56, heads
of 20/3 and 32/32, before keys and values shared a row."""
WARPS = {"window_pack": 2, "window_backward_tables": 1}
"""Of the kernels that have no tiles."""
EXACT_TILE = Tile(16, 32, 2, 1)
"""Of all kernels in float32."""


class Cut(NamedTuple):
    """The sides of a tile of queries, and of the keys of a step."""

    tile_rows: int
    tile_columns: int
    key_rows: int
    key_columns: int


def cut(tile: Tile, lines: tuple[int, int], windows: tuple[int, ...], shared: tuple[int, ...]) -> Cut | None:
    """The tile of so many queries that looks at the fewest keys. All columns that it looks at are in a step, and no two
    rows or columns that it looks at are so many `lines` apart; None if there is no such tile."""
    found = []
    for columns in (1, 2, 4, 8, 16):
        key_columns = max(8, power_of_two(_span(columns, windows[1], shared[1])))
        one = Cut(tile.queries // columns, columns, max(1, tile.keys // key_columns), key_columns)
        if not 1 <= one.tile_rows <= BLOCK_OF_LINES or key_columns > lines[1]:
            continue
        if _rows_looked_at(one, windows, shared) <= lines[0]:
            found.append(one)
    return min(found, key=lambda one: _rows_looked_at(one, windows, shared) * one.key_columns, default=None)


def cut_all(
    tiles: dict[str, Tile], windows: tuple[int, ...], shared: tuple[int, ...]
) -> tuple[tuple[int, int], dict[str, Cut]]:
    """The fewest lines, of rows and of columns, for which all kernels have a tile, and the tiles; of equally few lines
    those whose tiles look at fewer keys."""
    powers = [BLOCK_OF_LINES << n for n in range((MOST_LINES // BLOCK_OF_LINES).bit_length())]
    best: tuple[Any, ...] | None = None
    for lines in sorted(((rows, columns) for rows in powers for columns in powers), key=sum):
        if best is not None and sum(lines) > best[0][0]:
            break
        cuts = {name: cut(tile, lines, windows, shared) for name, tile in tiles.items()}
        known = {name: one for name, one in cuts.items() if one is not None}
        if len(known) < len(tiles):
            continue
        looked_at = sum(_rows_looked_at(one, windows, shared) * one.key_columns for one in known.values())
        if best is None or (sum(lines), looked_at) < best[0]:
            best = (sum(lines), looked_at), lines, known
    assert best is not None, (tiles, windows, shared)
    return best[1], best[2]


def _rows_looked_at(found: Cut, windows: tuple[int, ...], shared: tuple[int, ...]) -> int:
    """By a tile whose first row is a multiple of the rows of a step."""
    span = _span(found.tile_rows, windows[0], shared[0]) + found.key_rows - 1
    return ceil_div(span, found.key_rows) * found.key_rows


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
        (self.windows, self.shared, self.apart) = window[0:2], window[2:4], window[4:6]
        self.per_head = table_dimensions == 3
        operands = layout(depth, value_depth, exact)
        tiles = TILES if operands["JOINT"] else LARGER_TILES
        self.tiles = {name: EXACT_TILE if exact else tile for name, tile in tiles.items()}
        lines, self.cuts = cut_all(self.tiles, self.windows, self.shared)
        self.constants: dict[str, Any] = {
            "STRIDE": strides[1],
            "HEADS": num_heads,
            "D": depth,
            "DV": value_depth,
            "D_PAD": padded(depth),
            "LINES_H": lines[0],
            "LINES_W": lines[1],
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
            "ROW_BLOCK": min(64, padded(self.width)),
        }
        self.constants |= operands
        for name, pair in (("WINDOW", self.windows), ("SHARED", self.shared), ("APART", self.apart)):
            self.constants |= {f"{name}_H": pair[0], f"{name}_W": pair[1]}
        # Elements of a pixel of a head; of what the backward alone needs the forward has names, and joint rows have
        # names for their second part.
        keys, values = self.constants["KEY_STRIDE"], 0 if self.constants["JOINT"] else self.constants["VALUE_STRIDE"]
        self.sizes = {"keys": keys, "values": values, "relative": sum(lines)}
        self.sizes |= {"queries": keys, "grads": values} if backward else {}
        self.backward, self.itemsize = backward, dtype.itemsize
        of_tables = (*((num_heads,) if self.per_head else ()), 2 * sum(self.windows) - 2, depth)
        wanted, heads = TABLE_PROGRAMS * gpu_at(device).multiprocessors, num_heads if self.per_head else 1
        first_rows = self._first_rows(ceil_div(wanted, heads), 4 * math.prod(of_tables))
        self.constants["MANY_ROWS"] = first_rows < self.height
        owners = first_rows * heads
        self.splits = max(1, wanted // owners)
        partial = 4 * self.splits * first_rows * math.prod(of_tables)
        self.images_at_a_time = self._images_at_a_time(partial if table_dimensions else 0)
        blocks = self.images_at_a_time * num_heads * ceil_div(self.width, self.constants["ROW_BLOCK"])
        self.splits = max(1, min(self.splits, blocks // heads))
        self.table_programs = owners * self.splits
        needs_delta = backward and not self.constants["DELTA"]
        self.deltas = self.images_at_a_time * num_heads * self.pixels if needs_delta else 0
        parts = min(self.height, first_rows) * self.splits if self.batch else 0
        self.sums = table_sums(parts, 1, 1, math.prod(of_tables)) if table_dimensions and backward else ()

    @property
    def _bytes_of_input(self) -> int:
        channels = self.heads * (2 * self.constants["D"] + self.constants["DV"])
        return self.batch * self.pixels * channels * self.itemsize

    def _first_rows(self, least: int, of_a_row: int) -> int:
        """Rows of the map with a part of the tables' gradients, of so many bytes each, which later rows are added to:
        all, or where that is a large share of the input as many as it may be or the `least`."""
        most = min(self.height, max(least, int(TABLE_SHARE * self._bytes_of_input / of_a_row)))
        return max(1, ceil_div(self.height, max(1, ceil_div(self.height, max(1, most)))))

    def _images_at_a_time(self, of_tables: int) -> int:
        """Of equal launches as few as have room for their scratch beside what the call holds, and parts of tables."""
        of_input, of_output = self._bytes_of_input, self.batch * self.pixels * self.itemsize * self.value_channels
        log_sums = 8 * self.image_heads * self.pixels
        held = 2 * (of_input + of_output) + log_sums + of_tables if self.backward else of_input + of_output + log_sums
        room = max(MEMORY * of_input - held, SMALL_SCRATCH)
        of_an_image = self.heads * (self.pixels + 1) * sum(self.sizes.values()) * self.itemsize
        of_an_image += 0 if self.constants["DELTA"] or not self.backward else 4 * self.heads * self.pixels
        launches = ceil_div(self.batch, max(1, int(room // max(1, of_an_image))))
        return max(1, ceil_div(self.batch, max(1, launches)))  # of an empty batch too

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch: whole images."""
        for first in range(0, self.batch, self.images_at_a_time):
            yield first * self.heads, min(self.images_at_a_time, self.batch - first) * self.heads

    @functools.cached_property
    def program(self) -> Program:
        """All kernels of the call, which are compiled when it first runs."""
        pixels = self.images_at_a_time * self.heads * (self.pixels + 1)
        scratch = {name: pixels * size or 16 for name, size in self.sizes.items()}
        if not self.backward:  # `window_pack` has names for these, and does not touch them
            scratch |= dict.fromkeys(("grad_out", "queries", "grads"), 16)
        exact = {"delta": self.deltas or 16} | scratch_of_sums(self.sums)
        return Program([*self._steps(), *sum_steps(self.sums)], scratch, self.itemsize, exact)

    def _steps(self) -> Iterator[Step]:
        launchers: dict[tuple[str, int], Launcher] = {}
        for chunk, (first, heads) in enumerate(self.chunks()):
            for name in self.kernels:
                if (name, heads) not in launchers:
                    launchers[name, heads] = self._launcher(name, heads)
                more = (heads, chunk, self.splits) if name == "window_backward_tables" else ()
                yield Step(launchers[name, heads], (first, self.height, self.width, *more))

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
            return self.constants | {"num_warps": WARPS[name], "num_stages": 1}
        tile, sides = self.tiles[name], ("TILE_H", "TILE_W", "KEY_ROWS", "KEY_COLS")
        constants = self.constants | dict(zip(sides, self.cuts[name], strict=True))
        constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
        return constants | ({} if tile.registers is None else {"maxnreg": tile.registers})

    def programs(self, name: str, heads: int) -> int:
        if name == "window_backward_tables":
            return self.table_programs
        if name == "window_pack":
            line = self.constants["LINE"]
            return heads * max(self.height * ceil_div(self.width, line), self.width * ceil_div(self.height, line))
        programs = heads
        for length, apart, tile in zip((self.height, self.width), self.apart, self.cuts[name][:2], strict=True):
            programs *= min(apart, length) * ceil_div(ceil_div(length, apart), tile)
        return programs


def layout(depth: int, value_depth: int, exact: bool) -> dict[str, Any]:
    """How `window_pack` lays out keys and values, see there."""
    values = max(8, power_of_two(value_depth))
    main = 1 << (depth.bit_length() - 1)
    if not exact and main >= TAIL and depth - main + 3 + value_depth + 2 <= TAIL:
        sizes = {"KEY": main, "VALUE": TAIL, "V_OUT": TAIL, "KEY_STRIDE": main + TAIL, "VALUE_STRIDE": main + TAIL}
        sizes |= {"VALUE_AT": depth - main + 3}
        return sizes | dict.fromkeys(("JOINT", "ONES", "LOG_SUM", "DELTA"), True)
    key, value = padded(depth), max(16, values)
    return {
        "JOINT": False,
        "KEY": key,
        "VALUE": value,
        "V_OUT": values,
        "KEY_STRIDE": key,
        "VALUE_STRIDE": value,
        "VALUE_AT": 0,
        "ONES": value_depth < values,
        # Whether there is room beside keys and values for what is taken off.
        "LOG_SUM": not exact and depth + 3 <= key,
        "DELTA": not exact and value_depth + 2 <= value,
    }


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
