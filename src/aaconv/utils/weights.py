"""Files of weights: safetensors, and pickles of tensors only. Nothing that is read here can run code."""

import os
import warnings
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .errors import one_line

Tensors = dict[str, Tensor]


def encode(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, metadata={"format": "pt"})


def decode(data: bytes, name: str | Path) -> Tensors:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{name} is not a safetensors file and is not opened: {error}") from None


def read_weights(path: str | Path) -> Tensors:
    """The tensors of a .safetensors file, or of torch's .pt or .pth if there is nothing but tensors in it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} with weights")
    if path.suffix == ".safetensors":
        return decode(path.read_bytes(), path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of a later protocol, which then fail
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch's unpickler raises whatever broken bytes lead it to
        odd = isinstance(error, LookupError | EOFError | TypeError | AttributeError)
        reason = "it is not a file that torch has written" if odd else one_line(error)
        raise ValueError(f"{path} is not opened, it holds more than weights or is damaged: {reason}") from None
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not named or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds no weights by name")
    if empty := next((name for name, tensor in found.items() if tensor.is_meta), None):
        raise ValueError(f"{path} holds no numbers for {empty}: it was saved from the meta device")
    return found


def write_file(path: Path, data: bytes) -> None:
    """Into the file and onto the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
