"""`aaconv bench layer`: forward and backward of AAConv2d on every backend, beside the nn.Conv2d it replaces."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import BACKENDS
from ..layers.aaconv import AAConv2d
from ..utils.device import pick_device
from .measure import Call, failures_into, peak_memory, state_of, time_interleaved
from .output import Progress, Results, mib
from .switches import restoring_switches

CHANNELS = 256
ATTENTION: dict[str, Any] = {"key_channels": 160, "value_channels": 24, "num_heads": 8}


@restoring_switches()
def run(
    sizes: list[int],
    batch: int = 8,
    *,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure maps of size x size for each of `sizes` and print a table."""
    where, rounds = pick_device(device), rounds or 9
    settings = {"batch": batch, "channels": CHANNELS, "kernel_size": 3, **ATTENTION, "rounds": rounds}
    results, progress = Results("layer", where, json_to, **settings), Progress()
    for size in sizes:
        progress(f"{size} x {size}, batch {batch}")
        results.add(*measure(size, batch, where, rounds))
    columns = ("map", "layer", "p20 ms", "p50 ms", "p80 ms", "/ eager", "peak memory", "/ eager")
    about = f"3x3, {CHANNELS} -> {CHANNELS} channels, dk 160, dv 24, 8 heads, batch {batch}; forward and backward"
    skipped = {f"{row['layer']}: {row['skipped']}" for row in results.rows if "skipped" in row}
    results.finish(columns, [_cells(row) for row in results.rows], [about, *sorted(skipped)])


def measure(size: int, batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """One row per variant: timings, peak memory and their ratios to eager, or the reason why there are none."""
    calls: dict[str, Call] = {}
    memory: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, layer in _layers(size, device, failures).items():
        with failures_into(failures, name):
            x = torch.randn(batch, CHANNELS, size, size, device=device, requires_grad=True)
            grad_out = torch.randn_like(x, requires_grad=False)
            calls[name] = _both_passes(layer, x, grad_out)
            memory[name] = peak_memory(calls[name], device, [x, grad_out, *state_of(layer)])
    calls = {name: call for name, call in calls.items() if name in memory}
    timings = time_interleaved(calls, device, rounds=rounds)
    rows = []
    for name in ("conv2d", *BACKENDS):
        row: dict[str, Any] = {"size": size, "layer": name}
        if name in failures:
            rows.append(row | {"skipped": failures[name]})
            continue
        row |= {"ms": vars(timings[name]), "peak_bytes": memory[name]}
        if "eager" in timings:
            row["time_to_eager"] = timings[name].p50 / timings["eager"].p50
            row["memory_to_eager"] = memory[name] / memory["eager"]
        rows.append(row)
    return rows


def _both_passes(layer: nn.Module, x: Tensor, grad_out: Tensor) -> Call:
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), wanted, grad_out)


def _layers(size: int, device: torch.device, failures: dict[str, str]) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {"conv2d": nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, device=device)}
    channels = 2 * ATTENTION["key_channels"] + ATTENTION["value_channels"]
    for name, backend in BACKENDS.items():
        qkv = torch.empty(1, size, size, channels, device=device)
        reason = backend.why_not(qkv, None, None, num_heads=8, key_channels=ATTENTION["key_channels"])
        if reason is not None:
            failures[name] = reason
            continue
        layers[name] = AAConv2d(CHANNELS, CHANNELS, 3, size=size, backend=name, device=device, **ATTENTION)
    return layers


def _cells(row: dict[str, Any]) -> list[str]:
    start = [f"{row['size']} x {row['size']}", row["layer"]]
    if "skipped" in row:
        return [*start, "skipped"]
    times = [f"{row['ms'][name]:.2f}" for name in ("p20", "p50", "p80")]
    ratio = {name: f"{row[name]:.2f}" if name in row else "" for name in ("time_to_eager", "memory_to_eager")}
    return [*start, *times, ratio["time_to_eager"], mib(row["peak_bytes"]), ratio["memory_to_eager"]]
