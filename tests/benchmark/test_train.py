"""`aaconv bench train`: the loop and its bare steps, side by side."""

import json

import pytest

from aaconv import cli
from aaconv.benchmark import train
from aaconv.data.resident import InceptionLoader
from support.command_line import error_of

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

SMALL = ["--device", "cpu", "--model", "test_efficientnet_gn", "--batch", "8", "--images", "32", "--rounds", "2"]


@pytest.fixture
def bench(capsys):
    def run(*arguments):
        code = cli.main(["bench", "train", *SMALL, "--precision", "float32", *arguments])
        return code, capsys.readouterr().out

    return run


def test_the_ratio_is_that_of_the_medians(bench, tmp_path):
    code, printed = bench("--json", str(tmp_path / "train.json"))
    assert code == 0
    found = json.loads((tmp_path / "train.json").read_text())
    (row,) = found["rows"]
    assert (row["model"], row["steps"]) == ("test_efficientnet_gn", 4)
    assert row["epoch_to_bare"] == row["epoch_ms"]["p50"] / row["bare_ms"]["p50"]
    assert row["images_per_second"] == pytest.approx(32 / row["epoch_ms"]["p50"] * 1e3)
    assert 0.3 < row["epoch_to_bare"] < 5
    assert "noise of CIFAR-100's size" in printed
    assert f"{row['epoch_to_bare']:.3f}" in printed
    assert found["settings"]["precision"] == "float32"


@pytest.mark.slow
def test_larger_images_lie_on_the_device_as_a_recipe_keeps_them(bench, tmp_path, monkeypatch):
    """At the size that was asked for, by the loader of recipes with in_memory."""
    trainers, bare_steps = [], train._bare_steps
    monkeypatch.setattr(train, "_bare_steps", lambda trainer: trainers.append(trainer) or bare_steps(trainer))
    code, printed = bench("--size", "40", "--json", str(tmp_path / "train.json"))
    assert code == 0
    assert "noise of 40 x 40" in printed
    found = json.loads((tmp_path / "train.json").read_text())
    assert (found["settings"]["size"], found["rows"][0]["steps"]) == (40, 4)
    loader = trainers[0].train_loader
    assert isinstance(loader, InceptionLoader)
    images, _ = next(loader.batches())
    assert images.shape == (8, 3, 40, 40)


def test_a_size_and_real_images_exclude_each_other(capsys):
    assert "drop --size or --data-dir" in error_of(capsys, "bench", "train", "--size", "40", "--data-dir", "data")


def test_noise_has_cifars_form():
    noise = train._noise(50, 0)
    assert noise.images.shape == (50, 32, 32, 3)
    assert len(noise.classes) == 100
    assert noise.augmentation.pad == 4


def test_data_that_are_not_there_are_named(bench, tmp_path, capsys):
    assert bench("--data-dir", str(tmp_path / "nothing"))[0] == 2
