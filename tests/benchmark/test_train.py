"""`aaconv bench train`: the loop and its bare steps, side by side."""

import json

import pytest

from aaconv import cli
from aaconv.benchmark import train

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


def test_noise_has_cifars_form():
    noise = train._noise(50, 0)
    assert noise.images.shape == (50, 32, 32, 3)
    assert len(noise.classes) == 100
    assert noise.augmentation.pad == 4


def test_data_that_are_not_there_are_named(bench, tmp_path, capsys):
    assert bench("--data-dir", str(tmp_path / "nothing"))[0] == 2
