"""Compiled kernels, started with as little of the host's time as can be."""

import functools
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel for pointers that are multiples of it, or for ones that are not."""


class Piece:
    """A part of a buffer, known by its address: to make a view of it takes torch longer than to start a kernel."""

    __slots__ = ("_address", "_buffer", "_first", "_size")

    def __init__(self, buffer: Tensor, address: int, first: int, size: int) -> None:
        self._buffer, self._address, self._first, self._size = buffer, address, first, size

    def data_ptr(self) -> int:
        return self._address

    def tensor(self) -> Tensor:
        return self._buffer.narrow(0, self._first, self._size)


def pieces(like: Tensor, sizes: Iterable[int]) -> list[Piece]:
    """Uninitialised memory for so many elements each, in one allocation, every piece aligned."""
    step = ALIGNMENT // like.itemsize
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end += -(-size // step) * step
    buffer = like.new_empty(end)
    start, itemsize = buffer.data_ptr(), like.itemsize
    return [Piece(buffer, start + first * itemsize, first, size) for first, size in places]


class Launcher:
    """A kernel for one grid, with all but its tensors and scalars fixed.

    Triton's own way to a compiled kernel looks at every argument again and asks the driver about every tensor, but not
    about an address. So a kernel is compiled by its first call, and then started by the addresses of its tensors.
    `constants` are the kernel's last arguments, and triton's options.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.constants = kernel, (programs, 1, 1), constants
        self._compiled: dict[Any, tuple[Any, list[Any]]] = {}

    def __call__(self, tensors: Sequence[Tensor | Piece], scalars: Sequence[int | float]) -> None:
        """Run it on the current device; scalars that triton specialises for must be the same in every call."""
        if INTERPRETED:
            self._run(tensors, scalars)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        device = torch.cuda.current_device()
        key = (device, *(address % ALIGNMENT for address in addresses)) if bits % ALIGNMENT else device
        if key in self._compiled:
            start, constants = self._compiled[key]
            start(*addresses, *scalars, *constants)
            return
        compiled = self._run(tensors, scalars)
        known = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
        self._compiled[key] = compiled[self.grid], known

    def _run(self, tensors: Sequence[Tensor | Piece], scalars: Sequence[int | float]) -> Any:
        whole = (tensor.tensor() if isinstance(tensor, Piece) else tensor for tensor in tensors)
        return self.kernel[self.grid](*whole, *scalars, **self.constants)


def device_of(tensor: Tensor) -> AbstractContextManager:
    """The tensor's device as the current one; nothing to do where it is, or on a CPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


class Gpu(NamedTuple):
    """What the plans need to know of a GPU."""

    major: int
    minor: int
    shared_memory: int
    """Bytes that a program may have."""
    multiprocessors: int

    @property
    def has_wgmma(self) -> bool:
        """Whether products take their operands from shared memory: on other GPUs these fill registers."""
        return self.major in (9, 10)


H200 = Gpu(9, 0, 227 * 1024, 132)
"""For which the tiles were swept."""


@functools.cache
def gpu_at(index: int | None) -> Gpu:
    """The GPU of this index; of none, as for the interpreter, an H200."""
    if index is None:
        return H200
    found = torch.cuda.get_device_properties(index)
    shared_memory = getattr(found, "shared_memory_per_block_optin", 99 * 1024)
    return Gpu(found.major, found.minor, shared_memory, found.multi_processor_count)


def gpu_of(tensor: Tensor) -> Gpu:
    return gpu_at(tensor.device.index if tensor.is_cuda else None)
