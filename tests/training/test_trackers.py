"""Trackers beside the CSV files."""

import sys
from types import SimpleNamespace

import pytest

from aaconv import cli
from aaconv.training.launch import start
from aaconv.training.trainer import NotFinite
from support.training_runs import tiny


@pytest.fixture
def tracked(monkeypatch):
    """What a tracker was told, in the place of both packages."""
    told = SimpleNamespace(begun=[], logged=[], finished=0)

    def finish():
        told.finished += 1

    package = SimpleNamespace(
        init=lambda **about: told.begun.append(about),
        log=lambda values, step: told.logged.append((step, values)),
        finish=finish,
    )
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setitem(sys.modules, "wandb", package)
    return told


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_is_told_of_every_epoch(name, tracked, tmp_path):
    start(tmp_path / "run", tiny(epochs=2), device="cpu", track=name)
    (about,) = tracked.begun
    assert (about["project"], about["name"], about["resume"]) == ("aaconv", "run", "allow")
    assert about["config"]["batch"] == 16
    assert ("id" in about) == (name == "wandb")
    epochs = [(step, values) for step, values in tracked.logged if "epoch/top1" in values]
    assert [step for step, _ in epochs] == [5, 10]
    assert all(isinstance(value, float) for _, values in epochs for value in values.values())
    assert tracked.finished == 1


def test_a_run_that_cannot_begin_is_not_tracked(tracked, tmp_path):
    with pytest.raises(ValueError, match="batch"):
        start(tmp_path / "run", tiny(batch=1000), device="cpu", track="wandb")
    assert not tracked.begun
    assert not tracked.finished


def test_a_run_that_fails_is_finished(tracked, tmp_path):
    with pytest.raises(NotFinite):
        start(tmp_path / "run", tiny(lr=1e30, warmup=0.0, epochs=4), device="cpu", track="trackio")
    assert tracked.finished == len(tracked.begun)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert (
        cli.main(["train", "demo-plain", "--track", "trackio", "--run", str(tmp_path / "run"), "--device", "cpu"]) == 2
    )
    assert "--track trackio needs the package trackio: pip install trackio" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_refuses_is_one_line(tracked, tmp_path, monkeypatch):
    def refuse(**about):
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ValueError, match="--track wandb: no API key; leave it out, or log in first"):
        start(tmp_path / "run", tiny(), device="cpu", track="wandb")
