"""Where the time of a call goes on a GPU: its kernels, by kind."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .measure import Call

OURS = re.compile(r"(attend|relative|window)_\w+|pack|sum_(tables|rows)")
"""Names of the kernels of attention."""

KINDS = {
    "pointwise": r"triton_poi",
    "reductions": r"triton_(red|per)|reduce_kernel",
    "convolutions and products": r"gemm|conv|nvjet|cutlass|cudnn|splitK|wgrad|dgrad|fprop",
    "optimiser": r"multi_tensor_apply|fused_sgd",
    "copies": r"(?i)mem(cpy|set)|copy",
}


def kernel_times(call: Call, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of one call by kind of kernel, the longest first; our own kernels have their names."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about events of an earlier cycle, which there is none of
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
    return by_kind(profiled.events(), repeats)


def by_kind(events: Iterable[Any], repeats: int) -> dict[str, float]:
    """Milliseconds of one repeat, of what the device did: the launches by the host are among the events, too."""
    times: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type == DeviceType.CUDA and event.device_time > 0:
            times[kind_of(event.name)] += event.device_time / 1000 / repeats
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def kind_of(kernel: str) -> str:
    if OURS.fullmatch(kernel):
        return kernel
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def ratio_if_free(step_ms: float, times: dict[str, float], first_ms: float) -> float | None:
    """A step against the first network's, if its kernels of attention took no time; None where it has none."""
    attention = sum(_of_attention(times).values())
    return (step_ms - attention) / first_ms if attention else None


def _of_attention(times: dict[str, float]) -> dict[str, float]:
    return {kind: ms for kind, ms in times.items() if OURS.fullmatch(kind)}


def describe(times: dict[str, float]) -> str:
    """In one line: the kinds, then what of it is attention."""
    ours = _of_attention(times)
    others = [f"{kind} {ms:.2f}" for kind, ms in times.items() if kind not in ours and ms >= 0.005]
    if ours:
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in ours.items())
        others.append(f"attention {sum(ours.values()):.2f} ({parts})")
    return ", ".join(others)
