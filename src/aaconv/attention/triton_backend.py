"""The fused backend: torch operators around the kernels of triton_kernels.py.

No quadratic tensor, no copies: the packed projection is read by its strides, the gradient written packed. Saved for
the backward: the inputs, the output and the log-sum-exp. No atomics, so every result is the same bits every time.
Products of bfloat16 and float16 accumulate in float32; those of float32 run in full float32 if
torch.get_float32_matmul_precision() is "highest" (torch's default), else in TF32.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_DEPTH = 128
MAX_SIDE = 128
PROGRAMS = 1056
"""Programs that add up the tables' gradient: 8 for each of an H200's 132 multiprocessors."""
SCRATCH = 2.0
"""Most the scratch for relative logits may hold, in multiples of the input's elements."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, and triton's launch options.

    At most 2 warps: with 4, triton 3.6 and later turn the products into Hopper's wgmma, which then reads beyond the
    shared memory of operands as small as these (illegal memory access, found by compute-sanitizer).
    """

    queries: int
    keys: int
    warps: int
    stages: int


def forward_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    """Fastest of a sweep on an H200, by the pixels of a map, the padded depth of a head and the bytes of an element."""
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    if pixels <= 64:
        return Tile(64, 32, 1, 1)
    return Tile(32, 32, 2, 1) if pixels <= 256 else Tile(64, 64, 2, 3)


def query_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    """The backward kernel of the queries."""
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    if pixels <= 64:
        return Tile(64, 64, 2, 1)
    return Tile(32, 32, 1, 2) if pixels <= 256 else Tile(32, 64, 2, 2)


def key_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    """The backward kernel of keys and values."""
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    if pixels <= 64:
        return Tile(16, 64, 2, 1)
    return Tile(32, 128, 2, 2) if pixels <= 1024 else Tile(16, 128, 2, 2)


def why_not(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int
) -> str | None:
    """None if the kernels can take these arguments, else the reason."""
    if not HAS_TRITON:
        return "triton is not installed"
    # Before the sizes: torch.export would take a question about a symbolic size for a bound on it.
    if qkv.device.type != "cuda" and not INTERPRETED:
        return f"device {qkv.device.type} is not cuda (TRITON_INTERPRET=1 interprets the kernels on the cpu)"
    if qkv.dtype not in DTYPES:
        return f"dtype {qkv.dtype} is not one of bfloat16, float16, float32"
    if qkv.device.type != "cuda" and qkv.dtype == torch.bfloat16:
        return "triton's interpreter has no products of bfloat16"
    depth = max(key_channels, qkv.shape[3] - 2 * key_channels) // num_heads
    if depth > MAX_DEPTH:
        return f"a head of {depth} channels is larger than {MAX_DEPTH}"
    if max(qkv.shape[1], qkv.shape[2]) > MAX_SIDE:
        return f"a map of {qkv.shape[1]} x {qkv.shape[2]} is larger than {MAX_SIDE} x {MAX_SIDE}"
    if qkv.device.type == "cuda":
        major, minor = _capability(qkv.device.index or 0)
        if major < 8:
            return f"compute capability {major}.{minor} is below 8.0"
    return None


def attend(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    tables = None if rel_h is None or rel_w is None else torch.cat([rel_h, rel_w], dim=-2).to(qkv.dtype)
    return attend_forward(qkv, tables, num_heads, key_channels)[0]


@torch.library.custom_op("aaconv::attend_2d", mutates_args=())
def attend_forward(
    qkv: Tensor, tables: Tensor | None, num_heads: int, key_channels: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """qkv [batch, height, width, 2*dk + dv], tables ([heads,] 2*height - 1 + 2*width - 1, dk / heads)
    -> the output [batch, height, width, dv] and the log-sum-exp [batch, heads, 2, height * width] in two parts."""
    from . import triton_kernels

    problem = _Problem(qkv, tables, num_heads, key_channels)
    out, lse = _empty_forward(qkv, num_heads, key_channels)
    scratch = problem.new_scratch(qkv.dtype)
    with problem.device():
        for first, heads_now in problem.chunks():
            _write_relative_logits(triton_kernels, problem, scratch, first, heads_now)
            constants = problem.launch_constants("attend_forward")
            triton_kernels.attend_forward[(heads_now * _ceil(problem.pixels, constants["BLOCK_M"]),)](
                problem.qkv, scratch, out, lse, first, **constants
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
    scratch, grad_scratch = problem.new_scratch(qkv.dtype), problem.new_scratch(torch.float32)
    delta = lse.new_empty(problem.heads_at_a_time * problem.pixels)
    partial = lse.new_empty((problem.batch, num_heads, problem.splits, problem.length, key_channels // num_heads))
    of_queries = problem.launch_constants("attend_backward_queries")
    of_keys = problem.launch_constants("attend_backward_keys")
    key_tiles = _ceil(problem.height, of_keys["KEY_ROWS"]) * _ceil(problem.width, of_keys["KEY_COLS"])
    with problem.device():
        for first, heads_now in problem.chunks():
            _write_relative_logits(triton_kernels, problem, scratch, first, heads_now)
            triton_kernels.attend_backward_queries[(heads_now * _ceil(problem.pixels, of_queries["BLOCK_M"]),)](
                problem.qkv, scratch, out, lse, grad_out, grad_qkv, delta, grad_scratch, first, **of_queries
            )
            if problem.length:
                triton_kernels.relative_backward[(heads_now * problem.splits,)](
                    problem.qkv,
                    problem.tables,
                    grad_qkv,
                    partial,
                    grad_scratch,
                    first,
                    **problem.launch_constants("relative_backward"),
                )
            triton_kernels.attend_backward_keys[(heads_now * key_tiles,)](
                problem.qkv, scratch, lse, grad_out, grad_qkv, delta, first, **of_keys
            )
    if tables is not None:
        torch.sum(partial, (0, 1, 2) if tables.dim() == 2 else (0, 2), out=grad_tables)
    return grad_qkv, grad_tables


def _write_relative_logits(kernels, problem: "_Problem", scratch: Tensor, first: int, heads_now: int) -> None:
    if problem.length:
        constants = problem.launch_constants("relative_logits")
        kernels.relative_logits[(heads_now * _ceil(problem.pixels, constants["BLOCK_M"]),)](
            problem.qkv, problem.tables, scratch, first, **constants
        )


class _Problem:
    """One call's sizes, and the constants the kernels are specialised by."""

    def __init__(self, qkv: Tensor, tables: Tensor | None, num_heads: int, key_channels: int) -> None:
        self.batch, self.height, self.width, channels = qkv.shape
        self.pixels = self.height * self.width
        self.image_heads = self.batch * num_heads
        self.length = 0 if tables is None else 2 * (self.height + self.width) - 2
        span = (self.height - 1) * qkv.stride(1) + (self.width - 1) * qkv.stride(2) + channels
        # inside an image the kernels count in int32
        self.qkv = qkv if qkv.stride(3) == 1 and span < 2**31 else qkv.contiguous()
        self.tables = qkv if tables is None else tables.contiguous()
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        padded = {"D_PAD": _padded(depth), "DV_PAD": _padded(value_depth + 1)}
        self.traits = (self.pixels, max(padded.values()), qkv.element_size())
        self.relative_size = self.pixels * (self.height + self.width) if self.length else 0
        # The scratch stays linear in the pixels: as many heads at a time as fit SCRATCH inputs.
        fitting = max(1, int(SCRATCH * qkv.numel()) // max(1, self.relative_size))
        self.heads_at_a_time = max(1, _ceil(self.image_heads, max(1, _ceil(self.image_heads, fitting))))
        # So do the partial sums of the tables' gradient: together they are at most half the input.
        fitting = qkv.numel() // max(1, 2 * self.image_heads * self.length * depth)
        self.splits = max(1, min(_ceil(self.pixels, 64), _ceil(PROGRAMS, self.heads_at_a_time), fitting))
        full = qkv.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.layout = {
            "STRIDE_B": self.qkv.stride(0),
            "STRIDE_H": self.qkv.stride(1),
            "STRIDE_W": self.qkv.stride(2),
            "HEADS": num_heads,
            "H": self.height,
            "W": self.width,
            "D": depth,
            "D_PAD": padded["D_PAD"],
            "PRECISION": "ieee" if full else "tf32",
        }
        self.constants = {
            **self.layout,
            "DV": value_depth,
            "DV_PAD": padded["DV_PAD"],
            "RELATIVE": self.length > 0,
            # Finite, because the products spread it with zeros: far below any logit, within the dtype.
            "OUTSIDE": -60000.0 if qkv.dtype == torch.float16 else -1e30,
            "SCALE": math.log2(math.e) / math.sqrt(depth),
            "EXACT": qkv.dtype == torch.float32,
        }

    def launch_constants(self, kernel: str) -> dict[str, Any]:
        """The constants and launch options of a kernel, by its name."""
        # The scale and the largest logit enter an exponential in one instruction.
        options = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True}
        if kernel.startswith("relative"):
            relative = _padded(self.height + self.width)
            constants = {**self.layout, "TABLES_PER_HEAD": self.tables.dim() == 3, "REL": relative}
            constants["BLOCK_M"] = 32 if relative <= 64 and self.traits[2] < 4 else 16
            if kernel == "relative_backward":
                constants |= {name: self.constants[name] for name in ("DV", "SCALE", "EXACT")}
                constants["SPLITS"] = self.splits
            return constants | options
        choose = {"attend_forward": forward_tile, "attend_backward_queries": query_tile}.get(kernel, key_tile)
        tile = choose(*self.traits)
        rows, columns = self.key_shape(tile.keys)
        constants = {**self.constants, "BLOCK_M": tile.queries, "KEY_ROWS": rows, "KEY_COLS": columns}
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
        if kernel == "attend_backward_queries":
            constants["COLS"] = _padded(columns)
            if columns < self.width:
                options["num_stages"] = 1  # it reads back what it wrote in the column of tiles before: no prefetching
        if kernel == "attend_backward_keys":
            constants["WINDOW"] = _padded(rows + columns)
        return constants | options

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch."""
        for first in range(0, self.image_heads, self.heads_at_a_time):
            yield first, min(self.heads_at_a_time, self.image_heads - first)

    def new_scratch(self, dtype: torch.dtype) -> Tensor:
        return self.qkv.new_empty(self.heads_at_a_time * self.relative_size, dtype=dtype)

    def key_shape(self, keys: int) -> tuple[int, int]:
        """Rows (at most 16) and columns of a key tile: the powers of two that pad the map least, then the widest."""
        shapes = [(rows, keys // rows) for rows in (1, 2, 4, 8, 16) if rows <= keys]
        return min(shapes, key=lambda s: (_ceil(self.height, s[0]) * _ceil(self.width, s[1]), s[0]))

    def device(self) -> torch.cuda.device:
        return torch.cuda.device(self.qkv.device if self.qkv.is_cuda else -1)


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _padded(size: int) -> int:
    """The power of two a matrix product can take."""
    return max(16, 1 << (size - 1).bit_length())


def _empty_forward(qkv: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = qkv.shape
    out = qkv.new_empty((batch, height, width, channels - 2 * key_channels))
    return out, qkv.new_empty((batch, num_heads, 2, height * width), dtype=torch.float32)


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
