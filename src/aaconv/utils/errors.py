"""Errors of others, of torch and timm above all, in one line of ours."""

import pickle
import re

import torch

LONGEST = 300
_CODES = re.compile(r"\x1b\[[0-9;]*m")


def one_line(error: BaseException) -> str:
    """What is wrong, without escape codes, tracebacks, or advice to load what may run code."""
    text = _CODES.sub("", str(error))
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text:
        found = re.search(r"GLOBAL (\S+)", text)
        return (
            f"it holds {found[1]}, not only tensors" if found else "it is not a file of tensors that torch has written"
        )
    line, *more = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if line.endswith(":") and more:  # torch lists below it what does not fit
        line = f"{line} {more[0]}"
    if not line or isinstance(error, LookupError):  # a KeyError says nothing but the key
        return f"{type(error).__name__} {line}".strip()[:LONGEST]
    return line[:LONGEST]


def is_out_of_memory(error: BaseException) -> bool:
    """Is it Python's, or torch's on a GPU or a CPU?"""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
