"""`aaconv bench model`: whole networks, bf16, channels_last, compiled: inference and the training step.

Each is compiled once and timed twice: with its kernels launched one by one from the host ("launched") and replayed from
a CUDA graph ("graph"). For the graph, the time is also split by kind of kernel.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from ..models import create_model
from ..utils.device import pick_device
from ..utils.precision import autocast
from .kernels import describe, kernel_times, ratio_if_free
from .measure import (
    Call,
    Timing,
    compile_apart,
    failures_into,
    graphed,
    peak_memory,
    state_of,
    time_interleaved,
)
from .output import Progress, Results
from .switches import launch_from_cpp, restoring_switches

Prepared = tuple[Call, Callable[[], list[Tensor]]]
"""A call, and what gives the tensors it holds all the time."""


@dataclass(frozen=True)
class Network:
    """A registered model and the options it is built with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Network":
        """NAME or NAME:option=value,option=value; a value may be a list or a mapping, as in YAML."""
        name, _, rest = text.partition(":")
        options = {}
        for part in filter(None, re.split(r",(?![^\[{]*[\]}])", rest)):  # not at commas inside brackets
            option, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"a model is NAME or NAME:option=value,..., got {text!r}")
            options[option] = _value(value)
        return cls(name, options)

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    def build(self, size: int) -> nn.Module:
        torch.manual_seed(0)
        own_size = {"img_size": size} if self.name.startswith("aa_") else {}
        try:
            return create_model(self.name, **own_size, **self.options)
        except TypeError as error:
            raise ValueError(f"{self}: {error}") from None


@dataclass
class Case:
    """One network in one phase, ready to be called; `ways` are launched and graph."""

    network: Network
    phase: str
    ways: dict[str, Call] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    prepare_s: float = 0.0
    peak_bytes: int | None = None
    kernels_ms: dict[str, float] = field(default_factory=dict)

    def row(self, timings: dict[str, Timing], first: dict[str, Timing], batch: int) -> dict[str, Any]:
        row: dict[str, Any] = {"model": self.network.name, "options": self.network.options, "phase": self.phase}
        row |= {"peak_bytes": self.peak_bytes, "prepare_s": round(self.prepare_s, 1)}
        row |= {f"{way}_ms": vars(timing) for way, timing in timings.items()}
        row |= {f"{way}_to_first": timings[way].p50 / first[way].p50 for way in timings if way in first}
        if "graph" in timings and "graph" in first:
            free = ratio_if_free(timings["graph"].p50, self.kernels_ms, first["graph"].p50)
            row |= {} if free is None else {"free_attention_to_first": free}
        row |= {"images_per_second": max(1e3 * batch / timing.p50 for timing in timings.values())} if timings else {}
        row |= {"kernels_ms": self.kernels_ms} if self.kernels_ms else {}
        return row | ({"failed": self.failures} if self.failures else {})


