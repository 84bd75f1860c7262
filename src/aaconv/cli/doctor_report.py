"""`aaconv doctor`: what this machine can run, and which attention backend each model would take, and why."""

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table

from ..attention import BACKENDS, choose_backend
from ..attention.measured import TABLE
from ..cost.known import cost_of, known_models
from ..utils.environment import cpu_name
from ..utils.terminal import fitting_console, new_table
from ..version import __version__

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SMALL_MAP = (7, 7, 8, 160, 48)
OPTIONAL = {
    "detection": ("torchmetrics", "faster-coco-eval"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "tensorboard": ("tensorboard",),
}
"""What is needed for some commands only: the extras of pyproject.toml."""

Attention = tuple[int, int, int, int, int]
"""height, width, num_heads, key_channels, value_channels."""


def print_report() -> None:
    """Versions and devices; for each backend whether it can run; for each augmented model the backend it would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output = fitting_console()
    for name, value in machine().items():
        output.print(f"{name:<9}{value}", markup=False, soft_wrap=True)
    output.print()

    backends = new_table(f"on {device.type}", *DTYPES, fold=True)
    reasons: dict[str, None] = {}
    for name in BACKENDS:
        answers = [why_not(name, SMALL_MAP, device, dtype) for dtype in DTYPES.values()]
        backends.add_row(name, *("yes" if reason is None else "no" for reason in answers))
        reasons.update({f"{name} is passed over: {reason}": None for reason in answers if reason})
    output.print(backends)
    output.print("The first that can run is taken; AACONV_BACKEND or set_default_backend overrides it.\n")
    output.print(_measured_table(), "Of deeper heads sdpa is faster, and taken first.\n", sep="\n")

    rows = []
    for name in (name for name in known_models() if name.startswith("aa_")):
        chosen = []
        for dtype in DTYPES.values():
            picks = [pick(attention, device, dtype) for attention in attentions(name)]
            chosen.append(", ".join(dict.fromkeys(backend for backend, _ in picks)))
            reasons.update((reason, None) for _, passed_over in picks for reason in passed_over)
        rows.append((name, attentions(name), chosen))
    output.print(_models_table(rows))
    for reason in reasons:
        output.print(reason, markup=False)


def _measured_table() -> Table:
    table = new_table("on a GPU, as measured on an H200", "triton is faster up to heads of", fold=True)
    for row in TABLE:
        table.add_row(str(row), f"{row.triton_up_to} channels")
    return table


def _models_table(rows: Iterable[tuple[str, list[Attention], list[str]]]) -> Table:
    """A column for both dtypes where they always take the same backend."""
    rows = list(rows)
    same = all(len(set(chosen)) == 1 for _, _, chosen in rows)
    table = new_table(
        "model", "attention: map, key/value depth per head", *(["backend"] if same else DTYPES), fold=True
    )
    for name, found, chosen in rows:
        table.add_row(name, ", ".join(map(_describe, found)), *(chosen[:1] if same else chosen))
    return table


def machine() -> dict[str, str]:
    """What is installed and what is there."""
    optional = (f"{name} {installed(name) or '-'}" for names in OPTIONAL.values() for name in names)
    return {
        "aaconv": f"{__version__}, python {platform.python_version()}, timm {installed('timm')}",
        "torch": f"{torch.__version__}, torchvision {installed('torchvision')}",
        "triton": installed("triton") or "not installed: the fused kernels cannot run",
        "optional": ", ".join(optional),
        "cpu": cpu_name(),
        "gpu": _gpu(),
    }


def installed(package: str) -> str | None:
    """The version of an installed package, which is not imported; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def attentions(model: str) -> list[Attention]:
    """The different attentions in one of our models, for the image size it is made for."""
    return list(
        dict.fromkeys(
            (branch.height, branch.width, branch.num_heads, branch.key_channels, branch.value_channels)
            for branch in cost_of(model).attention
        )
    )


def why_not(backend: str, attention: Attention, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the backend cannot run this attention here, if there is one."""
    tensors, sizes = _arguments(attention, device, dtype)
    return BACKENDS[backend].why_not(*tensors, **sizes)


def pick(attention: Attention, device: torch.device, dtype: torch.dtype) -> tuple[str, list[str]]:
    """The backend attend_2d takes, and why it passed over the faster ones."""
    tensors, sizes = _arguments(attention, device, dtype)
    try:
        chosen = choose_backend(*tensors, **sizes)
    except ValueError as error:
        return "none", [str(error)]  # one was named for the process, and cannot run
    passed_over = []
    for name in BACKENDS:
        if name == chosen:
            break
        if reason := BACKENDS[name].why_not(*tensors, **sizes):
            passed_over.append(f"{name} is passed over: {reason}")
    return chosen, passed_over


def _arguments(attention: Attention, device: torch.device, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict]:
    height, width, num_heads, key_channels, value_channels = attention
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    qkv = torch.empty(1, height, width, 2 * key_channels + value_channels, **like)
    tables = [torch.empty(2 * side - 1, key_channels // num_heads, **like) for side in (height, width)]
    return [qkv, *tables], {"num_heads": num_heads, "key_channels": key_channels}


def _describe(attention: Attention) -> str:
    height, width, num_heads, key_channels, value_channels = attention
    return f"{height}x{width} {key_channels // num_heads}/{value_channels // num_heads}"


def _gpu() -> str:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = f"compute capability {properties.major}.{properties.minor}"
        return f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return "none" + ("" if torch.version.cuda else ": this torch is built without CUDA")
