"""How a call of the fused kernels is cut into programs and tiles, and how their operands are laid out."""

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .triton_launch import INTERPRETED, Launcher, Program, Step, gpu_at
from .triton_tiles import MOST_CHANNELS, SMALL_TABLE, TILES, Tile, Traits

SMALL_KERNELS = ("attend_small_forward", "attend_small_backward")
"""Those that take the place of the packed ones on small maps; a sweep leaves some out."""
SMALL_SIDE, SMALL_DEPTH, SMALL_VALUE_DEPTH = 16, 32, 14
"""Largest map and head for them: relative offsets fit into 32, and two ones stand beside the values in 16."""
LARGER_DEPTH = 24
"""Largest head on maps of more than 8 x 8: deeper ones would go to memory by the kilobyte (sm_90, 16 x 16)."""
HEADS_ON_A_MULTIPROCESSOR = 1
"""At least so many of a small map have their backward in one program each: fewer leave the GPU idle for too long."""

ON_A_MULTIPROCESSOR = 4
"""Programs of two warps with all the registers there are that run beside each other on one multiprocessor of any GPU
since the A100: 528 on an H200. One more takes as long as as many again."""
SCRATCH, SMALL_SCRATCH = 5.4, 2**27
"""Most the scratch may hold, in multiples of the input's bytes (a batch of 32 x 32 with heads of 20 goes at once), and
the bytes it may hold in any case: a launch for a few heads would leave most of a GPU idle."""
MOST_TOGETHER = 8
"""Heads of a small map that one program packs."""
SUMMED_AT_ONCE = 255
"""Rows. More are summed in two steps where they have factors: of one there are too few programs to fill a GPU."""
SUM_TILE = {"AT_ONCE": 32, "BLOCK": 128}
"""Rows and numbers of a step of `sum_rows`."""
GROUP = 8
"""Rows of keys whose relative logits travel together with the queries, in the unused depth of a product."""


class Sum(NamedTuple):
    """[outer, rows, numbers] -> [outer, numbers]."""

    outer: int
    rows: int
    numbers: int


