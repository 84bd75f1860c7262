"""What backend=None takes is what the recorded benchmarks found faster."""

import json

import pytest
import torch

from aaconv.attention import _fastest_first
from aaconv.attention.measured import TABLE, prefers_sdpa
from aaconv.runs.results import RECORDED

LOSS = 1.1
"""A choice may cost this much: the boundary between the two is a depth, and large maps shift it."""


def recorded():
    for path in sorted((RECORDED / "benchmarks").glob("attention*.json")):
        record = json.loads(path.read_text())
        settings, rows = record["settings"], record["rows"]
        dtype = getattr(torch, settings["dtype"].removeprefix("torch."))
        for shape in dict.fromkeys(row["shape"] for row in rows):
            here = [row for row in rows if row["shape"] == shape and "failed" not in row]
            times = {row["variant"]: row["both_ms"]["p50"] for row in here}
            depths = next((row["key_depth"], row["value_depth"]) for row in rows if row["shape"] == shape)
            if {"triton", "sdpa"} <= set(times):
                positions = settings.get("positions", True)
                yield pytest.param(dtype, positions, depths, times, id=f"{path.stem}-{shape}")


@pytest.mark.parametrize(("dtype", "positions", "depths", "times"), list(recorded()))
def test_the_choice_is_the_faster_one(dtype, positions, depths, times):
    chosen = "sdpa" if prefers_sdpa(dtype, positions, *depths) else "triton"
    assert times[chosen] <= LOSS * min(times["triton"], times["sdpa"])


def test_both_are_chosen_somewhere():
    chosen = {prefers_sdpa(*parameter.values[:2], *parameter.values[2]) for parameter in recorded()}
    assert chosen == {True, False}
    assert len({(row.half, row.positions) for row in TABLE}) == 4


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_the_order_in_which_backends_are_asked():
    triton_first, sdpa_first = ["triton", "sdpa", "eager"], ["sdpa", "triton", "eager"]
    here = torch.zeros(1, 2, 2, 192)
    there = here.as_subclass(OnGpu)
    assert _fastest_first(here, True, 1, 64) == triton_first
    assert _fastest_first(there, True, 1, 64) == sdpa_first
    assert _fastest_first(there.bfloat16(), True, 1, 64) == triton_first
    assert _fastest_first(there.bfloat16(), False, 1, 64) == sdpa_first
    several = torch.zeros(1, 2, 2, 3 * 160).as_subclass(OnGpu)  # 8 heads of 20: the depth of a head decides
    assert _fastest_first(several, True, 8, 160) == triton_first
