"""Local attention by fused kernels: how a call is cut into programs, and their launches.

Memory is linear in the pixels: the inputs, the output, the log-sum-exp and the gradients, and what the kernels lay out
for each other, of as many images at a time as fit SCRATCH.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton_launch import Launcher, Piece, multiprocessors, pieces
from .triton_plan import SMALL_SCRATCH, ceil_div, padded, power_of_two, tables_of
from .windows import Window

MAX_DEPTH, MAX_WINDOW = 64, 32
SCRATCH = 2.0
"""Most the scratch may hold, in multiples of the input's bytes, where that is more than SMALL_SCRATCH bytes."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")
BLOCK = 64
"""Pixels of a program that goes over them one by one."""
BLOCK_OF_LINES = 16
"""Rows, or columns, whose relative logits the keys' kernel reads at once: no tile may have more."""


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
"""The fastest of sweeps on an H200, of windows of 7 and 13 on maps of 56 x 56, heads of 20/3 and 32/32."""
EXACT_TILE = Tile(16, 32, 2, 1)
"""Of all kernels in float32."""


class Cut(NamedTuple):
    """The sides of a tile of queries, and of the keys of a step."""

    tile_rows: int
    tile_columns: int
    key_rows: int
    key_columns: int


def cut(tile: Tile, lines: int, windows: tuple[int, int], shared: tuple[int, int]) -> Cut | None:
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
    """One kind of call: its sizes, the constants the kernels are specialised by, and the kernels once compiled."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        stride: int,
        dtype: torch.dtype,
        table_dimensions: int,
        table_dtype: torch.dtype,  # the kernels are compiled for it
        height: int,
        num_heads: int,
        key_channels: int,
        window: tuple[int, ...],
        full_precision: bool,
        backward: bool,
        device: int | None = None,
    ) -> None:
        self.batch, self.pixels, channels = shape
        self.height, self.width, self.heads = height, self.pixels // max(1, height), num_heads
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        exact, scale = dtype == torch.float32, math.log2(math.e) / math.sqrt(depth)
        values = max(8, power_of_two(value_depth))
        (self.windows, self.shared, self.apart) = window[0:2], window[2:4], window[4:6]
        self.per_head = table_dimensions == 3
        lines, self.tiles = 16, {name: EXACT_TILE if exact else tile for name, tile in TILES.items()}
        while not all(cuts := [cut(tile, lines, self.windows, self.shared) for tile in self.tiles.values()]):
            lines *= 2
        self.cuts = dict(zip(self.tiles, cuts, strict=True))
        self.constants: dict[str, Any] = {
            "STRIDE": stride,
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
        # Of a pixel of a head: keys, values and relative logits; queries and gradients of the output.
        self.sizes = (key, value, relative, *((key, value) if backward else ()))
        of_an_image = num_heads * (self.pixels + 1) * sum(self.sizes)
        room = max(SCRATCH * math.prod(shape), SMALL_SCRATCH / dtype.itemsize)
        launches = ceil_div(self.batch, max(1, int(room // max(1, of_an_image))))
        self.images_at_a_time = ceil_div(self.batch, max(1, launches))
        owners = num_heads if self.per_head else 1
        blocks = self.images_at_a_time * num_heads * ceil_div(self.pixels, BLOCK)
        self.splits = max(1, min(ceil_div(4 * multiprocessors(device), owners), blocks // owners))
        self.table_programs = owners * self.splits
        self.launchers: dict[tuple[str, int], Launcher] = {}

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch: whole images."""
        for first in range(0, self.batch, self.images_at_a_time):
            yield first * self.heads, min(self.images_at_a_time, self.batch - first) * self.heads

    def buffers(self, like: Tensor) -> list[Piece]:
        """Scratch for the images of one launch."""
        pixels = self.images_at_a_time * self.heads * (self.pixels + 1)
        return pieces(like, (pixels * size for size in self.sizes))

    def launch(self, name: str, heads: int, tensors: list[Tensor | Piece], first: int, *more: int) -> None:
        """Run a kernel for so many of the image-heads, from the first on; `more` follow the size of the map."""
        if (name, heads) not in self.launchers:
            self.launchers[name, heads] = self._launcher(name, heads)
        self.launchers[name, heads](tensors, (first, self.height, self.width, *more))

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
        tile = self.tiles[name]
        constants = self.constants | dict(zip(("TILE_H", "TILE_W", "KEY_ROWS", "KEY_COLS"), self.cuts[name], strict=True))
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


