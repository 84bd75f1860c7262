"""Switches of the whole process: a benchmark sets what it needs, and leaves them as it found them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor

from ..utils.compiled_graphs import keep_all_graphs, keeps_all_graphs

VARIABLES = ("KINETO_LOG_LEVEL", "CUBLAS_WORKSPACE_CONFIG")

Switch = tuple[Callable[[], Any], Callable[[Any], object]]
"""What reads it, and what sets it."""


def _of_cudnn(name: str) -> Switch:
    return (lambda: getattr(torch.backends.cudnn, name)), (lambda value: setattr(torch.backends.cudnn, name, value))


_SWITCHES: dict[str, Switch] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    **{f"cudnn.{name}": _of_cudnn(name) for name in ("benchmark", "deterministic", "allow_tf32")},
    "all graphs kept on the disk": (keeps_all_graphs, keep_all_graphs),
    "kernels launched from C++": (lambda: inductor.cpp_wrapper, lambda value: launch_from_cpp(value)),
}


def launch_from_cpp(on: bool) -> None:
    """torch's compiler writes what launches the kernels in C++ instead of Python, from now on and in all threads.

    `torch._inductor.config` is not a public name, but the only one: as an option of torch.compile it does not reach the
    backward (torch 2.11, issue 178845).
    """
    inductor.cpp_wrapper = on


def read_switches() -> dict[str, Any]:
    """All switches that a benchmark may change, random numbers apart."""
    variables = {name: os.environ.get(name) for name in VARIABLES}
    return {name: get() for name, (get, _) in _SWITCHES.items()} | variables


@contextmanager
def restoring_switches() -> Iterator[None]:
    """Within it switches may be set and random numbers drawn; afterwards both are as before."""
    before = read_switches()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for name, (_, set_to) in _SWITCHES.items():
                set_to(before[name])
            for name in VARIABLES:
                os.environ.pop(name, None)
                if before[name] is not None:
                    os.environ[name] = before[name]
