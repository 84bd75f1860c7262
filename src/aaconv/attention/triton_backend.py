"""The fused backend: torch operators around the kernels of triton_kernels.py.

No quadratic tensor, no copies: the packed projection is read by its strides, the gradient written packed. Saved for
the backward: the inputs, the output and the log-sum-exp. No atomics, so every result is the same bits every time.
Products of bfloat16 and float16 accumulate in float32; those of float32 run in full float32 if
torch.get_float32_matmul_precision() is "highest" (torch's default), else in TF32.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_DEPTH = 128
MAX_SIDE = 128
MAX_OPERAND = 2**17
"""Bytes of the largest operand of a product in shared memory: relative vectors, or the factors that make the tails."""
PROGRAMS = 1056
"""Programs that add up the tables' gradient: 8 for each of an H200's 132 multiprocessors."""
SCRATCH = 8.0
"""Most the scratch may hold, in multiples of the input's bytes."""
GROUP = 8
"""Rows of keys whose relative logits travel together with the queries, in the unused depth of a product."""
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


def pack_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    """Fastest of a sweep on an H200, by the pixels of a map, the padded depth of a head and the bytes of an element."""
    return Tile(16, 64, 1, 1) if pixels <= 256 or itemsize == 4 else Tile(32, 64, 2, 1)


def forward_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    return Tile(64, 32, 2, 3) if pixels <= 200 else Tile(128, 64, 2, 3)


def query_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    return Tile(64, 32 if pixels <= 64 else 64, 2, 3)


def key_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    if itemsize == 4 or depth > 64:
        return Tile(16, 32, 2, 1)
    return Tile(32, 64, 1, 3) if pixels <= 64 else Tile(32, 128, 2, 3)


def relative_tile(pixels: int, depth: int, itemsize: int) -> Tile:
    if pixels <= 64:
        return Tile(64, 0, 1, 1)
    if itemsize == 4 or pixels > 4096:
        return Tile(16, 0, 2, 1)
    return Tile(32, 0, 1 if 256 < pixels <= 1024 else 2, 1)


