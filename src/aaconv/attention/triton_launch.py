"""Compiled kernels, started with as little of the host's time as can be."""

import copy
import functools
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel for pointers that are multiples of it, or for ones that are not."""

Start = Callable[[int, tuple], None]
"""Starts a compiled kernel on a stream, with all of its arguments."""


class Launcher:
    """A kernel for one grid, with all but its tensors and scalars fixed.

    Triton's own way to a compiled kernel looks at every argument again and asks the driver about every tensor, but not
    about an address. So a kernel is compiled by its first call, and then started by the addresses of its tensors.
    `constants` are the kernel's last arguments, and triton's options.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.constants = kernel, (programs, 1, 1), constants
        self.last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[Any, Start] = {}

    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[int | float]) -> None:
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
        start = self._compiled.get(key)
        if start is not None and nobody_listens():
            start(current_stream(device), (*addresses, *scalars, *self.last))
            return
        compiled = self._run(tensors, scalars)
        self._compiled[key] = shortest_start(compiled, self.grid)

    def start(self, device: int) -> Start | None:
        """What starts it with aligned tensors on that device, once it is compiled for them."""
        return self._compiled.get(device)

    def _run(self, tensors: Sequence[Tensor], scalars: Sequence[int | float]) -> Any:
        return self.kernel[self.grid](*tensors, *scalars, **self.constants)


class Step(NamedTuple):
    """A kernel of a program, and its scalars."""

    launcher: Launcher
    scalars: tuple[int, ...]
    names: tuple[str, ...] = ()
    """Of its tensors, where the kernel calls them otherwise."""


class Program:
    """Kernels that run one after the other, with scratch that they share: all of a call of the operator.

    A kernel's first arguments are tensors, and their names say which: those that a call brings, or pieces of the
    scratch. scratch, exact: the elements of each piece, in the dtype of the call or in float32.
    """

    def __init__(
        self, steps: Iterable[Step], scratch: Mapping[str, int], itemsize: int, exact: Mapping[str, int] | None = None
    ) -> None:
        self.steps, self.scratch, self.exact, self._itemsize = list(steps), scratch, exact or {}, itemsize
        self._places, self._bytes = [], 0
        for sizes, width in ((self.scratch, itemsize), (self.exact, torch.float32.itemsize)):
            for size in sizes.values():
                self._places.append(self._bytes)
                self._bytes += -(-size * width // ALIGNMENT) * ALIGNMENT
        self._starts: Sequence[tuple[Start, Callable[[list[int]], tuple], tuple]] = []

    def __call__(self, like: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Run it on the current device, that of `like`, whose dtype the scratch has. The names of the tensors come in
        the same order in every call."""
        buffer = like.new_empty(self._bytes // self._itemsize) if self._bytes else None
        if self._starts and not INTERPRETED:
            addresses = [tensor.data_ptr() for tensor in tensors.values()]
            bits = 0
            for address in addresses:
                bits |= address
            if not bits % ALIGNMENT and nobody_listens():
                if buffer is not None:
                    # Addresses: to make views of the scratch would take torch longer than to start the kernels.
                    first = buffer.data_ptr()
                    addresses += [first + place for place in self._places]
                stream = current_stream(like.get_device())
                for start, pick, last in self._starts:
                    start(stream, pick(addresses) + last)
                return
        named = {**tensors, **({} if buffer is None else dict(self._pieces(buffer)))}
        for step in self.steps:
            step.launcher([named[name] for name in self._names(step, named)], step.scalars)
        if not INTERPRETED:
            self._remember(list(named), torch.cuda.current_device())

    def _pieces(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The scratch by its names, in the order of the places."""
        places = iter(self._places)
        for sizes, dtype in ((self.scratch, buffer.dtype), (self.exact, torch.float32)):
            for name, size in sizes.items():
                place, length = next(places) // self._itemsize, size * dtype.itemsize // self._itemsize
                yield name, buffer.narrow(0, place, length).view(dtype)

    @staticmethod
    def _names(step: Step, known: Container[str]) -> Sequence[str]:
        return step.names or [name for name in step.launcher.kernel.arg_names if name in known]

    def _remember(self, order: list[str], device: int) -> None:
        """Keep what starts the kernels, if all of them are compiled for aligned tensors."""
        starts = []
        for step in self.steps:
            start = step.launcher.start(device)
            if start is None:
                return
            places = [order.index(name) for name in self._names(step, order)]
            starts.append((start, itemgetter(*places), (*step.scalars, *step.launcher.last)))
        self._starts = starts


def shortest_start(compiled: Any, grid: tuple[int, int, int]) -> Start:
    """What starts a compiled kernel: the C function that triton's launcher ends in, if it is one that we understand.

    Triton's way there takes the host four times as long: a dictionary for each launch, hooks that nobody has set,
    scratch that no kernel of ours has. What it hands to the C function differs from release to release, so a call is
    recorded here, with marks in the place of the stream and the kernel's arguments.
    """
    launcher: Any = getattr(compiled, "run", None)
    recorded: list[tuple] = []
    needs = ("global_scratch_size", "profile_scratch_size", "launch")
    if any(not hasattr(launcher, name) for name in needs) or getattr(launcher, "gsan_enabled", False):
        return _long_start(compiled, grid)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return _long_start(compiled, grid)
    probe, launch = copy.copy(launcher), launcher.launch
    probe.launch = lambda *arguments: recorded.append(arguments)
    stream, marks = object(), (object(), object())
    try:
        probe(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks)
    except (AttributeError, TypeError):
        return _long_start(compiled, grid)
    if len(recorded) != 1 or recorded[0][:4] != (*grid, stream):
        return _long_start(compiled, grid)
    between = recorded[0][4:]
    if between[-2:] == marks:
        between = between[:-2]
        return lambda stream, arguments: launch(*grid, stream, *between, *arguments)
    if between[-1] == marks:
        between = between[:-1]
        return lambda stream, arguments: launch(*grid, stream, *between, arguments)
    return _long_start(compiled, grid)


def _long_start(compiled: Any, grid: tuple[int, int, int]) -> Start:
    run = compiled[grid]
    return lambda stream, arguments: run(*arguments)


def nobody_listens() -> bool:
    """Whether no profiler has hooked into triton's launches."""
    runtime = _triton().knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks, hooks, or None
    return not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave)


def current_stream(device: int) -> int:
    return _triton().runtime.driver.active.get_current_stream(device)


@functools.cache
def _triton() -> Any:
    import triton

    return triton


def device_of(tensor: Tensor) -> AbstractContextManager:
    """The tensor's device as the current one; nothing to do where it is, or on a CPU."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING = nullcontext()


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
