"""`aaconv bench attention`: the operator alone, on a GPU inside CUDA graphs, so that launches do not hide the kernels.

Every variant takes the packed projection and the two tables and gives all their gradients. `compiled` is the eager
reference under torch.compile, `bias` torch's scaled_dot_product_attention with the relative logits as a materialised
bias, compiled, as SAM and others have it, `flex` torch's FlexAttention with the same trainable bias. `nopos` leaves the
positions out: what attention costs without them, the floor. The inputs stay the same,
so small ones are read from the GPU's L2 cache, as in a network, where the projection has just been written.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..attention import BACKENDS, attend_2d, eager, triton_backend
from ..attention.heads import join_heads, relative_logits, relative_logits_by, split_heads
from ..attention.windows import Window, make_window
from ..utils.device import pick_device
from ..utils.precision import DTYPES
from .measure import Call, compile_apart, failures_into, graphed, peak_memory, release, time_interleaved
from .output import Progress, Results, mib
from .switches import restoring_switches

HEADS = 8
IN_A_GRAPH = 10
"""Calls captured one after the other: replaying a graph costs some microseconds, as much as a small kernel."""
GPU_VARIANTS = ("triton", "sdpa", "compiled", "bias", "flex", "nopos")
CPU_VARIANTS = ("sdpa", "eager")
# The H200: memory traffic that can be reached, and exponentials of all multiprocessors per second.
BYTES_PER_SECOND = 4.3e12
EXPONENTIALS_PER_SECOND = 16 * 132 * 1.755e9

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """One attention: batch:HEIGHTxWIDTH:key/value, the depths those of one head, and :heads where they are not 8; with
    @K in windows of K x K."""

    batch: int
    height: int
    width: int
    key_depth: int
    value_depth: int
    heads: int = HEADS
    window: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        match = re.fullmatch(r"(\d+):(\d+)x(\d+):(\d+)/(\d+)(?::(\d+))?(?:@(\d+))?", text)
        *found, window = match.groups() if match else (None,)
        numbers = [int(number or HEADS) for number in found] or [0]
        if min(numbers) < 1 or window == "0":
            form, examples = "batch:HEIGHTxWIDTH:key/value[:heads][@window]", "4:64x64:64/64:12 or 32:56x56:20/3@7"
            raise ValueError(f"a shape is {form}, as in 128:14x14:20/3 or {examples}, got {text!r}")
        batch, height, width, key_depth, value_depth, heads = numbers
        return cls(batch, height, width, key_depth, value_depth, heads, int(window) if window else None)

    def __str__(self) -> str:
        heads = "" if self.heads == HEADS else f":{self.heads}"
        window = f"@{self.window}" if self.window else ""
        return f"{self.batch}:{self.height}x{self.width}:{self.key_depth}/{self.value_depth}{heads}{window}"

    @property
    def table_sides(self) -> tuple[int, int]:
        """(rows, columns) that the tables are made for."""
        return (self.window, self.window) if self.window else (self.height, self.width)

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.key_depth + self.value_depth)

    def floors(self, itemsize: int) -> dict[str, dict[str, float]]:
        """Milliseconds below which an H200 cannot go: every input and output moved once, every weight one exponential.

        The backward reads what the forward did, the output, its gradient and the log-sum-exp, writes the gradient of
        the inputs, and computes each weight again.
        """
        pixels = self.batch * self.height * self.width
        packed, out = pixels * self.channels * itemsize, pixels * self.heads * self.value_depth * itemsize
        log_sum_exp = 4 * pixels * self.heads
        keys = min(self.window or self.height, self.height) * min(self.window or self.width, self.width)
        weights = pixels * keys * self.heads
        moved = {"forward": packed + out, "both": 3 * packed + 3 * out + 2 * log_sum_exp}
        passes = {"forward": 1, "both": 2}
        return {
            phase: {
                "bytes_ms": 1e3 * moved[phase] / BYTES_PER_SECOND,
                "exponentials_ms": 1e3 * passes[phase] * weights / EXPONENTIALS_PER_SECOND,
            }
            for phase in moved
        }


PAPER_SHAPES = [
    Shape.parse(text)
    for text in (
        "128:14x14:20/1",
        "128:14x14:20/3",
        "128:7x7:20/6",
        "128:32x32:20/2",
        "128:16x16:20/4",
        "128:8x8:20/8",
        "128:14x14:32/32",
        "8:40x40:20/3",
        "4:64x64:20/3",
        "4:128x128:20/3",
    )
]
WIDE_SHAPES = [
    Shape.parse(text)
    for text in (
        "4:64x64:64/64:12",  # SAM-B's global attention
        "4:64x64:80/80:16",  # SAM-H's
        "100:14x14:64/64:12",  # SAM-B's windows
        "128:14x14:128/128:4",  # BoTNet
        "32:28x28:96/96:4",
    )
]
CPU_SHAPES = [Shape.parse("2:14x14:20/3"), Shape.parse("2:32x32:20/2")]


@restoring_switches()
def run(
    shapes: list[str] | None = None,
    variants: list[str] | None = None,
    *,
    precision: str | None = None,
    positions: bool = True,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure the variants at these shapes (default: those of the paper's models, of detection, of SAM and BoTNet) in
    bf16, or on a CPU in float32. positions: with relative tables."""
    where = pick_device(device, needs_gpu="bench attention")
    on_gpu, rounds = where.type == "cuda", rounds or 20
    dtype = DTYPES[precision or ("bf16" if on_gpu else "float32")]
    chosen = [Shape.parse(text) for text in shapes] if shapes else PAPER_SHAPES + WIDE_SHAPES if on_gpu else CPU_SHAPES
    names = list(dict.fromkeys(variants or (GPU_VARIANTS if on_gpu else CPU_VARIANTS)))
    settings = {"dtype": str(dtype), "positions": positions, "rounds": rounds, "graphs": on_gpu}
    results, progress = Results("attention", where, json_to, **settings), Progress()
    for shape in chosen:
        results.add(*measure(shape, names, where, dtype, rounds, progress, positions))
        release()
    columns: tuple[str, ...] = (
        "batch, map, depths",
        "variant",
        "forward ms",
        "p20 - p80",
        "x floor",
        "fwd + bwd ms",
        "p20 - p80",
    )
    columns = (*columns, "x floor", "x first", "peak memory")
    first = f"x first: fwd + bwd against {names[0]}"
    floor = "; x floor: against the larger of bytes / 4.3 TB/s and exponentials, on an H200" if on_gpu else ""
    about = [f"{HEADS} heads unless given, {dtype}{', inside CUDA graphs' if on_gpu else ''}; {first}{floor}"]
    about += [f"{row['shape']} {row['variant']}: {row['failed']}" for row in results.rows if "failed" in row]
    results.finish(columns, [_cells(row) for row in results.rows], about)


