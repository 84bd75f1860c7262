"""Tests of kernels in triton's interpreter: a process of its own for each part of a file, so that workers share them.

The interpreter is chosen when triton decorates the kernels, and every other test wants them compiled.
"""

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest

PART = "AACONV_INTERPRETED_PART"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(file, part, parts):
    """Run every parts-th test of the file, from the part-th on, where triton interprets."""
    versions = [tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy")]
    if versions[0] < (3, 7) and versions[1] >= (2, 4):
        pytest.skip("the interpreter of this triton does not run with this numpy")
    environment = {**os.environ, "TRITON_INTERPRET": "1", PART: f"{part}/{parts}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def share_of_this_process(items):
    """The tests that this process was started for; None where it was not started for a part."""
    if PART not in os.environ:
        return None
    part, parts = map(int, os.environ[PART].split("/"))
    return items[part::parts]


def round_products_once(monkeypatch):
    """Sum the products of float32 in float64. The interpreter leaves them to numpy, whose BLAS sums in an order that
    the CPU and the shape of a tile decide: on some CPUs other tiles give other digits."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def dot(self, a, b, total, *rest):
        if total.data.dtype != np.float32:
            return plain(self, a, b, total, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