class Plan:
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
        device: int | None = None,
    ) -> None:
        self.batch, self.pixels, channels = shape
        self.backward, self.itemsize = backward, dtype.itemsize
        self.height, self.width = height, self.pixels // max(1, height)
        self.image_heads, self.value_channels = self.batch * num_heads, channels - 2 * key_channels
        at_a_time = ON_A_MULTIPROCESSOR * gpu_at(device).multiprocessors
        self.length = 2 * (self.height + self.width) - 2 if table_dimensions else 0
        depth, value_depth = key_channels // num_heads, (channels - 2 * key_channels) // num_heads
        exact, scale = dtype == torch.float32, math.log2(math.e) / math.sqrt(depth)
        sizes: dict[str, Any] = {
            "STRIDE_B": strides[0],
            "STRIDE_P": strides[1],
            "HEADS": num_heads,
            "H": self.height,
            "W": self.width,
            "D": depth,
            "DV": value_depth,
            **_layout(self.height, self.width, depth, value_depth),
            # As many of the tables' vectors at a time as 64 threads can hold the gradients of.
            "OFFSETS": min(padded(self.length), (4096 if exact else 8192) // padded(depth)),
            "RELATIVE": self.length > 0,
            "TABLES_PER_HEAD": table_dimensions == 3,
            # Finite, because the products spread it with zeros: far below any logit, within the dtype.
            "OUTSIDE": -60000.0 if dtype == torch.float16 else -1e30,
            # Of the weights, in the forward: a sum beyond them is done again. No weight below overflows the dtype, nor
            # what it does to a value up to 3e18; with the largest logit of the first keys taken off, the sum is at
            # least 1. bfloat16 can do without, which was faster (H200) but at 32 x 32.
            "FIRST_KEYS": dtype == torch.float16 or (dtype == torch.bfloat16 and 256 < self.pixels <= 1024),
            "SMALLEST_SUM": 0.5 if dtype == torch.float16 else 1e-20,
            "LARGEST_SUM": 60000.0 if dtype == torch.float16 else 1e20,
            # In half precision the keys bring the factor of the exponent; in float32 it would cost them a digit.
            "KEY_SCALE": 1.0 if exact else scale,
            "SCALE": scale if exact else 1.0,
            "LOGIT_SCALE": 1 / math.sqrt(depth),
            "LOG_SUM": backward and not exact,
            "EXACT": exact,
            "PRECISION": "ieee" if exact and full_precision else "tf32",
        }
        self.constants = sizes
        small = is_small(self.height, self.width, depth, value_depth, dtype, table_dimensions)
        enough = HEADS_ON_A_MULTIPROCESSOR * gpu_at(device).multiprocessors if backward else 0
        self.is_small = small and self.image_heads >= enough and self._small_kernel in SMALL_KERNELS
        channels = sizes["MAIN"] + sizes["TAIL"] + sizes["DV_PAD"]
        self.is_wide = is_wide(depth, value_depth, dtype, table_dimensions > 0)
        line = power_of_two(max(self.height, self.width))
        mates = 1 if table_dimensions == 3 else math.gcd(MOST_TOGETHER, num_heads)  # they share the tables
        self.traits = Traits(self.pixels, channels, dtype.itemsize, sizes["OFFSETS"] * sizes["D_PAD"], line, mates)
        # Of one head, in elements: what `pack` writes, and what the queries' kernel leaves to the others.
        query, slots = sizes["GROUPS"] * sizes["TAIL"] + sizes["COLUMNS"], sizes["ALL_SLOTS"]
        self.operand_sizes = self.pixels * query, slots * (sizes["MAIN"] + sizes["TAIL"]), slots * sizes["VALUES"]
        relative = sizes["COLUMNS"] + sizes["STRIPS"] * sizes["GROUPS"] * GROUP if self.length else 0
        self.gradient_sizes = self.pixels * sizes["VALUES"] + sizes["DELTAS"], self.pixels * relative
        # The scratch stays linear in the pixels: as many heads at a time as fit.
        of_a_head = sum(self.operand_sizes) + (sum(self.gradient_sizes) if backward else 0)
        elements = math.prod(shape)
        room = max(int(SCRATCH * elements), SMALL_SCRATCH // dtype.itemsize)
        self.parts = 1
        longest = self.programs("attend_backward_keys" if backward else "attend_forward")
        fitting = max(1, self.image_heads if self.is_small else room // max(1, of_a_head))
        self.heads_at_a_time = heads_at_a_time(self.image_heads, fitting, longest, at_a_time)
        # Heads whose lines fill a tile of `pack`, all of one image and one launch.
        self.together = math.gcd(max(1, self.tile("pack").queries // line), mates, self.heads_at_a_time)
        # Where `pack` has fewer lines of queries than rows of keys, a program takes more of these, up to a tile: about
        # as many as there are to a line (1.5: a power of two that is near, not always the one below).
        most = self.tile("pack").queries // (self.together * sizes["KEY_COLS"])
        self.key_lines = power_below(max(1, min(1.5 * self.key_rows / max(1, self.query_lines), most)))
        sizes |= {"TOGETHER": self.together, "KEY_LINES": self.key_lines}
        # So do the partial sums of the tables' gradient: together they are at most twice as many numbers as the input.
        fitting = 2 * elements // max(1, self.image_heads * self.length * depth)
        steps = ceil_div(self.pixels, self.tile("relative_backward").queries)
        beside = 2 * at_a_time if self.traits.table <= SMALL_TABLE else at_a_time
        self.splits = splits_of_a_head(self.heads_at_a_time, min(ceil_div(self.pixels, 64), fitting), steps, beside)
        if self.is_small:
            sizes |= _small_layout(self.width, depth, value_depth, backward) | {"TAKE_OFF": dtype == torch.float16}
            # As many programs a head as fill the GPU, at most one for every tile of queries; one for all gradients.
            self.splits = 1
            most = 1 if backward else ceil_div(self.height * sizes["LINE"], self.tile(self._small_kernel).queries)
            self.parts = min(most, max(1, at_a_time // max(1, self.image_heads)))
        sizes |= {"SPLITS": self.splits, "PARTS": self.parts}
        rows, heads, splits = self.image_heads * self.splits, 1, 1
        if table_dimensions == 3:
            rows, heads, splits = self.batch, num_heads, self.splits
        self.sums = table_sums(rows, heads, splits, self.length * depth) if self.length and backward else ()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, how many) of the image-heads of every launch."""
        for first in range(0, self.image_heads, self.heads_at_a_time):
            yield first, min(self.heads_at_a_time, self.image_heads - first)

    @functools.cached_property
    def program(self) -> Program:
        """All kernels of the call, which are compiled when it first runs."""
        launchers = {heads: [self._launcher(name, heads) for name in self.kernels] for _, heads in self.chunks()}
        steps = [Step(launcher, (first,)) for first, heads in self.chunks() for launcher in launchers[heads]]
        names = "queries", "keys", "values", "grads", "grad_logits"
        sizes = self.operand_sizes + self.gradient_sizes if self.backward else self.operand_sizes
        scratch = {name: self.heads_at_a_time * size for name, size in zip(names, sizes, strict=False)}
        if self.is_small:
            scratch = {}
        return Program([*steps, *sum_steps(self.sums)], scratch, self.itemsize, scratch_of_sums(self.sums))

    @property
    def _small_kernel(self) -> str:
        return "attend_small_backward" if self.backward else "attend_small_forward"

    @property
    def kernels(self) -> list[str]:
        """Their names, in the order in which they count on each other."""
        if self.is_small:
            return [self._small_kernel]
        if not self.backward:
            return ["pack", "attend_forward"]
        last = ["relative_backward"] if self.length else []
        return ["pack", "attend_backward_queries", "attend_backward_keys", *last]

    def _launcher(self, name: str, heads: int) -> Launcher:
        from . import triton_kernels, triton_small_kernels

        kernel = getattr(triton_small_kernels if self.is_small else triton_kernels, name)
        at_once = self.together if name == "pack" else 1
        programs = heads // at_once * self.programs(name)
        return Launcher(kernel, programs, self.launch_constants(name, kernel.arg_names))

    def launch_constants(self, name: str, known: Iterable[str]) -> dict[str, Any]:
        """What a kernel is specialised by, of the names it knows, and triton's options."""
        tile = self.tile(name)
        rows, programs = tile.keys // self.constants["KEY_COLS"], self.programs(name)
        first = name == self.kernels[0]
        overlap = launches_overlap()
        constants = self.constants | {"BLOCK_M": tile.queries, "KEYS": tile.keys, "KEY_ROWS": rows}
        constants |= {"PROGRAMS": programs, "OVERLAP": overlap}
        chosen = {constant: constants[constant] for constant in known if constant in constants}
        # enable_fp_fusion: in float32 the scale and the largest logit enter an exponential in one instruction
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        if overlap and not first:  # that begins when all before it has ended: the others count on it
            options["launch_pdl"] = True
        return chosen | options | ({} if tile.registers is None else {"maxnreg": tile.registers})

    def programs(self, kernel: str) -> int:
        """How many programs of a kernel one image-head has; of `pack` as many heads as go together."""
        sizes, tile = self.constants, self.tile(kernel)
        if kernel == "pack":
            return max(self.query_lines, ceil_div(self.key_rows, self.key_lines))
        if kernel == "relative_backward":
            return self.splits
        if kernel.startswith("attend_small"):
            return self.parts
        if kernel == "attend_backward_keys":
            return sizes["STRIPS"] * ceil_div(self.height, tile.keys // sizes["KEY_COLS"])
        return ceil_div(self.pixels, tile.queries)

    @property
    def query_lines(self) -> int:
        """Lines of queries, or parts of them that fit a tile of `pack`."""
        line = self.tile("pack").queries // self.together
        return max(self.height * ceil_div(self.width, line), self.width * ceil_div(self.height, line))

    @property
    def key_rows(self) -> int:
        return self.constants["STRIPS"] * self.constants["GROUPS"] * GROUP

    def tile(self, kernel: str) -> Tile:
        """How a kernel is cut; a tile of keys stays within a strip and within the rows that share a tail."""
        tile = TILES[kernel](self.traits)
        if not kernel.startswith("attend") or kernel.startswith("attend_small"):
            return tile
        columns = self.constants["KEY_COLS"]
        return tile._replace(keys=min(max(tile.keys, columns), columns * GROUP))


def is_wide(depth: int, value_depth: int, dtype: torch.dtype, has_tables: bool) -> bool:
    """Whether heads fill a matrix product themselves, and go to triton_wide. In float32, and without tables, they are
    packed all the same."""
    parts = _layout(1, 1, depth, value_depth)
    return has_tables and dtype != torch.float32 and parts["MAIN"] + parts["TAIL"] + parts["DV_PAD"] > MOST_CHANNELS


def is_small(height: int, width: int, depth: int, value_depth: int, dtype: torch.dtype, table_dimensions: int) -> bool:
    """Whether a program has room for all keys of a head, so that nothing is packed: see triton_small_kernels."""
    most = SMALL_DEPTH if max(height, width) <= 8 else LARGER_DEPTH
    fits = max(height, width) <= SMALL_SIDE and depth <= most and value_depth <= SMALL_VALUE_DEPTH
    return fits and dtype != torch.float32 and table_dimensions == 2


def launches_overlap() -> bool:
    """Whether programs of a kernel may begin before the kernel that it follows has ended: on GPUs from Hopper on,
    unless AACONV_OVERLAP is 0."""
    wanted = os.environ.get("AACONV_OVERLAP") or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"AACONV_OVERLAP must be 0 (kernels one after the other) or 1, got {wanted!r}")
    if INTERPRETED or wanted == "0" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


plan_for = functools.lru_cache(maxsize=1024)(Plan)


def heads_at_a_time(heads: int, most: int, programs: int, beside: int) -> int:
    """Of so many heads, of which `most` fit: the number with which their programs, so many each, take the shortest,
    `beside` programs running beside each other."""

    def waves(some: int) -> int:
        whole, rest = divmod(heads, some)
        return whole * ceil_div(some * programs, beside) + ceil_div(rest * programs, beside)

    fewest = max(1, ceil_div(heads, most))
    return min((max(1, ceil_div(heads, launches)) for launches in range(fewest, 2 * fewest + 1)), key=waves)


def splits_of_a_head(heads: int, most: int, steps: int, beside: int) -> int:
    """In how many programs, at most so many, these heads take the shortest for their steps, so many programs running
    beside each other. To begin and to end a program takes as long as two steps."""

    def duration(splits: int) -> int:
        return ceil_div(heads * splits, beside) * (ceil_div(steps, splits) + 2)

    return min(range(1, max(1, most) + 1), key=duration)


def two_steps(rows: int) -> tuple[int, int] | None:
    """Factors of so many rows, to sum them in two steps; None where one does, or where there are none."""
    if rows <= SUMMED_AT_ONCE:
        return None
    factors = (n for n in range(2, SUMMED_AT_ONCE + 1) if rows % n == 0)
    first = min(factors, key=lambda n: abs(n * n - rows), default=None)
    return None if first is None else (first, rows // first)


def table_sums(rows: int, heads: int, splits: int, numbers: int) -> tuple[Sum, ...]:
    """How the parts of the tables' gradients [rows, heads, splits, numbers] become [heads, numbers]."""
    sums = [Sum(rows * heads, splits, numbers)] if splits > 1 else []
    left = rows
    if factors := two_steps(rows):
        first, left = factors
        sums.append(Sum(1, first, left * heads * numbers))
    return (*sums, *([Sum(1, left, heads * numbers)] if left != 1 else []))


def sum_names(sums: Sequence[Sum]) -> list[str]:
    """Of what the other kernels leave, of all that is between, and of the gradients of the tables."""
    return ["grad_tables", *(f"sums_{number}" for number in range(1, len(sums))), *(["table_sums"] if sums else [])]


def scratch_of_sums(sums: Sequence[Sum]) -> dict[str, int]:
    """The numbers of all but the last."""
    return {name: math.prod(one) or 1 for name, one in zip(sum_names(sums), sums, strict=False)}


def sum_steps(sums: Sequence[Sum]) -> Iterator[Step]:
    if not sums:
        return
    from .triton_sum_kernels import sum_rows

    for names, one in zip(pairwise(sum_names(sums)), sums, strict=True):
        programs = one.outer * ceil_div(one.numbers, SUM_TILE["BLOCK"])
        yield Step(Launcher(sum_rows, programs, SUM_TILE | {"num_warps": 4}), (one.rows, one.numbers), names)


def _layout(height: int, width: int, depth: int, value_depth: int) -> dict[str, int]:
    """How `pack` lays out its operands, see triton_pack."""
    main, rows_at, tail = key_parts(depth)
    columns = strip_columns(width)
    groups, strips = ceil_div(height, GROUP), ceil_div(width, columns)
    ones = padded(value_depth + 2) == padded(value_depth)  # not if they would double the values' products
    return {
        "D_PAD": padded(depth),
        "MAIN": main,
        "TAIL": tail,
        "ROWS_AT": rows_at,
        "KEY": padded(main + tail),
        "GROUP": GROUP,
        "GROUPS": groups,
        "COLUMNS": strips * columns,
        "TAILS_PADDED": padded(groups * tail),
        "COLUMNS_PADDED": padded(strips * columns),
        "PLACES": padded(strips * columns + groups * GROUP),
        "ONES": ones,
        "VALUES": padded(value_depth + 2 * ones),
        "DV_PAD": max(8, power_of_two(value_depth + ones)),
        "DELTAS": 0 if ones else 2 * ceil_div(height * width, 8) * 8,
        "KEY_COLS": columns,
        "STRIPS": strips,
        "ALL_SLOTS": strips * columns * groups * GROUP,
    }


def _small_layout(width: int, depth: int, value_depth: int, backward: bool) -> dict[str, int]:
    """How keys and queries are laid out, see triton_small_kernels. Heads of 17 to 24 channels leave the logits of eight
    rows room beside them, others those of all rows."""
    rows_at = ceil_div(depth, 8) * 8 if 16 < depth <= 24 else padded(depth)
    return {
        "DEPTH": 32 if depth <= 24 else 64,
        "ROWS_AT": rows_at,
        "GROUP": 8 if rows_at == 24 else 16,
        "MAIN": 16 if depth <= 24 else 32,
        "REST": 8 if rows_at == 24 else 0,
        "LINE": 8 if width <= 8 else 16,
        "DV_PAD": max(8, power_of_two(value_depth if backward else value_depth + 1)),
    }


def strip_columns(width: int) -> int:
    """Of the widest strips that do not pad the map much: fewer strips, fewer parts of the rows' gradients."""
    fits = 1.25 * ceil_div(width, 8) * 8
    return next(columns for columns in (32, 16, 8) if ceil_div(width, columns) * columns <= fits)


def key_parts(depth: int) -> tuple[int, int, int]:
    """MAIN, never more than the depth: the rest of q, the edge and the log-sum-exp follow it; ROWS_AT and TAIL."""
    main = 1 << (depth.bit_length() - 1) if depth >= 16 else 0
    rows_at = ceil_div(depth - main + 4, 8) * 8  # aligned
    return main, rows_at, padded(rows_at + GROUP)


def ceil_div(size: int, step: int) -> int:
    return -(-size // step)


def power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def power_below(size: float) -> int:
    return 1 << (int(size).bit_length() - 1)


def padded(size: int) -> int:
    """The power of two a matrix product can take as its depth."""
    return max(16, power_of_two(size))