def why_not(depth: int, value_depth: int, window: Window) -> str | None:
    """None if the kernels can take heads and windows of these sizes, else the reason."""
    if max(depth, value_depth) > MAX_DEPTH:
        return f"a head of {max(depth, value_depth)} channels is larger than {MAX_DEPTH}, in windows"
    if max(window.size) > MAX_WINDOW:
        return f"a window of {window.size[0]} x {window.size[1]} is larger than {MAX_WINDOW} x {MAX_WINDOW}"
    return None


def prepare(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    window: Sequence[int],
    *,
    backward: bool = False,
) -> tuple[WindowPlan, Tensor, tuple[Tensor, Tensor]]:
    """The plan, and qkv [batch, pixels, 2*dk + dv] and the tables as the kernels take them."""
    batch, pixels, channels = qkv.shape
    apart = qkv.stride(1)
    if qkv.stride(2) != 1 or (batch > 1 and qkv.stride(0) != pixels * apart) or pixels * apart >= 2**31:
        qkv, apart = qkv.contiguous(), channels
    full = qkv.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    tables, dimensions = tables_of(qkv, rel_h, rel_w)
    sizes = height, num_heads, key_channels, tuple(window)
    kind = (batch, pixels, channels), apart, qkv.dtype, dimensions, tables[0].dtype, *sizes
    return plan_windows(*kind, full, backward, qkv.device.index if qkv.is_cuda else None), qkv, tables


def forward(plan: WindowPlan, qkv: Tensor, tables: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    """Fills out [batch, pixels, dv] and lse [batch * heads, 2, pixels]."""
    keys, values, relative = plan.buffers(qkv)
    for first, heads in plan.chunks():
        laid_out = [keys, keys, values, relative, values, lse]  # what the backward alone needs is not touched
        plan.launch("window_pack", heads, [qkv, *tables, out, lse, out, *laid_out], first)
        plan.launch("window_forward", heads, [qkv, keys, values, relative, out, lse], first)


def backward(
    plan: WindowPlan,
    grad_out: Tensor,
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grad_qkv: Tensor,
    grad_tables: Tensor,
) -> None:
    """Fills grad_qkv and grad_tables [..., 2*rows - 1 + 2*columns - 1, depth] in float32."""
    keys, values, relative, queries, grads = plan.buffers(qkv)
    delta = lse.new_empty(plan.images_at_a_time * plan.heads * plan.pixels)
    parts = []
    for first, heads in plan.chunks():
        laid_out = [queries, keys, values, relative, grads, delta]
        plan.launch("window_pack", heads, [qkv, *tables, out, lse, grad_out, *laid_out], first)
        tensors = [queries, keys, values, relative, lse, grads, delta, grad_qkv]
        plan.launch("window_backward_keys", heads, tensors, first)
        plan.launch("window_backward_queries", heads, tensors, first)
        if plan.constants["RELATIVE"]:
            part = lse.new_empty((plan.table_programs, 2, plan.constants["OFFSETS"], plan.constants["D_PAD"]))
            tensors = [qkv, *tables, relative, grad_qkv, part]
            plan.launch("window_backward_tables", heads, tensors, first, heads, plan.splits)
            parts.append(part)
    if plan.constants["RELATIVE"]:
        _sum_tables(plan, parts, grad_tables)


def _sum_tables(plan: WindowPlan, parts: list[Tensor], grad_tables: Tensor) -> None:
    owners = plan.heads if plan.per_head else 1
    total = torch.stack([part.unflatten(0, (owners, plan.splits)).sum(1) for part in parts]).sum(0)
    rows, columns = (2 * window - 1 for window in plan.windows)
    grad = torch.cat([total[:, 0, :rows], total[:, 1, :columns]], 1)[..., : plan.constants["D"]]
    grad_tables.copy_(grad if plan.per_head else grad[0])
