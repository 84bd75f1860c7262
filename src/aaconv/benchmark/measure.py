"""How everything here is measured.

Time: in each round every variant runs once, so that whatever else the machine does meets all of them alike; a variant's
figures are percentiles over the rounds. Memory: the most that torch's allocator held at once during a call, with what
the call needs to begin with (inputs, parameters).
"""

import gc
import json
import os
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..utils.compiled_graphs import keep_all_graphs

Call = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over the rounds, and the percentiles 20 and 80."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        p20, *_, p80 = quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 2
        p50 = quantiles(samples, n=2, method="inclusive")[0] if len(samples) > 1 else samples[0]
        return cls(p20, p50, p80)


def time_interleaved(
    calls: Mapping[Key, Call], device: torch.device, *, rounds: int = 20, sample_ms: float = 20, inside: int = 1
) -> dict[Key, Timing]:
    """Time every call `rounds` times, turn by turn. Short calls are repeated to fill sample_ms, and averaged: as a loop
    that calls nothing else takes.

    inside: how often a call does the thing itself; the figures are those of one.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got rounds={rounds}")
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, min(1000, round(sample_ms / max(1e-3, _sample(call, device, 1)))))
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(_sample(call, device, repeats[name]) / inside)
    return {name: Timing.of(values) for name, values in samples.items()}


def _sample(call: Call, device: torch.device, repeats: int) -> float:
    """Milliseconds of one call, as the mean over `repeats` back to back."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return 1e3 * (time.perf_counter() - start) / repeats
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    call()  # untimed: a loop that calls nothing else has no first call after another's turn
    before.record()
    for _ in range(repeats):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / repeats


def graphed(call: Call, *, repeats: int = 1, pool: Any = None, warm_up: int = 3) -> Call:
    """The call captured into a CUDA graph, `repeats` times in a row; returns what replays it.

    Graphs may share a pool (torch.cuda.graph_pool_handle()) as long as none needs a result of another.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(repeats):
            call()

    def replay() -> None:
        graph.replay()

    # Whatever the graph reads and runs must stay alive with it.
    replay.captured = call  # type: ignore[attr-defined]
    return replay


def compile_apart(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """torch.compile under a code object of its own.

    torch keeps compiled code by code object: functions that share one would try each other's guards at every call.
    """
    code, closure = function.__code__.replace(), function.__closure__
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    own.__kwdefaults__ = function.__kwdefaults__
    keep_all_graphs()
    return torch.compile(own, dynamic=False, **options)


def peak_memory(call: Call, device: torch.device, held: Iterable[Tensor] = ()) -> int:
    """Bytes at the highest point of one call: what it allocates on top, and the tensors `held` before it begins."""
    call()  # what is allocated once and kept (workspaces, momentum) is not the call's
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        on_top = torch.cuda.max_memory_allocated(device) - before
    else:
        on_top = _peak_of_allocations(call)
    return on_top + sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def _peak_of_allocations(call: Call) -> int:
    """The highest sum of what the CPU allocator gave and took back, as torch's profiler writes it into its trace."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about events of an earlier cycle, which there is none of
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        with TemporaryDirectory(prefix="aaconv-bench-") as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    return max(accumulate((change for _, change in sorted(changes, key=itemgetter(0))), initial=0))


def state_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def reason_of(error: BaseException) -> str:
    """An error in a few words, for a cell of a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    if lines:
        return f"{name}: {lines[0]}"[:160]
    torchs = str(Path(torch.__file__).parent)  # torch._assert stands between a network and its error
    lines_of_code = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(torchs)]
    where = "".join(f", at line {at.lineno} of {Path(at.filename).name}" for at in lines_of_code[-1:])
    return f"{name}, no reason given{where}"


@contextmanager
def failures_into(failures: dict[str, str], name: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes failures[name]; what is cached from before is given back first."""
    release()
    try:
        yield
    except Exception as error:
        failures[name] = reason_of(error)


def release() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
