"""The fused backend: torch operators around the kernels of triton_kernels.py.

No quadratic tensor, no copies: the packed projection is read by its strides, the gradient written packed. Saved for
the backward: the inputs, the output and the log-sum-exp. No atomics, so every result is the same bits every time.
Products of bfloat16 and float16 accumulate in float32; those of float32 run in full float32 if
torch.get_float32_matmul_precision() is "highest" (torch's default), else in TF32.
"""

import importlib.util
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_DEPTH = 128
MAX_SIDE = 128
PROGRAMS = 1056
"""Programs the backward of the queries aims at: 8 for each of an H200's 132 multiprocessors."""
SCRATCH = 1.0
"""Most the scratch for relative logits may hold, in multiples of the input's elements."""
WINDOWED_ABOVE = 32
"""Relative logits of a query (height + width, padded) that are still kept in registers."""
TABLE_SIZES = {(8, 0): 2**16, (9, 0): 2**17, (10, 0): 2**17}
"""Bytes of padded relative tables that leave room for the rest in a multiprocessor's shared memory; else 2**15."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, and triton's launch options."""

    queries: int
    keys: int
    warps: int
    stages: int


def forward_tile(pixels: int, side: int, depth: int, itemsize: int) -> Tile:
    """pixels of the map, its longer side, the deeper of key and value heads padded, bytes of an element."""
    if itemsize == 4 or depth > 64:
        return Tile(32, 32, 4, 1)
    if pixels <= 64:
        return Tile(64, 64, 4, 1)
    if pixels <= 256:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 4, 2)


def query_tile(pixels: int, side: int, depth: int, itemsize: int) -> Tile:
    """The backward kernel of queries and tables. It reads back what it wrote: stages must stay 1."""
    if itemsize == 4 or depth > 64:
        return Tile(32, 32, 4, 1)
    if pixels <= 256:
        return Tile(64, 32, 4, 1)
    return Tile(64, 64, 4, 1)


def key_tile(pixels: int, side: int, depth: int, itemsize: int) -> Tile:
    """The backward kernel of keys and values."""
    if itemsize == 4 or depth > 64:
        return Tile(32, 32, 4, 1)
    return Tile(64, 64, 4, 1)


def small_tile(pixels: int, side: int, depth: int, itemsize: int) -> Tile | None:
    """The backward kernel that takes all keys at once, or None where the other two are to run."""
    if side > 16 or pixels > 64 or depth > 32 or itemsize == 4:
        return None
    return Tile(64, 64, 4, 1)


def why_not(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int
) -> str | None:
    """None if the kernels can take these arguments, else the reason."""
    depth = max(key_channels, qkv.shape[3] - 2 * key_channels) // num_heads
    if not HAS_TRITON:
        return "triton is not installed"
    if qkv.dtype not in DTYPES:
        return f"dtype {qkv.dtype} is not one of bfloat16, float16, float32"
    if depth > MAX_DEPTH:
        return f"a head of {depth} channels is larger than {MAX_DEPTH}"
    if max(qkv.shape[1], qkv.shape[2]) > MAX_SIDE:
        return f"a map of {qkv.shape[1]} x {qkv.shape[2]} is larger than {MAX_SIDE} x {MAX_SIDE}"
    if qkv.device.type == "cuda":
        major, minor = _capability(qkv.device.index or 0)
        if major < 8:
            return f"compute capability {major}.{minor} is below 8.0"
        table_size = 0 if rel_h is None else 2 * _padded(qkv.shape[1] + qkv.shape[2]) * _padded(depth) * qkv.itemsize
        if table_size > TABLE_SIZES.get((major, minor), 2**15):
            return f"relative tables of {table_size} bytes are too large for compute capability {major}.{minor}"
        return None
    if not INTERPRETED:
        return f"device {qkv.device.type} is not cuda (TRITON_INTERPRET=1 interprets the kernels on the cpu)"
    return "triton's interpreter has no products of bfloat16" if qkv.dtype == torch.bfloat16 else None


