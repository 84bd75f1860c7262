"""tools/count_compiled.py: what torch's compiler makes of a training step, counted without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.15.") or torch.version.cuda is None,
        reason="the tool takes private names of torch 2.15, built for CUDA",
    ),
]
ROOT = Path(__file__).parents[1]


def test_a_step_is_counted_without_a_gpu():
    command = [sys.executable, "tools/count_compiled.py", "--batch", "256", "--size", "64", "--capability", "80"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "aa_resnet18"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^aa_resnet18 +(.*)$", done.stdout, re.MULTILINE)
    forward, backward, total, *kernels, calls, backward_calls = map(float, re.findall(r"[\d.]+", row))
    assert total == pytest.approx(forward + backward, abs=0.02)
    assert 256 * 64 * 32 * 32 * 2 * 4 / 1e9 < forward < backward  # what the stem alone writes and reads
    assert min(kernels) > 0
    assert 20 < calls < backward_calls  # at least the convolutions
