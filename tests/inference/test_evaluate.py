"""Evaluation: the run's own figures again, other data, confusions, and what does not fit together."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from aaconv.cli import main
from aaconv.inference.evaluate import Confused, Evaluation, confusions, evaluate, print_evaluation
from aaconv.runs.run_folder import read_summary
from aaconv.utils import terminal
from aaconv.utils.precision import autocast_like
from support.tiny_runs import break_weights, train_tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


def test_a_run_gives_its_own_figures_again(run):
    found, summary = evaluate(run, device="cpu"), read_summary(run)
    assert found.images == 48
    for name, value in found.metrics.items():
        assert value == pytest.approx(summary[name], rel=1e-5)


def test_named_data_are_taken_whole_and_limits_are_kept(run):
    assert evaluate(run, data="shapes", device="cpu", limit=100).images == 100
    found = evaluate(run, data="shapes", device="cpu")
    assert (found.images, found.data) == (5000, "shapes")
    assert sum(one.images for one in found.classes) == 5000
    right = sum(one.images * one.top1 / 100 for one in found.classes)
    assert 100 * right / 5000 == pytest.approx(found.metrics["top1"])


def test_an_explicit_limit_wins_over_that_of_the_recipe(run):
    assert evaluate(run, device="cpu").images == 48
    assert evaluate(run, device="cpu", limit=60).images == 60
    assert evaluate(run, device="cpu", limit=5).images == 5
    assert evaluate(run, device="cpu", limit=10**30).images == 5000


def test_a_model_by_name_needs_data():
    with pytest.raises(ValueError, match="--data NAME"):
        evaluate("plain_small", device="cpu")
    with pytest.raises(ValueError, match="unknown model 'photos'"):
        evaluate("photos", device="cpu")
    assert evaluate("plain_small", data="shapes", limit=20, device="cpu").images == 20


def test_the_batch_changes_nothing(run):
    first, second, third = (evaluate(run, batch=batch, device="cpu") for batch in (7, 48, 10**30))
    assert second == third
    assert first.metrics == pytest.approx(second.metrics, rel=1e-5)
    assert first.classes == second.classes


def test_other_classes_are_refused(run, tmp_path):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 50)).save(tmp_path / "images" / split / name / "0.png")
    with pytest.raises(ValueError, match="not the same: 'ant'"):
        evaluate(run, data=str(tmp_path / "images"), device="cpu")
    assert evaluate("plain_small", data=str(tmp_path / "images"), device="cpu").images == 2


def test_wrong_sources_weights_and_devices(run, tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        evaluate(str(tmp_path / "none"), data="shapes", device="cpu")
    with pytest.raises(ValueError, match="has no weights 'ema'; it has last, best"):
        evaluate(run, weights="ema", device="cpu")


@pytest.mark.parametrize("factor", [1e30, float("nan")])
@pytest.mark.parametrize("options", [[], ["--json"], ["--weights", "last", "--data", "shapes", "--limit", "10"]])
def test_weights_without_a_finite_loss_are_named(factor, options, run, tmp_path, capsys):
    broken = shutil.copytree(run, tmp_path / "broken")
    break_weights(run, broken / "model.safetensors", factor)
    assert main(["eval", str(broken), "--device", "cpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    told = f"the loss on shapes is not finite: the weights {broken}/model.safetensors are damaged or diverged"
    assert printed.err.startswith(f"aaconv: error: {told}")
    assert printed.err.count("\n") == 1


def test_a_long_evaluation_says_how_far_it_is(run, capsys, monkeypatch):
    evaluate(run, device="cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "QUIET", -1.0)
    evaluate(run, device="cpu", batch=32)
    assert capsys.readouterr().err == "32 of 48 images\n48 of 48 images\n"


def test_weights_without_a_run_are_evaluated_in_full_float32():
    assert torch.backends.cudnn.allow_tf32
    with autocast_like(None, torch.device("cuda")):
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


def test_confusions_name_the_worst_first():
    times = {(0, 0): 3, (0, 1): 1, (1, 0): 4, (1, 1): 1, (1, 2): 5}
    guesses = torch.tensor([pair for pair, number in times.items() for _ in range(number)])
    assert confusions(guesses, ["a", "b", "c"]) == [
        Confused("b", 10, 10.0, {"c": 5, "a": 4}),
        Confused("a", 4, 75.0, {"b": 1}),
    ]


def test_print_is_a_table_or_json(capsys):
    worst = Confused("n01440764", 50, 40.0, {"pike": 20, "eel": 10})
    others = [Confused(f"fish {number}", 50, 100.0, {}) for number in range(9)]
    found = Evaluation("runs/x", "fish", 1234, {"loss": 1.23456, "top1": 81.256, "top5": 95.0}, [worst, *others])
    print_evaluation(found)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["runs/x on 1,234 images of fish", "top-1 81.26 %, top-5 95.00 %, loss 1.2346"]
    assert lines[-1].split("  ")[-1] == "pike (20), eel (10)"
    assert max(map(len, lines)) <= 80
    print_evaluation(replace(found, metrics=found.metrics | {"top5": 100.0}))
    assert "top-5" not in capsys.readouterr().out  # of a handful of classes it says nothing
    print_evaluation(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["classes"][0]["taken_for"] == {"pike": 20, "eel": 10}