def measure(
    shape: Shape,
    names: list[str],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    progress: Callable[[str], None],
    positions: bool = True,
) -> list[dict[str, Any]]:
    """One row per variant: timings of both phases and the peak memory, or the reason why there are none."""
    inputs, grad_out = _inputs(shape, device, dtype, positions)
    sizes = {"num_heads": shape.heads, "key_channels": shape.heads * shape.key_depth}
    calls: dict[str, dict[str, Call]] = {"forward": {}, "both": {}}
    memory: dict[str, int] = {}
    failures: dict[str, str] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name in names:
        progress(f"{shape} {name}")
        with failures_into(failures, name):
            attend = _variant(name, inputs, sizes) if shape.window is None else _window_variant(name, inputs, shape)
            forward, both = _phases(attend, inputs, grad_out, sizes)
            memory[name] = peak_memory(both, device, [*_given(inputs), grad_out])
            for phase, call in (("forward", forward), ("both", both)):
                calls[phase][name] = graphed(call, repeats=IN_A_GRAPH, pool=pool) if pool else call
        if name in failures:
            progress(f"{shape} {name} failed: {failures[name]}")
    timings = {}
    for phase, of_phase in calls.items():
        running = {name: call for name, call in of_phase.items() if name not in failures}
        timings[phase] = time_interleaved(running, device, rounds=rounds, inside=IN_A_GRAPH if pool else 1)
    floors = shape.floors(dtype.itemsize)
    rows = []
    for name in names:
        row: dict[str, Any] = {"shape": str(shape), **asdict(shape), "variant": name}
        if name in failures:
            rows.append(row | {"failed": failures[name]})
            continue
        row |= {f"{phase}_ms": vars(timings[phase][name]) for phase in calls}
        row["peak_bytes"] = memory[name]
        if names[0] in timings["both"]:
            row["to_first"] = timings["both"][name].p50 / timings["both"][names[0]].p50
        if device.type == "cuda":
            row["floors"] = floors
            row |= {f"{phase}_to_floor": row[f"{phase}_ms"]["p50"] / max(floors[phase].values()) for phase in calls}
        rows.append(row)
    return rows