TILES = {
    "pack": pack_tile,
    "attend_forward": forward_tile,
    "attend_backward_queries": query_tile,
    "attend_backward_keys": key_tile,
    "relative_backward": relative_tile,
}


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
    fitting = MAX_OPERAND // (_padded(key_channels // num_heads) * qkv.dtype.itemsize)
    tails = _ceil(qkv.shape[1], GROUP) * _key_parts(key_channels // num_heads)[2]
    if tails > fitting or (rel_h is not None and 2 * (qkv.shape[1] + qkv.shape[2]) - 2 > fitting):
        return f"a map of {qkv.shape[1]} x {qkv.shape[2]} with heads of {depth} channels needs too much shared memory"
    if qkv.device.type == "cuda":
        major, minor = _capability(qkv.device.index or 0)
        if major < 8:
            return f"compute capability {major}.{minor} is below 8.0"
    return None


def attend(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    height, width = qkv.shape[1:3]
    # Three dimensions: torch's compiler takes a fourth for an image's and lays it out channels_last, with a copy.
    out, _ = attend_forward(qkv.flatten(1, 2), rel_h, rel_w, height, num_heads, key_channels)
    return out.unflatten(1, (height, width))


def _forward(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, height: int, num_heads: int, key_channels: int
) -> tuple[Tensor, Tensor]:
    """qkv [batch, pixels, 2*dk + dv], rel_h ([heads,] 2*height - 1, dk / heads) and rel_w alike, of any dtype
    -> the output [batch, pixels, dv] and the log-sum-exp [batch * heads, 2, pixels] in two parts."""
    out, lse = _empty_forward(qkv, num_heads, key_channels)
    plan, qkv, tables = _prepare(qkv, rel_h, rel_w, height, num_heads, key_channels)
    operands = plan.new_buffers(qkv, plan.operand_sizes)
    with torch.cuda.device_of(qkv):
        for first, heads in plan.chunks():
            plan.launch("pack", heads, qkv, *tables, *operands, lse, first)
            plan.launch("attend_forward", heads, qkv, *operands, out, lse, first)
    return out, lse


def _backward(
    grad_out: Tensor,
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    out: Tensor,
    lse: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv, packed, and of the tables, one after the other (empty if there are none)."""
    grad_qkv, grad_tables = _empty_backward(qkv, rel_h, rel_w)
    plan, qkv, tables = _prepare(qkv, rel_h, rel_w, height, num_heads, key_channels, backward=True)
    grad_out = grad_out.contiguous()
    operands = plan.new_buffers(qkv, plan.operand_sizes)
    grads, grad_logits = plan.new_buffers(qkv, plan.gradient_sizes)
    partial = lse.new_empty((plan.batch, num_heads, plan.splits, plan.length, key_channels // num_heads))
    with torch.cuda.device_of(qkv):
        for first, heads in plan.chunks():
            plan.launch("pack", heads, qkv, *tables, *operands, lse, first)
            arguments = qkv, *operands, out, lse, grad_out, grad_qkv, grads, grad_logits, first
            plan.launch("attend_backward_queries", heads, *arguments)
            if plan.length:
                plan.launch("relative_backward", heads, qkv, *tables, grad_qkv, partial, grad_logits, first)
            plan.launch("attend_backward_keys", heads, qkv, *operands, lse, grad_qkv, grads, first)
    if rel_h is not None:
        torch.sum(partial, (0, 1, 2) if rel_h.dim() == 2 else (0, 2), out=grad_tables)
    return grad_qkv, grad_tables


def _prepare(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    height: int,
    num_heads: int,
    key_channels: int,
    *,
    backward: bool = False,
) -> tuple["_Plan", Tensor, tuple[Tensor, Tensor]]:
    """The plan, and the tensors as the kernels take them; without tables any tensor stands for them."""
    _, pixels, channels = qkv.shape
    if qkv.stride(2) != 1 or pixels * qkv.stride(1) + channels >= 2**31:  # inside an image the kernels count in int32
        qkv = qkv.contiguous()
    full = torch.get_float32_matmul_precision() == "highest"
    if rel_h is None or rel_w is None:
        tables, dimensions = (qkv, qkv), 0
    else:
        tables, dimensions = (rel_h.contiguous(), rel_w.to(rel_h.dtype).contiguous()), rel_h.dim()
    kind = (tuple(qkv.shape), qkv.stride(), qkv.dtype, dimensions, tables[0].dtype, height, num_heads, key_channels)
    return _plan(*kind, full, backward), qkv, tables


class _Plan:
    """One kind of call: its sizes, the constants the kernels are specialised by, and the kernels once compiled."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        table_dimensions: int,
        table_dtype: torch.dtype,  # the kernels are compiled for it
        height: int,
        num_heads: int,
        key_channels: int,
        full_precision: bool,
        backward: bool,
    ) -> None:
        self.batch, self.pixels, channels = shape
        self.height, self.width = height, self.pixels // max(1, height)
        self.image_heads = self.batch * num_heads
        self.length = 2 * (self.height + self.width) - 2 if table_dimensions else 0
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        exact, scale = dtype == torch.float32, math.log2(math.e) / math.sqrt(depth)
        sizes = self.constants = {
            "STRIDE_B": strides[0],
            "STRIDE_P": strides[1],
            "HEADS": num_heads,
            "H": self.height,
            "W": self.width,
            "D": depth,
            "DV": value_depth,
            **_layout(self.height, self.width, depth, value_depth),
            "OFFSETS": _padded(self.length),
            "RELATIVE": self.length > 0,
            "TABLES_PER_HEAD": table_dimensions == 3,
            # Finite, because the products spread it with zeros: far below any logit, within the dtype.
            "OUTSIDE": -60000.0 if dtype == torch.float16 else -1e30,
            # In half precision the keys bring the factor of the exponent; in float32 it would cost them a digit.
            "KEY_SCALE": 1.0 if exact else scale,
            "SCALE": scale if exact else 1.0,
            "LOGIT_SCALE": 1 / math.sqrt(depth),
            "LOG_SUM": backward and not exact,
            # float16 has little room above 1: the first keys' largest weight is put lower there.
            "MARGIN": 8.0 if dtype == torch.float16 else 0.0,
            "EXACT": exact,
            "PRECISION": "ieee" if exact and full_precision else "tf32",
        }
        self.traits = (self.pixels, max(sizes["MAIN"] + sizes["TAIL"], sizes["VALUES"]), dtype.itemsize)
        # Of one head, in elements: what `pack` writes, and what the queries' kernel leaves to the others.
        query, slots = sizes["GROUPS"] * sizes["TAIL"] + sizes["COLUMNS"], sizes["ALL_SLOTS"]
        self.operand_sizes = self.pixels * query, slots * (sizes["MAIN"] + sizes["TAIL"]), slots * sizes["VALUES"]
        relative = sizes["COLUMNS"] + sizes["STRIPS"] * sizes["GROUPS"] * GROUP if self.length else 0
        self.gradient_sizes = self.pixels * sizes["VALUES"], self.pixels * relative
        # The scratch stays linear in the pixels: as many heads at a time as fit SCRATCH inputs.
        of_a_head = sum(self.operand_sizes) + (sum(self.gradient_sizes) if backward else 0)
        elements = math.prod(shape)
        fitting = max(1, int(SCRATCH * elements) // max(1, of_a_head))
        self.heads_at_a_time = max(1, _ceil(self.image_heads, max(1, _ceil(self.image_heads, fitting))))
        # So do the partial sums of the tables' gradient: together they are at most half the input.
        fitting = elements // max(1, 2 * self.image_heads * self.length * depth)
        self.splits = max(1, min(_ceil(self.pixels, 64), _ceil(PROGRAMS, self.heads_at_a_time), fitting))
        sizes["SPLITS"] = self.splits
        self.compiled: dict[tuple, Any] = {}

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch."""
        for first in range(0, self.image_heads, self.heads_at_a_time):
            yield first, min(self.heads_at_a_time, self.image_heads - first)

    def new_buffers(self, qkv: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(qkv.new_empty(self.heads_at_a_time * size) for size in sizes)

    def launch(self, name: str, heads: int, *arguments: Any) -> None:
        """Run a kernel for so many of the image-heads."""
        from . import triton_kernels

        kernel, grid = getattr(triton_kernels, name), (heads * self.programs(name), 1, 1)
        if INTERPRETED:
            kernel[grid](*arguments, **self.launch_constants(name, kernel.arg_names))
            return
        # Triton compiles for the alignment of the pointers. Its own way to the compiled kernel looks at every argument
        # again, and asks the driver about every tensor, but not about an address: both take longer than these kernels.
        *tensors, first = arguments
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (name, torch.cuda.current_device(), *(address % 16 == 0 for address in addresses))
        if key not in self.compiled:
            constants = self.launch_constants(name, kernel.arg_names)
            compiled = kernel[grid](*arguments, **constants)
            self.compiled[key] = compiled, [constants[name] for name in kernel.arg_names if name in constants]
            return
        compiled, constants = self.compiled[key]
        compiled[grid](*addresses, first, *constants)

    def launch_constants(self, name: str, known: Iterable[str]) -> dict[str, Any]:
        """What a kernel is specialised by, of the names it knows, and triton's options."""
        tile = self.tile(name)
        rows = tile.keys // self.constants["KEY_COLS"]
        constants = self.constants | {"BLOCK_M": tile.queries, "SLOTS": tile.keys, "KEY_ROWS": rows}
        chosen = {constant: constants[constant] for constant in known if constant in constants}
        # enable_fp_fusion: the scale and the largest logit enter an exponential in one instruction
        return chosen | {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}

    def programs(self, kernel: str) -> int:
        """How many programs of a kernel one image-head has."""
        sizes, tile = self.constants, self.tile(kernel)
        if kernel == "pack":
            lines = self.height * _ceil(self.width, tile.queries)
            if self.length:
                lines += self.width * _ceil(self.height, tile.queries)
            return lines + _ceil(sizes["ALL_SLOTS"], tile.keys)
        if kernel == "relative_backward":
            return self.splits
        if kernel == "attend_backward_keys":
            return sizes["STRIPS"] * _ceil(self.height, tile.keys // sizes["KEY_COLS"])
        return _ceil(self.pixels, tile.queries)

    def tile(self, kernel: str) -> Tile:
        """How a kernel is cut; a tile of keys stays within a strip and within the rows that share a tail."""
        tile = TILES[kernel](*self.traits)
        if not kernel.startswith("attend"):
            return tile
        columns = self.constants["KEY_COLS"]
        return tile._replace(keys=min(max(tile.keys, columns), columns * GROUP))


_plan = functools.lru_cache(maxsize=1024)(_Plan)


def _layout(height: int, width: int, depth: int, value_depth: int) -> dict[str, int]:
    """How `pack` lays out its operands, see triton_kernels."""

    main, rows_at, tail = _key_parts(depth)
    # The widest strips that do not pad the map much: fewer strips, fewer parts of the rows' gradients.
    columns = next(columns for columns in (32, 16, 8) if _ceil(width, columns) * columns <= 1.25 * _ceil(width, 8) * 8)
    groups, strips = _ceil(height, GROUP), _ceil(width, columns)
    return {
        "D_PAD": _padded(depth),
        "MAIN": main,
        "TAIL": tail,
        "ROWS_AT": rows_at,
        "KEY": _padded(main + tail),
        "GROUP": GROUP,
        "GROUPS": groups,
        "COLUMNS": strips * columns,
        "TAILS_PADDED": _padded(groups * tail),
        "COLUMNS_PADDED": _padded(strips * columns),
        "PLACES": _padded(strips * columns + groups * GROUP),
        "VALUES": _padded(value_depth + 2),
        "DV_PAD": max(8, _power_of_two(value_depth + 1)),
        "KEY_COLS": columns,
        "STRIPS": strips,
        "ALL_SLOTS": strips * columns * groups * GROUP,
    }


def _key_parts(depth: int) -> tuple[int, int, int]:
    """MAIN, never more than the depth: the rest of q, the edge and the log-sum-exp follow it; ROWS_AT and TAIL."""
    main = 1 << (depth.bit_length() - 1) if depth >= 16 else 0
    rows_at = _ceil(depth - main + 4, 8) * 8  # aligned
    return main, rows_at, _padded(rows_at + GROUP)


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _padded(size: int) -> int:
    """The power of two a matrix product can take as its depth."""
    return max(16, _power_of_two(size))


def _empty_forward(qkv: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor]:
    batch, pixels, channels = qkv.shape
    out = qkv.new_empty((batch, pixels, channels - 2 * key_channels))
    return out, qkv.new_empty((batch * num_heads, 2, pixels), dtype=torch.float32)


def _empty_backward(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None) -> tuple[Tensor, Tensor]:
    if rel_h is None or rel_w is None:
        return qkv.new_empty(qkv.shape), qkv.new_empty(0)
    *heads, length, depth = rel_h.shape
    return qkv.new_empty(qkv.shape), rel_h.new_empty((*heads, length + rel_w.shape[-2], depth))


def _fake_forward(qkv, rel_h, rel_w, height, num_heads, key_channels) -> tuple[Tensor, Tensor]:
    return _empty_forward(qkv, num_heads, key_channels)


def _fake_backward(grad_out, qkv, rel_h, rel_w, out, lse, height, num_heads, key_channels) -> tuple[Tensor, Tensor]:
    return _empty_backward(qkv, rel_h, rel_w)


def _save(ctx, inputs, output) -> None:
    qkv, rel_h, rel_w, *ctx.sizes = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(qkv, rel_h, rel_w, out, lse)


def _gradients(ctx, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, rel_h, rel_w, out, lse = ctx.saved_tensors
    grad_qkv, grad_tables = attend_backward(grad_out, qkv, rel_h, rel_w, out, lse, *ctx.sizes)
    if rel_h is None:
        return grad_qkv, None, None, None, None, None
    rows = rel_h.shape[-2]
    return grad_qkv, grad_tables[..., :rows, :], grad_tables[..., rows:, :].to(rel_w.dtype), None, None, None


# Not torch.library.custom_op: what that wraps around a call takes longer than the call.
_library = torch.library.Library("aaconv", "FRAGMENT")
_sizes = "SymInt height, int num_heads, int key_channels) -> (Tensor, Tensor)"
_library.define(
    f"attend_2d(Tensor qkv, Tensor? rel_h, Tensor? rel_w, {_sizes}",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attend_2d_backward(Tensor grad_out, Tensor qkv, Tensor? rel_h, Tensor? rel_w, Tensor out, Tensor lse, " + _sizes,
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attend_2d", _forward, "CompositeExplicitAutograd")
_library.impl("attend_2d_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("aaconv::attend_2d", _fake_forward, lib=_library)
torch.library.register_fake("aaconv::attend_2d_backward", _fake_backward, lib=_library)
torch.library.register_autograd("aaconv::attend_2d", _gradients, setup_context=_save, lib=_library)
attend_forward, attend_backward = torch.ops.aaconv.attend_2d.default, torch.ops.aaconv.attend_2d_backward.default


@register_flop_formula(torch.ops.aaconv.attend_2d)
def _forward_flops(qkv_shape, rel_h_shape, rel_w_shape, height, num_heads, key_channels, *args, **kwargs) -> int:
    """Multiplications and additions of q k^T, p v and the relative logits of every row and column."""
    batch, pixels, channels = qkv_shape
    relative = 0 if rel_h_shape is None else key_channels * (height + pixels // height)
    return 2 * batch * pixels * (pixels * (channels - key_channels) + relative)


@register_flop_formula(torch.ops.aaconv.attend_2d_backward)
def _backward_flops(grad, qkv_shape, rel_h_shape, rel_w_shape, out, lse, height, num_heads, key_channels, **kwargs):
    """Two products for each of the forward's, without the recomputed logits."""
    return 2 * _forward_flops(qkv_shape, rel_h_shape, rel_w_shape, height, num_heads, key_channels)


@torch.compiler.assume_constant_result
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
