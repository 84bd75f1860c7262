"""`aaconv doctor`: what this machine can run, and which attention backend each model would take, and why."""

import platform

import torch

from ..attention import BACKENDS, choose_backend
from ..cost.counting import build
from ..layers.aaconv import AAConv2d
from ..models import list_models
from ..utils.environment import version_of
from ..utils.terminal import console, new_table
from ..version import __version__

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SMALL_MAP = (7, 7, 8, 160, 48)

Attention = tuple[int, int, int, int, int]
"""height, width, num_heads, key_channels, value_channels."""


def print_report() -> None:
    """Versions and devices; for each backend whether it can run; for each augmented model the backend it would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output = console()
    for name, value in machine().items():
        output.print(f"{name:<9}{value}", highlight=False, markup=False, soft_wrap=True)
    output.print()

    backends = new_table("backend", *(f"{name} on {device.type}" for name in DTYPES), fold=True)
    for name in BACKENDS:
        answers = (why_not(name, SMALL_MAP, device, dtype) for dtype in DTYPES.values())
        backends.add_row(name, *("yes" if reason is None else f"no: {reason}" for reason in answers))
    output.print(backends, highlight=False)
    output.print(
        "The first that can run is taken; AACONV_BACKEND or set_default_backend overrides it.\n", highlight=False
    )

    models = new_table("model", "attention: map, key/value depth of a head", *DTYPES, fold=True)
    reasons: dict[str, None] = {}
    for name in list_models("aa_*"):
        found = attentions(name)
        chosen = []
        for dtype in DTYPES.values():
            picks = [pick(attention, device, dtype) for attention in found]
            chosen.append(", ".join(dict.fromkeys(backend for backend, _ in picks)))
            reasons.update((reason, None) for _, passed_over in picks for reason in passed_over)
        models.add_row(name, ", ".join(map(_describe, found)), *chosen)
    output.print(models, highlight=False)
    for reason in reasons:
        output.print(reason, highlight=False, markup=False, soft_wrap=True)


def machine() -> dict[str, str]:
    """What is installed and what is there."""
    return {
        "aaconv": f"{__version__}, python {platform.python_version()}, timm {version_of('timm')}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "triton": version_of("triton") or "not installed: the fused kernels cannot run",
        "gpu": _gpu(),
    }


def attentions(model: str) -> list[Attention]:
    """The different attentions in a registered model, for the image size it is made for; nothing is allocated."""
    layers = (layer for layer in build(model).modules() if isinstance(layer, AAConv2d))
    found = ((*layer.size, layer.num_heads, layer.key_channels, layer.value_channels) for layer in layers)
    return list(dict.fromkeys(found))


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
    like = {"device": device, "dtype": dtype}
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
