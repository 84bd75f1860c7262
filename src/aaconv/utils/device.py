"""Which device to compute on, and how many cores there are."""

import os

import torch


def pick_device(name: str | None = None) -> torch.device:
    """The device of that name, by default a GPU if there is one; a ValueError if there is none such."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; choose cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here; --device cpu computes on the processor")
    return device


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
