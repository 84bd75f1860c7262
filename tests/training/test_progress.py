"""The display: plain lines where there is no terminal, two calm lines where there is one, followers, times."""

import io
import re
import sys

import pytest
from rich.console import Console

from aaconv.recipes import Model, Recipe
from aaconv.training import progress
from aaconv.training.progress import Clock, Display, TensorBoard, duration, following

RECIPE = Recipe("r", "", Model("aa_small"), "shapes", epochs=500, batch=64)
ROW = {"epoch": 499, "step": 99, "lr": 0.1, "train_loss": 1.234, "train_top1": 60.0, "loss": 1.1, "top1": 77.7}


class Time:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def console(terminal, width=80):
    colours = "truecolor" if terminal else None
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=colours)


def show(output, **row):
    """A display that has shown a step and an epoch, on that console."""
    with Display(RECIPE, 1000, console=output) as display:
        display.say("going on")
        display.step(498, 100, loss=1.5, accuracy=61.25, lr=0.0125, images=6400)
        display.step(498, 900, loss=1.25, accuracy=62.0, lr=0.0125, images=57_600)
        display.epoch(ROW | row)
    return output.file.getvalue()


def test_plain_lines_have_no_control_characters(monkeypatch):
    clock = Time(monkeypatch)
    output = console(terminal=False)
    with Display(RECIPE, 1000, console=output) as display:
        display.step(0, 10, loss=1.5, accuracy=61.25, lr=0.0125, images=640)
        clock.now += 10
        display.step(0, 110, loss=1.25, accuracy=62.0, lr=0.0125, images=7040)
        display.epoch(ROW | {"top5": 93.04})
    lines = output.file.getvalue().splitlines()
    assert lines[0] == "  epoch 1/500 step 10/1000  loss 1.500  61.2 %  lr 0.0125"
    left = duration((500_000 - 110) / 10)
    assert lines[1] == f"  epoch 1/500 step 110/1000  loss 1.250  62.0 %  lr 0.0125  640 images/s  {left} left"
    assert lines[2] == "epoch 499/500  train loss 1.234 60.0 %  loss 1.100  top-1 77.7 %  top-5 93.0 %"
    assert len(lines) == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", output.file.getvalue())


@pytest.mark.parametrize("width", [80, 120])
def test_everything_fits_the_terminal(width, monkeypatch):
    Time(monkeypatch)
    text = show(console(terminal=True, width=width), top5=93.0)
    moves, colours = r"\x1b\[\d*[AK]|\r", r"\x1b\[[0-9;?]*[A-Za-z]"
    lines = re.sub(colours, "", re.sub(moves, "\n", text)).splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("epoch 499/500" in line and "step 900/1000" in line for line in lines)
    assert any("loss 1.250" in line and "accuracy 62.0 %" in line and "learning rate 0.0125" in line for line in lines)
    assert any("top-1 77.7 %" in line for line in lines)


def test_detectors_and_missing_evaluations(monkeypatch):
    Time(monkeypatch)
    output = console(terminal=False)
    with Display(RECIPE, 10, console=output) as display:
        display.step(0, 5, loss=1.5, lr=0.1, images=10)
        display.epoch({"epoch": 1, "train_loss": 0.5, "mAP": 36.84, "mAP50": 50.0})
        display.epoch({"epoch": 2, "train_loss": 0.5, "loss": None, "top1": ""})
    lines = output.file.getvalue().splitlines()
    assert lines[0] == "  epoch 1/500 step 5/10  loss 1.500  lr 0.1"
    assert lines[1] == "epoch   1/500  train loss 0.500  mAP 36.8 %  mAP50 50.0 %"
    assert lines[2] == "epoch   2/500  train loss 0.500"


@pytest.mark.parametrize(("terminal", "seconds"), [(True, progress.ON_TERMINAL), (False, progress.ELSEWHERE)])
def test_updates_are_due_now_and_then(terminal, seconds, monkeypatch):
    clock = Time(monkeypatch)
    with Display(RECIPE, 10, console=console(terminal)) as display:
        display.step(0, 1, loss=1.0, lr=0.1, images=1)
        assert not display.due()
        clock.now += 0.9 * seconds
        assert not display.due()
        clock.now += 0.2 * seconds
        assert display.due()


def test_silence():
    with Display.silent() as display:
        display.say("hush")
        display.step(0, 1, loss=1.0, lr=0.1, images=1)
        display.epoch(ROW)
        assert not display.due()


def test_time_left_counts_from_where_the_run_goes_on(monkeypatch):
    time = Time(monkeypatch)
    clock = Clock(first=500, total=1000)
    assert clock.seconds_left() is None
    clock.tick(510, 100)
    time.now += 5
    clock.tick(520, 200)
    assert clock.seconds_left() == pytest.approx(240)
    assert clock.images_per_second() == pytest.approx(20)
    clock.pause()
    assert clock.images_per_second() is None


def test_the_speed_is_that_of_the_last_seconds(monkeypatch):
    time = Time(monkeypatch)
    clock = Clock(0, 100)
    for step in range(100):
        time.now += 1
        clock.tick(step, 10 * step if step < 50 else 500 + 100 * (step - 50))
    assert clock.images_per_second() == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (12307, "3:25:07"), (183_600, "2 d 03 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Recorder:
    def __init__(self):
        self.told = []

    def step(self, step, values):
        self.told.append((step, dict(values)))

    def epoch(self, row):
        self.told.append(row["epoch"])

    def close(self):
        self.told.append("closed")


def test_followers_are_told_until_the_block_ends(monkeypatch):
    Time(monkeypatch)
    follower = Recorder()
    with following(follower), Display(RECIPE, 10, console=console(False)) as display:
        display.step(2, 5, loss=1.0, accuracy=50.0, lr=0.1, images=1)
        display.epoch(ROW)
    display.epoch(ROW)
    assert follower.told == [(25, {"loss": 1.0, "accuracy": 50.0, "lr": 0.1}), 499, "closed"]


def test_tensorboard_is_asked_for_only_where_wanted(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="needs the package tensorboard"):
        TensorBoard(tmp_path)


def test_tensorboard_gets_every_number(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with following(TensorBoard(tmp_path / "never")):
        pass
    assert written == []  # a run that never began leaves nothing
    with following(TensorBoard(tmp_path / "events")), Display(RECIPE, 10, console=console(False)) as display:
        display.step(0, 5, loss=1.0, lr=0.1, images=1)
        display.epoch(ROW | {"top5": None})
    assert written[0] == str(tmp_path / "events")
    assert ("step/loss", 1.0, 5) in written
    assert ("epoch/top1", 77.7, 99) in written
    assert not any("top5" in str(one) for one in written)
    assert written[-1] == "closed"
