"""A benchmark leaves the process as it found it."""

import os

import pytest
import torch

from aaconv.benchmark import accelerate, attention, layer, model, table2, train
from aaconv.benchmark.switches import VARIABLES, read_switches, restoring_switches
from aaconv.utils.compiled_graphs import keep_all_graphs, keeps_all_graphs

SMALL = {
    "accelerate": lambda: accelerate.run(
        ["samvit_base_patch16:depth=1,embed_dim=12,num_heads=2,window_size=2,neck_chans=8"],
        **{"batch": 1, "size": 32, "phases": ["train"], "compiled": False, "device": "cpu", "rounds": 1},
    ),
    "attention": lambda: attention.run(["1:2x2:4/2"], ["eager"], device="cpu", rounds=1),
    "layer": lambda: layer.run([2], batch=1, device="cpu", rounds=1),
    "model": lambda: model.run(
        ["plain_small"], batch=1, size=32, phases=["train"], compiled=False, device="cpu", rounds=1
    ),
    "train": lambda: train.run("plain_small", batch=8, images=16, device="cpu", rounds=1),
}


def flip():
    """Every switch, to what it is not by default."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(3 - torch.get_num_threads() if torch.get_num_threads() < 3 else 1)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    torch._inductor.config.cpp_wrapper = not torch._inductor.config.cpp_wrapper
    keep_all_graphs(not keeps_all_graphs())
    for name in VARIABLES:
        os.environ[name] = "flipped"


def test_every_switch_is_restored_also_after_an_error():
    before, random = read_switches(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), restoring_switches():  # noqa: PT012
        flip()
        torch.manual_seed(123)
        flipped = read_switches()
        assert all(flipped[name] != value for name, value in before.items())
        raise ZeroDivisionError
    assert read_switches() == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_restores_what_it_sets(name, capsys):
    torch.manual_seed(7)
    before, random = read_switches(), torch.get_rng_state()
    SMALL[name]()
    assert read_switches() == before
    assert torch.equal(torch.get_rng_state(), random)


def test_table2_restores_what_it_sets(monkeypatch, capsys):
    monkeypatch.setattr(table2, "measure", lambda *_: flip() or iter([[]]))
    monkeypatch.setattr(table2, "print_rows", lambda *_, **__: None)
    before = read_switches()
    table2.run(device="cpu")
    assert read_switches() == before
