"""Which of triton and sdpa is faster on a GPU, as measured: what `backend=None` goes by where both can run.

The recorded benchmarks are held against it by a test, and a GPU that is at hand by another:

    aaconv bench attention --shapes 128:14x14:32/32 4:64x64:64/64:12 ... --variants triton sdpa
    aaconv bench attention --shapes ... --variants triton sdpa --no-positions
    aaconv bench attention --shapes ... --variants triton sdpa --precision float32
"""

from typing import NamedTuple

import torch


class Measured(NamedTuple):
    """Of one kind of call: the deepest head, of keys or values, with which triton is the faster one."""

    half: bool
    positions: bool
    triton_up_to: int

    def __str__(self) -> str:
        dtype = "bfloat16, float16" if self.half else "float32"
        return f"{dtype} {'with' if self.positions else 'without'} relative positions"


TABLE = (
    Measured(half=True, positions=True, triton_up_to=128),
    Measured(half=True, positions=False, triton_up_to=32),
    Measured(half=False, positions=True, triton_up_to=24),
    Measured(half=False, positions=False, triton_up_to=24),
)
"""From sweeps on an H200; in float32 triton is faster with 20 channels and sdpa with 32. float32 without positions was
not swept: it follows float32 with them."""


def prefers_sdpa(dtype: torch.dtype, positions: bool, key_depth: int, value_depth: int) -> bool:
    """Whether sdpa is faster than triton for heads of these depths."""
    half = dtype != torch.float32
    (row,) = (row for row in TABLE if (row.half, row.positions) == (half, positions))
    return max(key_depth, value_depth) > row.triton_up_to