def _inputs(
    shape: Shape, device: torch.device, dtype: torch.dtype, positions: bool
) -> tuple[list[Tensor | None], Tensor]:
    """qkv, rel_h and rel_w (None without positions) that want gradients, and the gradient of the output."""
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    qkv = torch.randn(shape.batch, shape.height, shape.width, shape.channels, **like)
    tables = (torch.randn(2 * side - 1, shape.key_depth, **like) for side in shape.table_sides)
    grad_out = torch.randn(shape.batch, shape.height, shape.width, shape.heads * shape.value_depth, **like)
    given = (tensor.requires_grad_() for tensor in (qkv, *tables))
    return [tensor if positions or tensor is qkv else None for tensor in given], grad_out


def _given(inputs: list[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None]


def _phases(attend: Attend, inputs: list[Tensor | None], grad_out: Tensor, sizes: dict[str, int]) -> tuple[Call, Call]:
    def forward() -> None:
        with torch.no_grad():
            attend(*inputs, **sizes)

    def both() -> None:
        torch.autograd.grad(attend(*inputs, **sizes), _given(inputs), grad_out, allow_unused=True)

    return forward, both


def _variant(name: str, inputs: list[Tensor | None], sizes: dict[str, int]) -> Attend:
    """The operator of that name; a ValueError where it cannot run."""
    to_compile = {"compiled": eager.attend, "bias": attend_with_bias, "flex": flex_attend}
    if name in to_compile:
        return compile_apart(to_compile[name], fullgraph=True)
    if name == "nopos":
        return attend_without_positions
    backend = triton_backend if name == "triton" else BACKENDS[name]
    reason = backend.why_not(*inputs, **sizes)
    if reason is not None:
        raise ValueError(reason)
    return backend.attend


def _window_variant(name: str, inputs: list[Tensor | None], shape: Shape) -> Attend:
    assert shape.window is not None
    window = make_window(shape.window)
    if name in BACKENDS:
        return functools.partial(attend_2d, window=window, backend=name)
    if name == "compiled":

        def attend(*tensors: Any, **sizes: Any) -> Tensor:  # a partial has no code for torch 2.11 to compile
            return eager.attend(*tensors, **sizes, window=window)

        return compile_apart(attend, fullgraph=True)
    if name == "flex":
        blocks = neighbourhood(window, shape.height, shape.width, _given(inputs)[0].device)

        def flex(*tensors: Any, **sizes: Any) -> Tensor:
            return flex_attend_windows(*tensors, **sizes, window=window, blocks=blocks)

        return compile_apart(flex, fullgraph=True)
    raise ValueError(f"{name} has no windows")


def attend_with_bias(qkv: Tensor, rel_h: Tensor, rel_w: Tensor, *, num_heads: int, key_channels: int) -> Tensor:
    """The same equation through scaled_dot_product_attention, with the relative logits as a bias [.., HW, HW]."""
    height, width = qkv.shape[1:3]
    q, k, v = split_heads(qkv, num_heads, key_channels)
    by_row, by_column = relative_logits(q * q.shape[-1] ** -0.5, rel_h, rel_w)
    bias = (by_row[..., :, None] + by_column[..., None, :]).flatten(4).flatten(2, 3)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    return join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), height, width)


