"""Which device to compute on, and how many cores there are."""

import os
from typing import Any

import torch


def pick_device(name: str | None = None, *, needs_gpu: str | None = None) -> torch.device:
    """The device of that name, by default a GPU if there is one; a ValueError if there is none such.

    needs_gpu: what runs on a CPU only if it is asked to.
    """
    has_gpu = torch.cuda.is_available()
    if name is None and needs_gpu and not has_gpu:
        raise ValueError(f"{needs_gpu} needs a GPU, and torch finds none; --device cpu tries it small on the CPU")
    try:
        device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; choose cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and not has_gpu:
        raise ValueError("torch finds no CUDA device here; --device cpu computes on the CPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"unknown device {name!r}; torch finds {torch.cuda.device_count()} CUDA devices, from 0 on")
    return device


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str | None = None) -> dict[str, Any]:
    """What recipes are fitted to: whether there is a GPU, the cores, and the processes that torchrun has started."""
    processes = os.environ.get("WORLD_SIZE", "1")
    gpu = pick_device(device).type == "cuda"
    return {"gpu": gpu, "cores": cores(), "processes": int(processes) if processes.isdecimal() else 1}
