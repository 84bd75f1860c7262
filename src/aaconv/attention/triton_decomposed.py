"""The decomposed kernels as functions of tensors: how a call is cut into programs, and their launches.

Queries, keys and values are [batch, heads, number, depth], read and written by their strides where those are aligned:
the packed projection of attend_2d is read as it is, and its gradient written packed. Others are copied first.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .heads import relative_logits_gradients
from .triton_launch import ALIGNMENT, Gpu, Launcher, gpu_at, gpu_of
from .triton_plan import ceil_div, padded, power_of_two

MOST_LEADING = 16
"""Keys without positions before those of the map: one small tile."""
KEY_COLUMNS = (64, 32, 16)
"""Columns of the map that a tile of keys may have."""


DEPTH_STEP = 16
"""What triton knows about a stride that is an argument is whether it is a multiple of 16."""


def is_aligned(*tensors: Tensor) -> bool:
    """Whether the kernels can take these as they are: depths and strides in whole steps, the depth side by side.

    Of others triton copies two bytes at a time, outside its pipeline. Such kernels of triton 3.6 gave wrong results and
    illegal accesses on an H200, while the same code is right in the interpreter.
    """
    for tensor in tensors:
        *strides, last = tensor.stride()
        whole = not any(size % DEPTH_STEP for size in (tensor.shape[-1], *strides))
        if last != 1 or not whole or tensor.data_ptr() % ALIGNMENT:
            return False
    return True


def pad_depth(tensor: Tensor) -> Tensor:
    """A copy that is aligned, with zeros behind the depth: they change no product."""
    *sizes, depth = tensor.shape
    copy = tensor.new_zeros((*sizes, ceil_div(depth, DEPTH_STEP) * DEPTH_STEP))
    copy[..., :depth] = tensor
    return copy


class Tile(NamedTuple):
    """Queries and keys of a tile, and triton's launch options. One stage is not among them: with a depth in two parts
    triton 3.6 then reads beyond its shared memory (illegal memory access on an H200)."""

    queries: int
    keys: int
    warps: int
    stages: int


def depth_parts(depth: int) -> tuple[int, int]:
    """Powers of two whose sum holds the depth, the second one 0 where it would not save anything: 80 is 64 + 16."""
    main = max(16, 1 << (depth.bit_length() - 1))
    if depth <= main:
        return main, 0
    tail = padded(depth - main)
    return (main, tail) if tail < main else (2 * main, 0)


def key_columns(width: int) -> int:
    """Columns of a strip of keys: as few as possible beyond the map, and few strips."""

    def cost(columns: int) -> float:
        strips = ceil_div(width, columns)
        return strips * columns * (1 + 0.1 * (strips - 1))

    return min(KEY_COLUMNS, key=cost)


def tiles(channels: int, pixels: int, gpu: Gpu) -> dict[str, Tile]:
    """Of every kernel, for heads of so many channels: swept on an H200. For GPUs without wgmma, which were not at hand,
    the tiles whose compiled kernels keep their numbers in registers and fit into 99 KiB of shared memory."""
    wide, small = channels > 96, pixels <= 256
    if gpu.has_wgmma:
        of_forward, of_queries = Tile(64, 64, 4, 3), Tile(64, 64, 4, 2 if wide else 3)
        of_keys = Tile(32 if small and not wide else 64, 64, 4, 2)
    else:
        of_forward = Tile(64, 64, 4, 2 if wide and gpu.shared_memory < 2**17 else 3)
        of_queries = Tile(64 if channels <= 64 else 32, 64, 4, 3) if channels <= 80 else Tile(64, 64, 8, 2)
        of_keys = Tile(32, 64, 4 if small and not wide else 8, 2)
    return {
        "attend_decomposed_forward": of_forward,
        "attend_decomposed_backward_queries": of_queries,
        "attend_decomposed_backward_keys": of_keys,
    }


class Decomposed:
    """One kind of call: its sizes, and the kernels once compiled."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        value_depth: int,
        height: int,
        width: int,
        leading: int,
        scale: float,
        dtype: torch.dtype,  # the kernels are compiled for it
        gpu: Gpu,
    ) -> None:
        self.batch, self.heads, self.queries, self.depth = shape
        self.value_depth, self.height, self.width, self.leading, self.scale = value_depth, height, width, leading, scale
        self.columns = key_columns(width)
        self.strips = ceil_div(width, self.columns)
        (main, tail), (v_main, v_tail) = depth_parts(self.depth), depth_parts(value_depth)
        self.parts = {
            "LEADING": leading,
            "LEAD": max(16, power_of_two(leading)),
            "D": self.depth,
            "MAIN": main,
            "TAIL": tail,
            "DV": value_depth,
            "V_MAIN": v_main,
            "V_TAIL": v_tail,
            "KEY_COLS": self.columns,
        }
        self.tiles = tiles(max(main + tail, v_main + v_tail), height * width, gpu)
        self.launchers: dict[Any, Launcher] = {}

    def launch(self, name: str, tensors: list[Tensor], strides: tuple[int, ...], *more: int) -> None:
        """Run a kernel; `strides` follow its tensors in its arguments, `more` come after all sizes."""
        if (name, strides) not in self.launchers:
            self.launchers[name, strides] = self._launcher(name)
        sizes = (self.heads, self.queries, self.height, self.width, self.scale)
        self.launchers[name, strides](tensors, (*strides, *sizes, *more))

    def _launcher(self, name: str) -> Launcher:
        from . import triton_decomposed_kernels

        kernel, tile = getattr(triton_decomposed_kernels, name), self.tiles[name]
        rows = max(1, tile.keys // self.columns)
        constants = self.parts | {"BLOCK_M": tile.queries, "KEY_ROWS": rows}
        constants["WHOLE"] = self.width % self.columns == 0 and self.height % rows == 0
        chosen = {known: constants[known] for known in kernel.arg_names if known in constants}
        if name == "attend_decomposed_backward_keys":
            tiles = ceil_div(self.height, rows) * self.strips + (self.leading > 0)
        else:
            tiles = ceil_div(self.queries, tile.queries)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return Launcher(kernel, self.batch * self.heads * tiles, chosen | options)


plan_decomposed = functools.lru_cache(maxsize=1024)(Decomposed)


def plan_of(q: Tensor, k: Tensor, v: Tensor, height: int, width: int, scale: float) -> Decomposed:
    leading = k.shape[2] - height * width
    return plan_decomposed(tuple(q.shape), v.shape[3], height, width, leading, scale, q.dtype, gpu_of(q))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    height: int,
    width: int,
    scale: float,
    into: tuple[Tensor, Tensor],
) -> None:
    """rows [batch * heads, queries, at least height] and columns alike, contiguous, of q's dtype. Fills `into`: the
    output [batch, heads, queries, value depth], with any strides but the last, and the log-sum-exp
    [batch * heads, 2, queries], in base 2 and in two parts."""
    plan, (out, lse) = plan_of(q, k, v, height, width, scale), into
    strides = (*_strides(q, k, v, out), rows.stride(1), columns.stride(1))
    plan.launch("attend_decomposed_forward", [q, k, v, rows, columns, out, lse], strides)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    out: Tensor,
    lse: Tensor,
    height: int,
    width: int,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Writes the gradients of q, k and v into `grads`, and gives those of rows and columns, laid out as they are."""
    plan = plan_of(q, k, v, height, width, scale)
    grad_q, grad_k, grad_v = grads
    grad_rows = rows.new_empty((plan.strips, *rows.shape))
    grad_columns, delta = torch.empty_like(columns), torch.empty_like(lse[:, 0])
    last = rows.stride(1), columns.stride(1)
    tensors = [q, k, v, rows, columns, out, lse, grad_out, grad_q, grad_rows, grad_columns, delta]
    strides = (*_strides(q, k, v, out, grad_out, grad_q), *last)
    plan.launch("attend_decomposed_backward_queries", tensors, strides, rows.numel())
    tensors = [q, k, v, rows, columns, lse, delta, grad_out, grad_k, grad_v]
    plan.launch("attend_decomposed_backward_keys", tensors, (*_strides(q, k, v, grad_out, grad_k, grad_v), *last))
    if plan.strips == 1:
        return grad_rows[0], grad_columns
    return grad_rows.sum(0, dtype=torch.float32).to(rows.dtype), grad_columns


LONGEST_LINE, MOST_SUMS, MOST_SUMS_OF_MMA = 64, 24576, 10240
"""Of a row of the map, and of the numbers of the tables' gradients that a program sums: what shared memory and
registers hold, where wgmma takes its operands from shared memory and where they are in registers. 128 x 128 with heads
of 128 would need 320 KiB. Seen in kernels compiled for sm_80, sm_89 and sm_90."""


class Relative:
    """Relative logits of one kind of call, from queries and tables, and the way back."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        height: int,
        width: int,
        per_head: bool,
        dtype: torch.dtype,  # the kernels are compiled for it
        table_dtype: torch.dtype,
        device: int | None,
    ) -> None:
        self.batch, self.heads, self.pixels, self.depth = shape
        self.height, self.width, self.per_head = height, width, per_head
        self.rows, self.columns = padded(height), padded(width)
        main, tail = depth_parts(self.depth)
        self.parts = {"D": self.depth, "MAIN": main, "TAIL": tail, "ROWS": self.rows, "TABLES_PER_HEAD": per_head}
        self.line = min(64, padded(max(height, width)))
        image_heads = self.batch * self.heads
        self.together = _together(self.line, self.heads, per_head)
        lines = height * ceil_div(width, self.line) + width * ceil_div(height, self.line)
        self.programs = image_heads // self.together * lines
        # Backward: a program a row of the map and a share of the image-heads, four times as many as fit the GPU.
        self.back_together = _together(self.columns, self.heads, per_head)
        self.groups = self.batch if per_head else image_heads // self.back_together
        owners = self.heads if per_head else 1
        here = gpu_at(device)
        self.splits = max(1, min(self.groups, ceil_div(4 * here.multiprocessors, height * owners)))
        self.back_programs = height * self.splits * owners
        sums = (self.rows + padded(2 * width - 1)) * (main + tail)
        self.fits_a_program = width <= LONGEST_LINE and sums <= (MOST_SUMS if here.has_wgmma else MOST_SUMS_OF_MMA)
        self.launchers: dict[Any, Launcher] = {}

    def logits(self, q: Tensor, rel_h: Tensor, rel_w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [batch, heads, pixels, depth] -> rows [batch * heads, pixels, padded height], columns alike."""
        rows = q.new_empty((self.batch * self.heads, self.pixels, self.rows))
        columns = q.new_empty((self.batch * self.heads, self.pixels, self.columns))
        constants = {"COLUMNS": self.columns, "LINE": self.line, "TOGETHER": self.together, "num_warps": 4}
        sizes = (self.rows, self.columns, self.heads, self.height, self.width, scale)
        arguments = (*_strides(q), *sizes)
        self._launch("relative_logits", self.programs, constants, [q, rel_h, rel_w, rows, columns], arguments)
        return rows, columns

    def gradients(
        self,
        q: Tensor,
        rel_h: Tensor,
        rel_w: Tensor,
        grad_rows: Tensor,
        grad_columns: Tensor,
        grad_q: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Adds the relative part to grad_q, and gives the gradients of the tables in float32."""
        if not self.fits_a_program:
            return self._gradients_by_products(q, rel_h, rel_w, grad_rows, grad_columns, grad_q, scale)
        part_h = rel_h.new_empty((self.back_programs, self.height, self.depth), dtype=torch.float32)
        part_w = rel_h.new_empty((self.back_programs, 2 * self.width - 1, self.depth), dtype=torch.float32)
        many = self.columns * self.depth >= 4096
        constants = {"OFFSETS": padded(2 * self.width - 1), "LINE": self.columns, "TOGETHER": self.back_together}
        sizes = (grad_rows.stride(1), grad_columns.stride(1), self.groups, self.heads, self.height, self.width)
        arguments = (*_strides(q, grad_q), *sizes, scale, self.splits)
        tensors = [q, rel_h, rel_w, grad_rows, grad_columns, grad_q, part_h, part_w]
        constants |= {"num_warps": 8 if many else 4}
        self._launch("relative_logits_backward", self.back_programs, constants, tensors, arguments)
        grad_h, grad_w = (torch.empty_like(table, dtype=torch.float32) for table in (rel_h, rel_w))
        vectors = (self.heads if self.per_head else 1) * (2 * self.height + 2 * self.width - 2)
        constants = {"D_PADDED": padded(self.depth), "AT_ONCE": 32, "num_warps": 4}
        arguments = (self.height, self.width, self.splits)
        self._launch("sum_tables", vectors, constants, [part_h, part_w, grad_h, grad_w], arguments)
        return grad_h, grad_w

    def _gradients_by_products(
        self,
        q: Tensor,
        rel_h: Tensor,
        rel_w: Tensor,
        grad_rows: Tensor,
        grad_columns: Tensor,
        grad_q: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The same by torch's matrix products, line by line of the map."""
        sizes = self.batch, self.heads, self.height, self.width, -1
        by_row, by_column = grad_rows.view(sizes)[..., : self.height], grad_columns.view(sizes)[..., : self.width]
        by_pixel = q.unflatten(2, (self.height, self.width))
        of_rows, grad_h = relative_logits_gradients(by_pixel, rel_h, by_row, 2)
        of_columns, grad_w = relative_logits_gradients(by_pixel, rel_w, by_column, 3)
        grad_q += ((of_rows.float() + of_columns) * scale).flatten(2, 3)
        return grad_h * scale, grad_w * scale

    def _launch(
        self, name: str, programs: int, constants: dict[str, Any], tensors: list[Tensor], scalars: tuple
    ) -> None:
        if (name, scalars) not in self.launchers:
            from . import triton_relative_kernels

            kernel = getattr(triton_relative_kernels, name)
            known = {key: value for key, value in self.parts.items() if key in kernel.arg_names}
            self.launchers[name, scalars] = Launcher(kernel, programs, known | constants)
        self.launchers[name, scalars](tensors, scalars)


plan_relative = functools.lru_cache(maxsize=1024)(Relative)


def _together(line: int, heads: int, per_head: bool) -> int:
    """Heads that share the vectors of a short line, up to 64 queries; those with tables of their own do not."""
    together = 1
    while not per_head and 2 * together * line <= 64 and heads % (2 * together) == 0:
        together *= 2
    return together


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])
