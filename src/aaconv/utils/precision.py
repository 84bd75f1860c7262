"""Mixed precision: the dtypes that a recipe can name, and autocast for a trained network."""

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The names that a recipe has for its autocast dtype; float32 means no autocast."""


def autocast_like(precision: str | None, device: torch.device) -> AbstractContextManager:
    """On a GPU, autocast in the precision of a run; None, weights without a run, is float32 without TF32.

    So a GPU counts the same images right as a CPU.
    """
    if device.type != "cuda":
        return nullcontext()
    if precision is None:
        return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    dtype = DTYPES[precision]
    return nullcontext() if dtype is torch.float32 else torch.autocast("cuda", dtype)
