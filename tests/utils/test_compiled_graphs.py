"""What was compiled once is found on the disk, and what has changed is not."""

import json

import pytest

from support.fresh import run_fresh

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from aaconv import AAConv2d
from aaconv.utils.compiled_graphs import keep_all_graphs

kind, factor, keep = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "keep"
if keep:
    keep_all_graphs()

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return factor * grad

torch.manual_seed(0)
layer = AAConv2d(4, 16, 3, stride=2, size=(5, 5)) if kind == "layer" else Own.apply
x = torch.ones(1, 4, 10, 10, requires_grad=True)
torch.compile(lambda x: layer(x).sum())(x).backward()
found = counters["aot_autograd"]
print(json.dumps({"gradient": x.grad[0, 0, 0, 0].item(), "hits": found["autograd_cache_hit"]}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", raising=False)

    def run(kind, factor=1, keep="keep"):
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return json.loads(run_fresh(SCRIPT, kind, str(factor), keep, **kept))

    return run


def test_a_strided_layer_is_compiled_once(run):
    first, second = run("layer"), run("layer")
    assert (first["hits"], second["hits"]) == (0, 1)
    assert second["gradient"] == first["gradient"] != 0
    assert run("layer", keep="forget")["hits"] == 0  # else the switch would not be needed any more


def test_a_changed_backward_is_not_taken_from_the_disk(run):
    assert run("function", 2)["gradient"] == 2
    assert run("function", 3) == {"gradient": 3, "hits": 0}
    assert run("function", 2) == {"gradient": 2, "hits": 1}
