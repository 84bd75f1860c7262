"""`aaconv bench accelerate`: before and after, side by side."""

import json

import pytest
import torch

from aaconv.benchmark import accelerate
from support.command_line import error_of, run

SAM = "samvit_base_patch16:depth=2,embed_dim=12,num_heads=2,window_size=2,neck_chans=8"
SMALL = ("bench", "accelerate", "--device", "cpu", "--size", "48", "--batch", "1", "--rounds", "2", "--no-compile")


@pytest.mark.slow
def test_ratios_are_those_of_the_medians(tmp_path, capsys):
    file = tmp_path / "accelerate.json"
    assert run(*SMALL, "--models", SAM, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert [(row["phase"], row["compiled"]) for row in result["rows"]] == [("infer", False), ("train", False)]
    for row in result["rows"]:
        before, after = row["before"], row["after"]
        assert row["time_ratio"] == after["ms"]["p50"] / before["ms"]["p50"]
        assert row["memory_ratio"] == after["peak_bytes"] / before["peak_bytes"]
        assert row["options"]["embed_dim"] == 12
        assert (row["batch"], row["size"]) == (1, 48)
    printed = capsys.readouterr().out
    assert "batch 1, 48 x 48" in printed
    assert f"{result['rows'][1]['time_ratio']:.3f}" in printed


@pytest.mark.slow
def test_only_one_of_both_is_accelerated(monkeypatch):
    prepared = []

    def prepare(model, batch, size, compiled, device):
        prepared.append(("forward" in vars(model.blocks[0].attn), compiled))
        return lambda: None, lambda: [torch.ones(1)]

    monkeypatch.setattr(accelerate, "prepare_inference", prepare)
    accelerate.run([SAM], batch=1, size=48, phases=["infer"], device="cpu", rounds=1)
    assert prepared == [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.slow
def test_what_fails_does_not_cost_the_rest(monkeypatch, capsys):
    def prepare(model, batch, size, compiled, device):
        if "forward" not in vars(model.blocks[0].attn):
            raise RuntimeError("too large\nby far")
        return lambda: None, lambda: [torch.ones(1)]

    monkeypatch.setattr(accelerate, "prepare_inference", prepare)
    accelerate.run([SAM], batch=1, size=48, phases=["infer"], compiled=False, device="cpu", rounds=1)
    printed = capsys.readouterr().out
    assert "before: RuntimeError: too large" in printed
    assert "failed" in printed


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("vit_tiny_patch16_224", "has no attention with 2-D relative positions"),
        ("resnet18", "ResNet has no attention with 2-D relative positions"),  # takes no img_size
        ("resnet18:deph=3", "resnet18:deph=3: ResNet.__init__() got an unexpected keyword argument 'deph'"),
        (
            "samvit_base_patch16:img_size=64",
            "samvit_base_patch16:img_size=64: img_size is set by --size; try --size 64",
        ),
        ("nosuch", "nosuch: Unknown model"),
        (f"{SAM},deph=3", "deph"),
    ],
)
def test_a_network_that_cannot_be_measured_is_named_at_once(model, told, capsys):
    assert told in error_of(capsys, *SMALL, "--models", model)


def test_an_unknown_name_has_no_usual_size():
    with pytest.raises(ValueError, match="unknown model 'nosuch'"):
        accelerate._sizes("nosuch", torch.device("cuda"), None, None)
    assert accelerate._sizes("botnet26t_256", torch.device("cuda"), 2, None) == (2, 256)
    assert accelerate._sizes("halonet26t", torch.device("cuda"), None, None) == (8, 256)


def test_classes_may_be_given():
    with torch.device("meta"):
        assert accelerate._build(accelerate.Network.parse("botnet26t_256:num_classes=7"), 64).num_classes == 7