def attend(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    tables = None if rel_h is None or rel_w is None else torch.cat([rel_h, rel_w], dim=-2).to(qkv.dtype)
    return attend_forward(qkv, tables, num_heads, key_channels)[0]


@torch.library.custom_op("aaconv::attend_2d", mutates_args=())
def attend_forward(
    qkv: Tensor, tables: Tensor | None, num_heads: int, key_channels: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """qkv [batch, height, width, 2*dk + dv], tables ([heads,] 2*height - 1 + 2*width - 1, dk / heads)
    -> the output [batch, height, width, dv] and the base-2 log-sum-exp [batch, heads, height * width]."""
    from . import triton_kernels

    problem = _Problem(qkv, tables, num_heads, key_channels)
    out, lse = _empty_forward(qkv, num_heads, key_channels)
    tile = forward_tile(*problem.traits)
    chunk = problem.heads_at_a_time if problem.windowed else problem.image_heads
    scratch = qkv.new_empty(chunk * problem.relative_size if problem.windowed else 0)
    with problem.device():
        for first in range(0, problem.image_heads, max(1, chunk)):
            heads_now = min(chunk, problem.image_heads - first)
            if problem.windowed:
                _write_relative(triton_kernels, problem, scratch, first, heads_now)
            triton_kernels.attend_forward[(heads_now * -(-problem.pixels // tile.queries),)](
                problem.qkv,
                problem.tables,
                out,
                lse,
                scratch,
                first,
                **problem.map_constants,
                **problem.table_constants,
                **problem.tile_constants(tile),
                WINDOW=problem.window(tile),
            )
    return out, lse


@torch.library.custom_op("aaconv::attend_2d_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    qkv: Tensor,
    tables: Tensor | None,
    out: Tensor,
    lse: Tensor,
    num_heads: int,
    key_channels: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv, packed, and of the tables (empty if there are none)."""
    from . import triton_kernels

    problem = _Problem(qkv, tables, num_heads, key_channels)
    grad_qkv, grad_tables = _empty_backward(qkv, tables)
    grad_out = grad_out.contiguous()
    length = 2 * (problem.height + problem.width) - 2 if tables is not None else 0
    splits = _splits(problem, length) if problem.batch else 1
    partial = lse.new_empty((problem.batch, num_heads, splits, length, key_channels // num_heads))
    if problem.image_heads:
        launch = _backward_large if small_tile(*problem.traits) is None else _backward_small
        with problem.device():
            launch(triton_kernels, problem, out, lse, grad_out, grad_qkv, partial)
    if tables is not None:
        torch.sum(partial, (0, 1, 2) if tables.dim() == 2 else (0, 2), out=grad_tables)
    return grad_qkv, grad_tables


def _splits(problem: "_Problem", length: int) -> int:
    """How many programs share the queries of a head when they add up the tables' gradient, each with its own.

    All together are never larger than half the input, so that memory stays linear in the pixels.
    """
    if small_tile(*problem.traits) is not None or length == 0:
        return 1
    tiles = -(-problem.pixels // query_tile(*problem.traits).queries)
    fitting = problem.qkv[0].numel() // (2 * problem.num_heads * length * problem.map_constants["D"])
    return max(1, min(tiles, -(-PROGRAMS // problem.heads_at_a_time), fitting))


def _backward_small(kernels, problem, out, lse, grad_out, grad_qkv, partial) -> None:
    kernels.attend_backward_small[(problem.image_heads,)](
        problem.qkv,
        problem.tables,
        out,
        lse,
        grad_out,
        grad_qkv,
        partial,
        **problem.map_constants,
        **problem.table_constants,
        **problem.tile_constants(small_tile(*problem.traits)),
    )


def _backward_large(kernels, problem, out, lse, grad_out, grad_qkv, partial) -> None:
    chunk, splits = problem.heads_at_a_time, partial.shape[2]
    q_tile, k_tile = query_tile(*problem.traits), key_tile(*problem.traits)
    # the tables' gradient is relative_backward's then, or there is none, and query tiles are free
    q_splits = splits if problem.relative_size and not problem.windowed else -(-problem.pixels // q_tile.queries)
    rows, columns = problem.key_shape(k_tile.keys)
    key_tiles = -(-problem.height // rows) * -(-problem.width // columns)
    scratch = lse.new_empty(chunk * problem.relative_size, dtype=problem.qkv.dtype)
    grad_scratch = lse.new_empty(scratch.numel() if problem.windowed else 0)
    delta = lse.new_empty(chunk * problem.pixels)
    for first in range(0, problem.image_heads, chunk):
        heads_now = min(chunk, problem.image_heads - first)
        if problem.windowed:
            _write_relative(kernels, problem, scratch, first, heads_now)
        kernels.attend_backward_queries[(heads_now * q_splits,)](
            problem.qkv,
            problem.tables,
            out,
            lse,
            grad_out,
            grad_qkv,
            partial,
            delta,
            scratch,
            grad_scratch,
            first,
            **problem.map_constants,
            **problem.table_constants,
            **problem.tile_constants(q_tile),
            WINDOW=problem.window(q_tile),
            SPLITS=q_splits,
        )
        if problem.windowed:
            kernels.relative_backward[(heads_now * splits,)](
                problem.qkv,
                problem.tables,
                grad_qkv,
                partial,
                grad_scratch,
                first,
                **problem.relative_constants,
                DV=problem.map_constants["DV"],
                SCALE=problem.map_constants["SCALE"],
                SPLITS=splits,
            )
        kernels.attend_backward_keys[(heads_now * key_tiles,)](
            problem.qkv,
            lse,
            grad_out,
            grad_qkv,
            delta,
            scratch,
            first,
            **problem.map_constants,
            **problem.tile_constants(k_tile),
            WINDOW=_padded(rows + columns),
        )


def _write_relative(kernels, problem, scratch: Tensor, first: int, heads_now: int) -> None:
    constants = problem.relative_constants
    kernels.write_relative[(heads_now * -(-problem.pixels // constants["BLOCK_M"]),)](
        problem.qkv, problem.tables, scratch, first, **constants
    )


class _Problem:
    """One call's sizes, and the constants the kernels are specialised by."""

    def __init__(self, qkv: Tensor, tables: Tensor | None, num_heads: int, key_channels: int) -> None:
        self.batch, self.height, self.width, channels = qkv.shape
        self.pixels = self.height * self.width
        self.num_heads = num_heads
        self.image_heads = self.batch * num_heads
        span = (self.height - 1) * qkv.stride(1) + (self.width - 1) * qkv.stride(2) + channels
        # inside an image the kernels count in int32
        self.qkv = qkv if qkv.stride(3) == 1 and span < 2**31 else qkv.contiguous()
        self.tables = qkv if tables is None else tables.contiguous()
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        padded = {"D_PAD": _padded(depth), "DV_PAD": _padded(value_depth)}
        self.traits = (self.pixels, max(self.height, self.width), max(padded.values()), qkv.element_size())
        self.relative_size = self.pixels * (self.height + self.width) if tables is not None else 0
        # The scratch stays linear in the pixels: as many heads at a time as fit SCRATCH inputs.
        fitting = max(1, int(SCRATCH * qkv.numel()) // max(1, self.relative_size))
        launches = max(1, -(-self.image_heads // fitting))
        self.heads_at_a_time = max(1, -(-self.image_heads // launches))
        full = qkv.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.map_constants = {
            "STRIDE_B": self.qkv.stride(0),
            "STRIDE_H": self.qkv.stride(1),
            "STRIDE_W": self.qkv.stride(2),
            "HEADS": num_heads,
            "H": self.height,
            "W": self.width,
            "D": depth,
            "DV": value_depth,
            **padded,
            "RELATIVE": tables is not None,
            "SCALE": math.log2(math.e) / math.sqrt(depth),
            "PRECISION": "ieee" if full else "tf32",
        }
        self.table_constants = {
            "REL": _padded(self.height + self.width),
            "TABLES_PER_HEAD": tables is not None and tables.dim() == 3,
        }

    @property
    def windowed(self) -> bool:
        """Whether a query's relative logits are too many for registers, and go through scratch."""
        return self.table_constants["REL"] > WINDOWED_ABOVE and self.map_constants["RELATIVE"]

    def window(self, tile: Tile) -> int:
        """How many relative logits a key tile needs, padded; 0 where all are in registers."""
        return _padded(sum(self.key_shape(tile.keys))) if self.windowed else 0

    @property
    def relative_constants(self) -> dict[str, int]:
        """Of the two kernels that work on the relative logits alone."""
        names = ("STRIDE_B", "STRIDE_H", "STRIDE_W", "HEADS", "H", "W", "D", "D_PAD", "PRECISION")
        constants = {name: self.map_constants[name] for name in names}
        warps = 4 if self.table_constants["REL"] * constants["D_PAD"] <= 4096 else 8
        return {**constants, **self.table_constants, "BLOCK_M": 16, "num_warps": warps, "enable_fp_fusion": True}

    def tile_constants(self, tile: Tile) -> dict[str, int]:
        rows, columns = self.key_shape(tile.keys)
        return {
            "BLOCK_M": tile.queries,
            "KEY_ROWS": rows,
            "KEY_COLS": columns,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": True,  # the scale and the maximum enter a logit in one instruction
        }

    def key_shape(self, keys: int) -> tuple[int, int]:
        """Rows and columns of a key tile: the powers of two that pad the map least, then those that add up to least."""
        shapes = [(keys >> power, 1 << power) for power in range(keys.bit_length())]
        return min(shapes, key=lambda s: (-(-self.height // s[0]) * -(-self.width // s[1]), sum(s), s[0]))

    def device(self) -> torch.cuda.device:
        return torch.cuda.device(self.qkv.device if self.qkv.is_cuda else -1)


def _padded(size: int) -> int:
    """The power of two a matrix product can take."""
    return max(16, 1 << (size - 1).bit_length())


def _empty_forward(qkv: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = qkv.shape
    out = qkv.new_empty((batch, height, width, channels - 2 * key_channels))
    return out, qkv.new_empty((batch, num_heads, height * width), dtype=torch.float32)


def _empty_backward(qkv: Tensor, tables: Tensor | None) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty((0,) if tables is None else tables.shape)


@attend_forward.register_fake
def _(qkv: Tensor, tables: Tensor | None, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor]:
    return _empty_forward(qkv, num_heads, key_channels)


@attend_backward.register_fake
def _(grad_out, qkv, tables, out, lse, num_heads, key_channels) -> tuple[Tensor, Tensor]:
    return _empty_backward(qkv, tables)


def _save(ctx, inputs, output) -> None:
    qkv, tables, ctx.num_heads, ctx.key_channels = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(qkv, tables, out, lse)


def _gradients(ctx, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, tables, out, lse = ctx.saved_tensors
    grad_qkv, grad_tables = attend_backward(grad_out, qkv, tables, out, lse, ctx.num_heads, ctx.key_channels)
    return grad_qkv, None if tables is None else grad_tables, None, None


attend_forward.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.aaconv.attend_2d)
def _forward_flops(qkv_shape, tables_shape, num_heads, key_channels, *args, out_shape=None, **kwargs) -> int:
    """Multiplications and additions of q k^T, p v and the relative logits of every row and column."""
    batch, height, width, channels = qkv_shape
    pixels = height * width
    relative = 0 if tables_shape is None else key_channels * (height + width)
    return 2 * batch * pixels * (pixels * (channels - key_channels) + relative)


@register_flop_formula(torch.ops.aaconv.attend_2d_backward)
def _backward_flops(grad_shape, qkv_shape, tables_shape, out, lse, num_heads, key_channels, **kwargs) -> int:
    """Two products for each of the forward's, without the recomputed logits."""
    return 2 * _forward_flops(qkv_shape, tables_shape, num_heads, key_channels)


@torch.compiler.assume_constant_result
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
