"""Mixed precision: the autocast dtypes that a recipe can name, for training and for a trained network."""

from contextlib import AbstractContextManager

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The names that a recipe has for its autocast dtype; float32 means no autocast."""


def autocast(precision: str, device: torch.device, *, cache: bool = True) -> torch.autocast:
    """Autocast on the device in the dtype of that name; `cache` keeps casts of weights within the block."""
    dtype = DTYPES[precision]
    lower = dtype is not torch.float32
    return torch.autocast(device.type, dtype if lower else None, enabled=lower, cache_enabled=cache)


def autocast_like(precision: str | None, device: torch.device) -> AbstractContextManager:
    """On a GPU, autocast in the precision of a run; None, weights without a run, is float32 without TF32.

    So a GPU counts the same images right as a CPU.
    """
    if precision is None and device.type == "cuda":
        return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return autocast(precision if precision is not None and device.type == "cuda" else "float32", device)
