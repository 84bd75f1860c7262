"""A run that was interrupted, in whatever way, ends as if it had not been: the same bytes."""

import errno
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from aaconv.models import create_model
from aaconv.recipes import Model
from aaconv.runs import run_folder
from aaconv.tasks.classify import Classify
from aaconv.training import checkpoint
from aaconv.training.optimize import batch_norm_scales
from aaconv.training.trainer import NotFinite, resume, train
from aaconv.utils.files import replacing
from support.training_runs import (
    TEN_STEPS,
    Running,
    checkpoints,
    cut,
    edit_recipe,
    end_like,
    outcome,
    resume_child,
    tiny,
    train_child,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")


def test_training_twice_gives_the_same_bytes(whole, run):
    train(TEN_STEPS, run, device="cpu")
    assert outcome(run) == outcome(whole)
    assert checkpoints(run) == ["step-00000006", "step-00000008", "step-00000010"]


@pytest.mark.processes
@pytest.mark.parametrize("step", [2, 6])
def test_killed_and_resumed(step, whole, run, tmp_path):
    running = Running(train_child, TEN_STEPS, run, log=tmp_path / "log")
    wait_for(lambda: checkpoints(run) and int(checkpoints(run)[-1][5:]) >= step)
    running.kill()
    assert not (run / "summary.json").exists()
    end_like(whole, run)


@pytest.mark.processes
def test_killed_again_and_again_at_random_moments(run, tmp_path):
    recipe, whole = tiny(epochs=8, checkpoint_every=2, ema=0.8), tmp_path / "whole"
    train(recipe, whole, device="cpu")
    moments, kills = random.Random(3), 0
    running = Running(train_child, recipe, run, log=tmp_path / "log")
    wait_for((run / "recipe.yaml").exists)
    while kills < 6 and not (run / "summary.json").exists():
        time.sleep(moments.uniform(0.02, 0.3))
        running.kill()
        kills += 1
        running = Running(resume_child, run, log=tmp_path / "log")
        wait_for(lambda running=running: "resuming from" in running.text or "no checkpoint yet" in running.text)
    assert running.wait()[0] == 0
    assert kills >= 2
    assert outcome(run) == outcome(whole)


def train_and_die(recipe, run, place, call):
    """Train, and be killed by the system at the call-th call of a function, before it does anything."""
    module, name = {
        "file": (checkpoint, "write_file"),
        "rename": (os, "replace"),
        "removal": (shutil, "rmtree"),
        "link": (run_folder, "link"),
    }[place]
    function, calls = getattr(module, name), 0

    def deadly(*arguments, **options):
        nonlocal calls
        calls += "checkpoints" in str(arguments[0])
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(module, name, deadly)
    train_child(recipe, run)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("place", "call"),
    [("file", 3), ("file", 11), ("rename", 1), ("rename", 2), ("removal", 7), ("link", 4)],
)
def test_killed_while_a_checkpoint_is_written(place, call, whole, run, tmp_path):
    assert Running(train_and_die, TEN_STEPS, run, place, call, log=tmp_path / "log").wait()[0] == 128 + signal.SIGKILL
    assert not (run / "summary.json").exists()
    end_like(whole, run)
    assert not list((run / "checkpoints").glob(".*"))


def test_killed_before_the_summary(whole, run):
    """All steps are done: what is left is the summary."""
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    (run / "model.safetensors").unlink()
    end_like(whole, run)
    assert resume(run, device="cpu")["steps"] == 10