def attend_without_positions(qkv: Tensor, rel_h: Tensor, rel_w: Tensor, *, num_heads: int, key_channels: int) -> Tensor:
    """scaled_dot_product_attention alone; the tables have no gradient."""
    height, width = qkv.shape[1:3]
    q, k, v = (part.flatten(2, 3) for part in split_heads(qkv, num_heads, key_channels))
    return join_heads(F.scaled_dot_product_attention(q, k, v), height, width)


def flex_attend(qkv: Tensor, rel_h: Tensor, rel_w: Tensor, *, num_heads: int, key_channels: int) -> Tensor:
    """The same equation through FlexAttention: the relative logits, computed before, are read in its score_mod."""
    height, width = qkv.shape[1:3]
    q, k, v = split_heads(qkv, num_heads, key_channels)
    depth, value_depth = q.shape[-1], v.shape[-1]
    scaled = q * depth**-0.5
    by_row, by_column = (logits.flatten(2, 3) for logits in relative_logits(scaled, rel_h, rel_w))

    def add_relative(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + by_row[image, head, query, key // width] + by_column[image, head, query, key % width]

    # FlexAttention takes depths that are powers of two from 16 on.
    q, k, v = (_padded(part.flatten(2, 3)) for part in (scaled, k, v))
    out = flex_attention(q, k, v, score_mod=add_relative, scale=1.0)
    return join_heads(out[..., :value_depth], height, width)


def neighbourhood(window: Window, height: int, width: int, device: torch.device) -> BlockMask:
    """FlexAttention's mask of the pixels that see each other."""
    rows, columns = (axis.sees(length, device)[0] for axis, length in zip(window, (height, width), strict=True))

    def seen(image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rows[query // width, key // width] & columns[query % width, key % width]

    return create_block_mask(seen, None, None, height * width, height * width, device=str(device))


def flex_attend_windows(
    qkv: Tensor, rel_h: Tensor, rel_w: Tensor, *, num_heads: int, key_channels: int, window: Window, blocks: BlockMask
) -> Tensor:
    """The same equation in windows through FlexAttention, which leaves out blocks of keys that no query sees."""
    height, width = qkv.shape[1:3]
    q, k, v = split_heads(qkv, num_heads, key_channels)
    value_depth, scaled = v.shape[-1], q * q.shape[-1] ** -0.5
    by_row, by_column = (
        relative_logits_by(scaled, table[axis.sees(length, q.device)[1]], dim).flatten(2, 3)
        for dim, (axis, table, length) in enumerate(zip(window, (rel_h, rel_w), (height, width), strict=True), 2)
    )

    def add_relative(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + by_row[image, head, query, key // width] + by_column[image, head, query, key % width]

    q, k, v = (_padded(part.flatten(2, 3)) for part in (scaled, k, v))
    out = flex_attention(q, k, v, score_mod=add_relative, block_mask=blocks, scale=1.0)
    return join_heads(out[..., :value_depth], height, width)


def _padded(part: Tensor) -> Tensor:
    depth = part.shape[-1]
    zeros = part.new_zeros(*part.shape[:-1], max(16, 1 << (depth - 1).bit_length()) - depth)
    return torch.cat([part, zeros], dim=-1)


def _cells(row: dict[str, Any]) -> list[str]:
    start = [row["shape"], row["variant"]]
    if "failed" in row:
        return [*start, "failed"]
    cells = list(start)
    for phase in ("forward", "both"):
        ms = row[f"{phase}_ms"]
        floor = row.get(f"{phase}_to_floor")
        cells += [f"{ms['p50']:.4f}", f"{ms['p20']:.4f} - {ms['p80']:.4f}", f"{floor:.1f}" if floor else ""]
    return [*cells, f"{row['to_first']:.2f}" if "to_first" in row else "", mib(row["peak_bytes"])]
