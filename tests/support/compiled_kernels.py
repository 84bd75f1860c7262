"""What a compiled kernel takes of a GPU, without one."""

import re
import subprocess
from pathlib import Path

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
"""Triton brings it, not on every platform."""


def stack_bytes(cubin, folder):
    """Bytes per thread of what has no place in registers."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(cubin)
    usage = subprocess.run([DISASSEMBLER, "-res-usage", binary], capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr)
    return int(stack)