def test_a_half_written_checkpoint_is_ignored_and_removed(whole, run):
    cut(whole, run, newest=8)
    draft = run / "checkpoints" / ".draft-step-00000010"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half of i")
    end_like(whole, run)
    assert not draft.exists()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (flip, "model.safetensors"),
        (truncate, "optimizer.safetensors"),
        (Path.unlink, "random.safetensors"),
        (flip, "state.json"),
        (truncate, "manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(damage, file, whole, run, capfd):
    cut(whole, run, newest=8)
    damage(run / "checkpoints/step-00000008" / file)
    end_like(whole, run)
    printed = capfd.readouterr().out
    said = [line for line in printed.splitlines() if "cannot be used" in line]
    assert len(said) == 1
    assert "step-00000008" in said[0]
    assert file in said[0]
    assert f"resuming from {run / 'checkpoints/step-00000006'}" in printed


def test_no_whole_checkpoint_is_an_error_with_a_way_out(whole, run):
    cut(whole, run, newest=8)
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* --from .*recipe\.yaml"):
        resume(run, device="cpu")


def test_without_any_checkpoint_the_run_starts_again(whole, run, capfd):
    cut(whole, run, newest=0)
    end_like(whole, run)
    assert "no checkpoint yet" in capfd.readouterr().out


@pytest.mark.processes
def test_a_full_disk_is_one_line_and_loses_nothing(whole, run, tmp_path):
    running = Running(train_child, tiny(epochs=50, checkpoint_every=2, ema=0.8), run, log=tmp_path / "log")
    wait_for(lambda: len(checkpoints(run)) >= 2)
    limit = 20_000  # bytes of a file, as if the disk were full in the middle of the weights
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (limit, limit))
    code, text = running.wait()
    assert code == 2
    errors = [line for line in text.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "Traceback" not in text
    last = checkpoint.paths(run / "checkpoints")[-1]
    assert f"cannot be written: File too large; the last good checkpoint is {last}" in errors[0]
    assert checkpoint.load(last).state["rows"] is not None
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("write", [0, 4, 12])
def test_no_space_at_any_write(write, whole, run, monkeypatch):
    real, writes = checkpoint.write_file, 0

    def full(path, data):
        nonlocal writes
        writes += 1
        if writes > write:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, data)

    for module in (checkpoint, run_folder):
        monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(OSError, match=r"cannot be written: No space left on device; (the last good|there is no)"):
        train(TEN_STEPS, run, device="cpu")
    assert not [path for path in run.rglob(".*")]
    monkeypatch.undo()
    end_like(whole, run)


