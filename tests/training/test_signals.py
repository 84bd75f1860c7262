"""Ctrl-C, SIGTERM and killed workers: answered at once, saved, and resumed to the same bytes."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from aaconv import recipes
from aaconv.tasks.classify import Classify
from aaconv.training.trainer import resume, train
from support.training_runs import TEN_STEPS, Running, checkpoints, end_like, outcome, tiny, train_child, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_curves", "one_thread")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves(number, code, whole, run, tmp_path):
    running = Running(train_child, TEN_STEPS, run, log=tmp_path / "log")
    wait_for(lambda: checkpoints(run))
    running.send(number)
    assert running.wait()[0] == code
    last = running.text.splitlines()[-1]
    step = int(checkpoints(run)[-1][5:])
    assert last == (
        f"aaconv: stopped at step {step}, saved {run}/checkpoints/step-{step:08d}; "
        f"resume with: aaconv train --resume {run}"
    )
    end_like(whole, run)


def train_slowly(recipe, run, *, training):
    """Each forward pass, of training or of evaluation, takes a while, which the file `pausing` tells of."""
    build = Classify.build

    def pause(module, inputs):
        if module.training == training:
            (run / "pausing").touch()
            time.sleep(20 if training else 0.3)

    def build_slow(self, info, **options):
        model = build(self, info, **options)
        model.register_forward_pre_hook(pause)
        return model

    Classify.build = build_slow
    train_child(recipe, run)


def test_a_signal_during_an_evaluation(run, tmp_path):
    recipe = tiny(eval_limit=160, epochs=1)
    train(recipe, tmp_path / "whole", device="cpu")
    running = Running(partial(train_slowly, training=False), recipe, run, log=tmp_path / "log")
    wait_for((run / "pausing").exists)
    running.send(signal.SIGTERM)
    assert running.wait()[0] == 143
    assert checkpoints(run) == ["step-00000005"]
    assert not (run / "metrics.csv").exists()
    end_like(tmp_path / "whole", run)


def catches(pid, number):
    """Does the process have a handler for this signal, or does it just end?"""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_second_interrupt_leaves_at_once(run, tmp_path):
    running = Running(partial(train_slowly, training=True), TEN_STEPS, run, log=tmp_path / "log")
    wait_for((run / "pausing").exists)
    assert catches(running.pid, signal.SIGINT)
    running.send(signal.SIGINT)
    wait_for(lambda: not catches(running.pid, signal.SIGINT))
    running.send(signal.SIGINT)
    assert running.wait(timeout=10)[0] == 130


def train_busily(recipe, run):
    """A forward pass that no handler of Python's interrupts: one long operation, as a backward pass is."""
    build = Classify.build

    def work(module, inputs):
        # From a thread, while the operation runs: before it begins, a signal would be handled at once.
        threading.Timer(0.2, (run / "working").touch).start()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 60_000_000)

    def build_busy(self, info, **options):
        model = build(self, info, **options)
        model.register_forward_pre_hook(work)
        return model

    Classify.build = build_busy
    train_child(recipe, run)


def test_the_first_interrupt_is_answered_in_the_middle_of_an_operation(run, tmp_path):
    running = Running(train_busily, TEN_STEPS, run, log=tmp_path / "log")
    wait_for((run / "working").exists)
    running.send(signal.SIGINT)
    wait_for(
        lambda: "aaconv: finishing the step, then saving a checkpoint; Ctrl-C again stops now\n" in running.text, 3
    )
    assert catches(running.pid, signal.SIGINT)  # the handler itself waits for the end of the operation
    running.send(signal.SIGINT)
    assert running.wait(timeout=3)[0] == 130


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A recipe on images that workers read, and the run of it that was never interrupted."""
    folder = tmp_path_factory.mktemp("files")
    for split, number in (("train", 16), ("val", 8)):
        for index in range(number):
            path = folder / "data" / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 36), (10 * index, 90, 200 - 9 * index)).save(path)
    data = {"data": f"folder/{folder / 'data'}", "train_limit": None, "eval_limit": None}
    recipe = tiny(**data, size=32, batch=4, workers=1, epochs=30, checkpoint_every=5)
    train(recipe, folder / "whole", device="cpu")
    recipes.save(recipe, folder / "recipe.yaml")
    return folder / "recipe.yaml", folder / "whole"


@contextmanager
def training(recipe, run, log):
    """`aaconv train` in a session of its own, with a worker that reads; from its first checkpoint on."""
    command = [sys.executable, "-m", "aaconv", "train", "--from", str(recipe), "--run", str(run), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_for(lambda: checkpoints(run), seconds=60)
        wait_for(lambda: children_of(process.pid))
        yield process
    finally:
        process.kill()
        process.wait()


def children_of(pid):
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def test_a_killed_data_worker_is_one_line_and_loses_nothing(of_files, run, tmp_path):
    recipe, whole = of_files
    with training(recipe, run, tmp_path / "log") as process:
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        assert process.wait(timeout=60) == 2
    text = (tmp_path / "log").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("aaconv: error: ")]
    # Its signal, its end or that of its pipe, whichever torch sees first.
    by_signal, at_all = r"\(pid \d+\) is killed by signal: Killed", r"\(pid\(s\) \d+\) exited unexpectedly"
    reason = rf"\((DataLoader worker ({by_signal}|{at_all})|its pipe has ended)\); "
    assert re.match(rf"aaconv: error: a data worker has died, most often because memory ran out {reason}", line)
    assert f"the last good checkpoint is {run}/checkpoints/step-" in line
    assert f"resume with: aaconv train --resume {run}" in line
    assert "Traceback" not in text
    resume(run, device="cpu")
    assert outcome(run) == outcome(whole)


def test_a_signal_does_not_reach_the_listener_by_way_of_a_worker(of_files, run, tmp_path):
    """At a terminal Ctrl-C reaches the workers, too: theirs must not count as a second one."""
    recipe, whole = of_files
    with training(recipe, run, tmp_path / "log") as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    text = (tmp_path / "log").read_text()
    assert text.count("Ctrl-C again stops now") == 1
    assert "stopped at step" in text
    resume(run, device="cpu")
    assert outcome(run) == outcome(whole)
