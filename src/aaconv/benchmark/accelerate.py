"""`aaconv bench accelerate`: networks of timm before and after aaconv.accelerate, in one run.

Inference in bfloat16 and the training step under autocast, compiled and not, as `aaconv bench model` runs them. Rounds
of both are interleaved, so the ratios are those of the same minutes on the same machine.
"""

from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import nn

from ..layers.accelerate import accelerate
from ..models import check_name
from ..utils.device import pick_device
from .measure import Call, failures_into, peak_memory, release, time_interleaved
from .model import Network, prepare_inference, prepare_training
from .output import Progress, Results
from .switches import restoring_switches

MODELS = {"samvit_base_patch16": (4, 1024), "botnet26t_256": (128, 256)}
"""What is measured by default, with batch and image size."""
OTHER = (8, None)
CPU = (1, 256)
CLASSES = 1000
VARIANTS = ("before", "after")


@restoring_switches()
def run(
    models: list[str] | None = None,
    *,
    batch: int | None = None,
    size: int | None = None,
    phases: list[str] | None = None,
    compiled: bool = True,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure these networks and print a table. compiled: torch.compile beside the network as it is."""
    where = pick_device(device, needs_gpu="bench accelerate")
    networks = [_parse(text) for text in models or MODELS]
    rounds, ways = rounds or (20 if where.type == "cuda" else 3), (False, True) if compiled else (False,)
    sizes = {network.name: _sizes(network.name, where, batch, size) for network in networks}
    for network in networks:
        with torch.device("meta"):
            accelerate(_build(network, sizes[network.name][1]))  # what cannot be measured is found out now
    results, progress = Results("accelerate", where, json_to, sizes=sizes, rounds=rounds), Progress()
    for network in networks:
        for phase in phases or ("infer", "train"):
            results.add(*_measure(network, phase, *sizes[network.name], ways, where, rounds, progress))
            release()
    _print(results)


def _parse(text: str) -> Network:
    network = Network.parse(text)
    if "img_size" in network.options:
        raise ValueError(f"{network}: img_size is set by --size; try --size {network.options['img_size']}")
    return network


def _sizes(name: str, device: torch.device, batch: int | None, size: int | None) -> tuple[int, int]:
    usual = CPU if device.type == "cpu" else MODELS.get(name, OTHER)
    known = size or usual[1]
    if known is None:
        check_name(name)
        own = None if ":" in name else timm.get_pretrained_cfg(name)
        known = 224 if own is None or own.input_size is None else own.input_size[-1]
    return batch or usual[0], known


def _build(network: Network, size: int) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_classes": CLASSES, **network.options}
    try:
        return timm.create_model(network.name, img_size=size, **options)
    except (RuntimeError, TypeError) as error:
        if "unexpected keyword argument 'img_size'" not in str(error):
            raise ValueError(f"{network}: {error}") from None
    try:
        return timm.create_model(network.name, **options)  # takes images of any size
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{network}: {error}") from None


def _measure(
    network: Network,
    phase: str,
    batch: int,
    size: int,
    ways: tuple[bool, ...],
    device: torch.device,
    rounds: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """A row for each way (not compiled, compiled), all timed together."""
    prepare = prepare_inference if phase == "infer" else prepare_training
    calls: dict[tuple[bool, str], Call] = {}
    peaks: dict[tuple[bool, str], int] = {}
    failures: dict[bool, dict[str, str]] = {way: {} for way in ways}
    for way in ways:
        for variant in VARIANTS:
            progress(f"{network} {phase}, {variant} accelerate{', compiled' if way else ''}: preparing")
            with failures_into(failures[way], variant):
                model = _build(network, size)
                if variant == "after":
                    accelerate(model)
                call, held = prepare(model, batch, size, way, device)
                for _ in range(3):  # compiles, and makes the optimiser's state
                    call()
                peaks[way, variant], calls[way, variant] = peak_memory(call, device, held()), call
    progress(f"{network} {phase}: timing, {rounds} rounds")
    timed = time_interleaved(calls, device, rounds=rounds, sample_ms=100 if device.type == "cuda" else 1)
    for way in ways:
        row: dict[str, Any] = {
            "model": network.name,
            "options": network.options,
            "phase": phase,
            "batch": batch,
            "size": size,
        }
        row["compiled"] = way
        for key, timing in timed.items():
            if key[0] == way:
                row[key[1]] = {"ms": vars(timing), "peak_bytes": peaks[key]}
        if all(variant in row for variant in VARIANTS):
            before, after = (row[variant] for variant in VARIANTS)
            row["time_ratio"] = after["ms"]["p50"] / before["ms"]["p50"]
            row["memory_ratio"] = after["peak_bytes"] / before["peak_bytes"]
        yield row | ({"failed": failures[way]} if failures[way] else {})


def _print(results: Results) -> None:
    columns = ("model", "step", "before ms", "after ms", "p20 - p80", "ratio", "before", "after", "ratio")
    cells, notes = [], ["inference in bf16, training with bf16 autocast and SGD, channels_last; ratio: after / before"]
    for row in results.rows:
        step = f"{row['phase']}, compiled" if row["compiled"] else row["phase"]
        name = str(Network(row["model"], row["options"]))
        found = [row.get(variant) for variant in VARIANTS]
        times = [f"{one['ms']['p50']:.2f}" if one else "failed" for one in found]
        spread = "{p20:.2f} - {p80:.2f}".format(**found[1]["ms"]) if found[1] else ""
        peaks = [f"{one['peak_bytes'] / 2**30:.2f} GiB" if one else "" for one in found]
        ratios = [f"{row[kind]:.3f}" if kind in row else "" for kind in ("time_ratio", "memory_ratio")]
        cells.append([name, step, *times, spread, ratios[0], *peaks, ratios[1]])
        if (about := f"{name}: batch {row['batch']}, {row['size']} x {row['size']}") not in notes:
            notes.append(about)
        notes += [f"{name} {step}, {variant}: {reason}" for variant, reason in row.get("failed", {}).items()]
    results.finish(columns, cells, notes)