def test_no_space_to_begin_or_to_go_on(whole, run, monkeypatch):
    def full(path, content):
        with replacing(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_json", full)
    with pytest.raises(OSError, match=rf"^{run} cannot be begun: No space left on device; name another folder"):
        train(TEN_STEPS, run, device="cpu")
    shutil.rmtree(run)
    cut(whole, run, newest=8)
    with pytest.raises(OSError, match=r"^its environment and weights cannot be written: No space .*step-00000008$"):
        resume(run, device="cpu")
    monkeypatch.undo()
    end_like(whole, run)


@pytest.mark.processes
def test_a_folder_that_vanishes(run, tmp_path):
    running = Running(train_child, tiny(epochs=50), run, log=tmp_path / "log")
    wait_for(lambda: checkpoints(run))
    os.rename(run, tmp_path / "elsewhere")
    code, text = running.wait()
    assert code == 2
    assert f"{run} has vanished, with its checkpoints; put it back" in text.splitlines()[-1]
    assert "Traceback" not in text
    assert not run.exists()


def loss_that_breaks(at):
    """A loss that is not a number in one step, the at-th from 0."""
    real, calls = Classify.loss, 0

    def loss(self, model, batch):
        nonlocal calls
        value, metrics = real(self, model, batch)
        calls += 1
        return (value * float("nan") if calls == at + 1 else value), metrics

    return loss


@pytest.mark.parametrize("step", [0, 4, 7])
def test_a_loss_that_is_not_finite_stops_the_run(step, whole, run, monkeypatch):
    monkeypatch.setattr(Classify, "loss", loss_that_breaks(step))
    with pytest.raises(NotFinite, match=f"the loss is not finite at step {step + 1}, epoch {step // 5 + 1}") as error:
        train(TEN_STEPS, run, device="cpu")
    there = checkpoints(run)
    assert all(int(name[5:]) <= step for name in there)
    assert (there[-1] if there else "no checkpoint yet") in str(error.value)
    monkeypatch.undo()
    end_like(whole, run)


def test_a_weight_that_is_not_finite_is_never_saved(run, monkeypatch):
    """A gradient can break down while the loss is still finite."""
    real = Classify.loss

    def loss(self, model, batch):
        weight = next(model.parameters())
        value, metrics = real(self, model, batch)
        return value + 0 * (weight[0] - weight[0].detach()).abs().sum().sqrt(), metrics  # 0 * infinity

    monkeypatch.setattr(Classify, "loss", loss)
    with pytest.raises(NotFinite, match="a weight is not finite after step 1"):
        train(tiny(checkpoint_every=1), run, device="cpu")
    assert checkpoints(run) == []


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_evaluation_that_is_not_finite_is_left_out_and_ends_no_run(value, run, monkeypatch, capsys):
    real = Classify.evaluate
    broken = {"loss": float(value)}
    monkeypatch.setattr(Classify, "evaluate", lambda *arguments: real(*arguments) | broken)
    line = "the loss of the evaluation is not finite after step"
    with pytest.raises(NotFinite, match=rf"{line} 10, epoch 2; .*step-0*8;"):
        train(TEN_STEPS, run, device="cpu")
    assert f"{line} 5, epoch 1: it is left out" in capsys.readouterr().out
    assert not (run / "summary.json").exists()
    monkeypatch.undo()
    resume(run, device="cpu")
    rows = run_folder.read_metrics(run)
    assert [row.get("top1") is None for row in rows] == [True, False]


def test_weights_that_are_huge_after_the_last_step_are_not_saved(run):
    """No weight is infinite, and the loss of the only step was that of the fresh network."""
    with pytest.raises(NotFinite, match="the loss of the evaluation is not finite after step 1, epoch 1; there is no"):
        train(tiny(epochs=1, batch=80, lr=1e30, warmup=0.0), run, device="cpu")
    assert checkpoints(run) == []
    assert not (run / "summary.json").exists()


def test_a_folder_with_a_run_is_refused_with_the_way_out(whole):
    before = outcome(whole)
    with pytest.raises(ValueError, match=rf"{whole} holds a run already; .* --resume {whole}"):
        train(TEN_STEPS, whole, device="cpu")
    assert outcome(whole) == before


def test_a_finished_run_is_left_as_it_is(whole, capfd):
    before = outcome(whole)
    assert resume(whole, device="cpu")["finished"]
    assert "finished already" in capfd.readouterr().out
    assert outcome(whole) == before


def test_what_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        resume(tmp_path, device="cpu")


def test_what_a_killed_run_left_is_removed_by_the_next_start(whole, run):
    cut(whole, run, newest=8)
    gone = 2**22 + 1
    left = [run / f".{name}" for name in (f"model-best.{gone}.safetensors", f"curves.{gone}-0123456789abcdef.png")]
    others = [run / ".mine.txt", run / f".metrics.{os.getpid()}-0123456789abcdef.csv"]
    for path in (*left, *others):
        path.touch()
    end_like(whole, run)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_killed_while_the_last_checkpoint_prunes(whole, run):
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    shutil.copytree(run / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000004")
    end_like(whole, run)


def test_pruning_keeps_what_a_run_is_resumed_from(whole, run):
    cut(whole, run, newest=8)
    edit_recipe(run, keep=1)
    newest = checkpoint.paths(run / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    lines = []
    found = checkpoint.load_newest(run / "checkpoints", lines.append)
    checkpoint.prune(run / "checkpoints", found.path, 1)
    assert checkpoints(run) == ["step-00000006", "step-00000008"]
    resume(run, device="cpu")
    assert outcome(run) == outcome(whole)
    assert checkpoints(run) == ["step-00000010"]


def test_a_run_from_before_learned_batch_norm_scales_is_resumed(run):
    """Its scales were buffers, all of them one: they load as they are, and begin to learn where the run is resumed."""
    recipe = tiny(model=Model("plain_wrn16_4", {"width": 1}), size=24, train_limit=32, eval_limit=16)
    train(recipe, run, device="cpu")
    (run / "summary.json").unlink()
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step-00000004")
    first = checkpoint.load(folder / "step-00000002")
    model = create_model("plain_wrn16_4", width=1, num_classes=2)
    scales = batch_norm_scales(model)
    names = [name for name, parameter in model.named_parameters() if parameter in scales]
    kept = [place for place, parameter in enumerate(model.parameters()) if parameter not in scales]
    moments = {
        f"{new}.momentum_buffer": first.tensors["optimizer"][f"{old}.momentum_buffer"] for new, old in enumerate(kept)
    }
    weights = first.tensors["model"] | {name: torch.ones_like(first.tensors["model"][name]) for name in names}
    first.state["optimizer"]["groups"][0]["params"] = list(range(len(kept)))
    checkpoint.save(folder, 2, first.state, first.tensors | {"model": weights, "optimizer": moments}, keep=3)
    assert resume(run, device="cpu")["steps"] == 4
    last = checkpoint.load(folder / "step-00000004").tensors["model"]
    assert all((last[name] != 1).any() for name in names)