@restoring_switches()
def run(
    models: list[str],
    *,
    batch: int | None = None,
    size: int = 224,
    phases: list[str] | None = None,
    compiled: bool = True,
    cpp_wrapper: bool = False,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure these models and print a table; the first is what the others are compared with.

    cpp_wrapper: torch's compiler writes what launches the kernels in C++ instead of Python.
    """
    if cpp_wrapper and not compiled:
        raise ValueError("--cpp-wrapper is an option of torch.compile: drop --no-compile")
    where = pick_device(device, needs_gpu="bench model")
    networks, phases = [Network.parse(text) for text in models], phases or ["infer", "train"]
    batch = batch or default_batch(where)
    settings: dict[str, Any] = {"batch": batch, "size": size, "compiled": compiled, "cpp_wrapper": cpp_wrapper}
    results = Results("model", where, json_to, **settings)
    launch_from_cpp(cpp_wrapper)
    for rows in measure(networks, phases, batch, size, compiled, where, rounds):
        results.replace(rows)
    print_rows(results, where, **settings)


def measure(
    networks: list[Network],
    phases: list[str],
    batch: int,
    size: int,
    compiled: bool,
    device: torch.device,
    rounds: int | None,
) -> Iterator[list[dict[str, Any]]]:
    """Yields all rows after every network, quickly timed, and at the end once more, timed in full.

    Every timing is over interleaved rounds of all networks that are ready.
    """
    for network in networks:
        with torch.device("meta"):
            network.build(size)  # a wrong name or option is found out now
    torch.backends.cudnn.benchmark = True  # as everybody trains: the best algorithm of each convolution is looked up
    progress, cases = Progress(), []
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    rounds = rounds or (20 if device.type == "cuda" else 5)
    for network in networks:
        for phase in phases:
            progress(f"{network} {phase}: preparing")
            cases.append(_prepare(network, phase, batch, size, compiled, device, pool))
            case = cases[-1]
            peak = f", peak {case.peak_bytes / 2**30:.2f} GiB" if case.peak_bytes else ""
            progress(f"{network} {phase}: ready in {case.prepare_s:.1f} s{peak}")
            for way, reason in case.failures.items():
                progress(f"{network} {phase}: {way} failed: {reason}")
        if network is not networks[-1]:
            yield _rows(cases, batch, device, rounds=min(3, rounds))
    progress(f"timing, {rounds} rounds")
    yield _rows(cases, batch, device, rounds=rounds)
    progress("done")


def default_batch(device: torch.device) -> int:
    return 128 if device.type == "cuda" else 2


def _prepare(
    network: Network, phase: str, batch: int, size: int, compiled: bool, device: torch.device, pool: Any
) -> Case:
    case, start = Case(network, phase), time.perf_counter()
    with failures_into(case.failures, "launched"):
        prepare = prepare_inference if phase == "infer" else prepare_training
        call, held = prepare(network.build(size), batch, size, compiled, device)
        for _ in range(3):  # compiles, and makes the optimiser's state
            call()
        case.peak_bytes = peak_memory(call, device, held())
        case.ways["launched"] = call
    if device.type == "cuda" and "launched" in case.ways:
        with failures_into(case.failures, "graph"):
            case.ways["graph"] = graphed(case.ways["launched"], pool=pool)
            case.kernels_ms = kernel_times(case.ways["graph"])
    case.prepare_s = time.perf_counter() - start
    return case


def prepare_inference(model: nn.Module, batch: int, size: int, compiled: bool, device: torch.device) -> Prepared:
    """One batch through the model in bfloat16."""
    model = model.to(device, torch.bfloat16, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    x = torch.randn(batch, getattr(model, "in_chans", 3), size, size, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)

    def forward(x: Tensor) -> Tensor:
        return model(x)

    forward = compile_apart(forward) if compiled else forward

    def call() -> None:
        with torch.no_grad():
            forward(x)

    return call, lambda: [x, *state_of(model)]


def prepare_training(model: nn.Module, batch: int, size: int, compiled: bool, device: torch.device) -> Prepared:
    """Forward under autocast, cross entropy, backward and a step of SGD on float32 parameters."""
    model = model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    x = torch.randn(batch, getattr(model, "in_chans", 3), size, size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(model.num_classes, (batch,), device=device)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=device.type == "cuda")

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        # No cache of casts: inside a CUDA graph it would outlive the step.
        with autocast("bf16", device, cache=False):
            return F.cross_entropy(model(x), labels)

    loss_of = compile_apart(loss_of) if compiled else loss_of

    def call() -> None:
        loss_of(x, labels).backward()
        optimizer.step()
        # At the end: gradients live only inside the call, and graphs that share a pool do not meet in them.
        optimizer.zero_grad(set_to_none=True)

    def held() -> list[Tensor]:
        momentum = [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        return [x, labels, *state_of(model), *momentum]

    return call, held


def _rows(cases: list[Case], batch: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    calls = {(index, way): call for index, case in enumerate(cases) for way, call in case.ways.items()}
    timed = time_interleaved(calls, device, rounds=rounds, sample_ms=100 if device.type == "cuda" else 1)
    timings = [{way: timed[index, way] for way in case.ways} for index, case in enumerate(cases)]
    first: dict[str, dict[str, Timing]] = {}
    for case, timing in zip(cases, timings, strict=True):
        first.setdefault(case.phase, timing)
    return [case.row(timing, first[case.phase], batch) for case, timing in zip(cases, timings, strict=True)]


def print_rows(
    results: Results, device: torch.device, *, batch: int, size: int, compiled: bool, cpp_wrapper: bool = False
) -> None:
    ways = ("launched", "graph") if device.type == "cuda" else ("launched",)
    columns = ["model", "phase"]
    for way in ways:
        columns += [f"{way} ms", "p20 - p80", "/ first"]
    free = ["free"] if any("free_attention_to_first" in row for row in results.rows) else []
    columns, cells = columns + free, []
    for row in sorted(results.rows, key=lambda row: row["phase"]):
        line = [_title(row), row["phase"]]
        for way in ways:
            line += _cells(row, way)
        line += [f"{row['free_attention_to_first']:.3f}" if "free_attention_to_first" in row else "" for _ in free]
        speed = f"{row['images_per_second']:,.0f}" if "images_per_second" in row else ""
        cells.append([*line, speed, f"{row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""])
    how = f"torch.compile{', launched from C++' if cpp_wrapper else ''}, " if compiled else ""
    about = f"{how}bf16, channels_last, batch {batch}, {size} x {size}; / first: against the first model"
    failed = [
        f"{_title(row)} {row['phase']}, {way}: {reason}"
        for row in results.rows
        for way, reason in row.get("failed", {}).items()
    ]
    kernels = [
        f"{_title(row)} {row['phase']}, ms: {describe(row['kernels_ms'])}"
        for row in results.rows
        if "kernels_ms" in row
    ]
    if free:
        about += "; free: that of the graph, if the kernels of attention took no time"
    results.finish([*columns, "images/s", "peak memory"], cells, [about, *kernels, *failed])


def _title(row: dict[str, Any]) -> str:
    return str(Network(row["model"], row["options"]))


def _cells(row: dict[str, Any], way: str) -> list[str]:
    if f"{way}_ms" not in row:
        return ["failed", "", ""]
    ms, ratio = row[f"{way}_ms"], row.get(f"{way}_to_first")
    return [f"{ms['p50']:.2f}", f"{ms['p20']:.2f} - {ms['p80']:.2f}", f"{ratio:.3f}" if ratio else ""]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text.startswith(("[", "{")):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(f"a value is a number, a text, [2, 4] or {{layer1.*: 2}}, got {text!r}") from None
    return {"True": True, "False": False, "None": None}.get(text, text)
