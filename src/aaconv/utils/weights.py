"""Files of weights: safetensors, and pickles of tensors only. Nothing that is read here can run code."""

import os
import pickle
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

Tensors = dict[str, Tensor]


def encode(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, metadata={"format": "pt"})


def decode(data: bytes, name: str | Path) -> Tensors:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{name} is no safetensors file and is not opened: {error}") from None


def read_weights(path: str | Path) -> Tensors:
    """The tensors of a .safetensors file, or of torch's .pt or .pth if there is nothing but tensors in it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} with weights")
    if path.suffix == ".safetensors":
        return decode(path.read_bytes(), path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
        # A LookupError says nothing but the byte that was looked up.
        telling = str(error) and not isinstance(error, LookupError)
        reason = str(error).splitlines()[0] if telling else "it is not a file that torch has written"
        raise ValueError(f"{path} is not opened, it holds more than weights or is damaged: {reason}") from None
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds no weights by name")
    return found


def write_file(path: Path, data: bytes) -> None:
    """Into the file and onto the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
