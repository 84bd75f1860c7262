"""What local attention by fused kernels is held to, interpreted on the CPU and compiled on a GPU alike."""

import functools
import random
from dataclasses import dataclass

import torch

from aaconv.attention import eager, triton_backend
from aaconv.attention.windows import Window, make_window

from .fused_laws import output_and_gradients


@dataclass(frozen=True)
class Case:
    """A call: its map, windows and heads."""

    height: int
    width: int
    window: Window
    heads: int
    depth: int
    value_depth: int
    tables: str = "shared"
    batch: int = 2

    def __str__(self):
        heads = f"{self.heads} of {self.depth}/{self.value_depth}"
        return f"{self.batch} x {self.height}x{self.width}, {self.window}, {heads}, tables {self.tables}"

    def inputs(self, device="cpu", seed=0):
        """float64 qkv, rel_h, rel_w and a gradient of the output."""
        torch.manual_seed(seed)
        options = {"dtype": torch.float64, "device": device}
        qkv = torch.randn(
            self.batch, self.height, self.width, self.heads * (2 * self.depth + self.value_depth), **options
        )
        lead = {"shared": (), "per head": (self.heads,)}.get(self.tables)
        tables = (
            None if lead is None else torch.randn(*lead, 2 * side - 1, self.depth, **options)
            for side in self.window.size
        )
        grad = torch.randn(self.batch, self.height, self.width, self.heads * self.value_depth, **options)
        return qkv, *tables, grad

    def run(self, attend, inputs, dtype):
        return output_and_gradients(
            functools.partial(attend, window=self.window), inputs, dtype, self.heads, self.depth
        )


def random_case(seed, most=17, largest_window=9):
    """Odd sizes, even and odd windows, strides and dilations, windows beyond a side."""
    draw = random.Random(seed)
    sides = draw.randint(1, largest_window), draw.randint(1, largest_window)
    strides = tuple(draw.randint(1, side) if draw.random() < 0.5 else 1 for side in sides)
    dilations = tuple(draw.choice((1, 1, 2, 3)) for _ in sides)
    return Case(
        draw.randint(1, most),
        draw.randint(1, most),
        make_window(sides, strides, dilations),
        draw.randint(1, 2),
        draw.choice((4, 20, 33)),
        draw.choice((1, 3, 8, 17)),
        draw.choice(("shared", "shared", "per head", "none")),
        draw.randint(1, 2),
    )


def assert_as_good_as_eager(case, dtype, device="cpu", inputs=None, attend=triton_backend.attend):
    """Output and every gradient at most twice as far from float64 as the masked reference in the same dtype."""
    inputs = inputs or case.inputs(device)
    exact = case.run(eager.attend, inputs, torch.float64)
    reference = case.run(eager.attend, inputs, dtype)
    fused = case.run(attend, inputs, dtype)
    largest = max(truth.abs().max() for truth in exact)
    for name, ours, theirs, truth in zip(["out", "qkv", "rel_h", "rel_w"], fused, reference, exact, strict=False):
        assert ours.dtype == dtype
        assert ours.shape == truth.shape
        allowed = 2 * (theirs - truth).abs().max() + torch.finfo(dtype).eps * largest
        assert (ours - truth).abs().max() <= allowed, name
