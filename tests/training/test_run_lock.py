"""One trainer at a time in a run folder; a lock that ends with its process, and stops nobody else."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from aaconv import demo, recipes
from aaconv.cli import main
from aaconv.training import checkpoint
from aaconv.training.run_lock import LOCK, RunLock
from aaconv.training.trainer import NotFinite, resume, train
from support.training_runs import (
    Pair,
    Running,
    outcome,
    resume_child,
    tiny,
    train_child,
    wait_for,
    workers_of,
)

pytestmark = [pytest.mark.usefixtures("no_curves", "one_thread"), pytest.mark.processes]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def content(run):
    return {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@contextmanager
def training(run):
    """A process that trains, stopped in its second epoch: it stays there with all that it holds, and is killed then."""
    running = Running(train_child, tiny(epochs=500, checkpoint_every=2), run, log=run.parent / "log")
    try:
        wait_for(lambda: "epoch   1/500" in running.text and (run / "metrics.csv").exists())
        running.send(signal.SIGSTOP)
        wait_for(lambda: Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield running
    finally:
        running.kill()


def test_a_second_trainer_is_refused_and_changes_nothing(run, tmp_path, capsys):
    recipes.save(tiny(), tmp_path / "recipe.yaml")
    with training(run) as running:
        before = content(run)
        for words in (["--resume", str(run)], ["--from", str(tmp_path / "recipe.yaml"), "--run-dir", str(run)]):
            assert main(["train", *words, "--device", "cpu"]) == 2
            told = f"{run} is being trained by process {running.pid} on {socket.gethostname()}; wait for its end"
            assert capsys.readouterr().err.startswith(f"aaconv: error: {told}")
        assert content(run) == before


def test_who_only_reads_is_not_refused(run, tmp_path):
    with training(run):
        assert main(["eval", str(run), "--device", "cpu"]) == 0
        assert main(["push", str(run), "--to", str(tmp_path / "hub")]) == 0
    assert LOCK not in [path.name for path in (tmp_path / "hub").iterdir()]


def test_a_second_pair_of_processes_is_refused_in_one_line(run, tmp_path):
    with training(run) as running:
        codes, text = Pair(tmp_path, run, targets=(resume_child, resume_child)).wait()
    assert codes == [2, 2]
    assert text.count(f"is being trained by process {running.pid}") == 1


def test_nothing_is_left_at_the_end_or_after_an_interrupt(run, tmp_path):
    running = Running(train_child, tiny(epochs=500), run, log=tmp_path / "log")
    wait_for(lambda: checkpoint.paths(run / "checkpoints"))
    assert (run / LOCK).read_text() == f"process {running.pid} on {socket.gethostname()}\n"
    running.send(signal.SIGINT)
    assert running.wait()[0] == 130
    assert not (run / LOCK).exists()
    train(tiny(), tmp_path / "finished", device="cpu")
    assert not (tmp_path / "finished" / LOCK).exists()


def test_after_an_error_another_process_can_have_it(run, tmp_path):
    with pytest.raises(NotFinite):
        train(tiny(lr=1e30), run, device="cpu")
    assert not (run / LOCK).exists()
    assert Running(hold, run, 0, log=tmp_path / "log").wait()[0] == 0


def hold(run, seconds=60):
    """What a process runs that has the lock, and does nothing."""
    with RunLock(run) as lock:
        lock.take()
        (run / "held").touch()
        time.sleep(seconds)


def test_a_folder_without_a_run_is_held_as_well(run, tmp_path):
    run.mkdir()
    holder = Running(hold, run, log=tmp_path / "log")
    wait_for((run / "held").exists)
    with pytest.raises(ValueError, match=f"is being trained by process {holder.pid} on"):
        train(tiny(), run, device="cpu")
    holder.kill()
    assert (run / LOCK).exists()
    train(tiny(), run, device="cpu")  # what a killed process leaves is in nobody's way


def test_there_is_one_demo_at_a_time(tmp_path):
    """Between two of its runs none of them is locked."""
    (tmp_path / "demo").mkdir()
    holder = Running(hold, tmp_path / "demo", log=tmp_path / "log")
    wait_for((tmp_path / "demo" / "held").exists)
    with pytest.raises(ValueError, match=f"is being trained by process {holder.pid} on"):
        demo.run(tmp_path)
    holder.kill()


def test_a_demo_does_not_remove_a_run_that_is_trained(tmp_path):
    run, recipe = tmp_path / "demo-aa", recipes.get("demo-aa")
    run.mkdir()
    recipes.save(recipe, run / "recipe.yaml")
    holder = Running(hold, run, log=tmp_path / "log")
    wait_for((run / "held").exists)
    with pytest.raises(ValueError, match="is being trained by"):
        demo.own_folder(tmp_path, recipe)
    assert (run / "recipe.yaml").exists()
    holder.kill()


@pytest.mark.parametrize("how", ["no lockd", "not supported"])
def test_without_locks_it_trains_all_the_same(how, run, tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK if how == "no lockd" else errno.ENOTSUP, "no locks here")

    train(tiny(), tmp_path / "locked", device="cpu")
    monkeypatch.setattr(fcntl, "lockf", lockf)
    train(tiny(), run, device="cpu")
    assert outcome(run) == outcome(tmp_path / "locked")
    assert resume(run, device="cpu")["finished"]


def test_a_file_removed_before_it_is_locked_is_not_what_is_held(run, tmp_path, monkeypatch):
    """The trainer before removes it at its end: a lock on it would keep out nobody."""
    run.mkdir()
    real, calls = fcntl.lockf, 0

    def lockf(file, how):
        nonlocal calls
        calls += 1
        if calls <= 2:
            (run / LOCK).unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with RunLock(run) as lock:
        lock.take()
        assert (run / LOCK).read_text().startswith(f"process {os.getpid()} ")
    assert calls == 3


def test_a_disk_that_numbers_files_anew_is_no_trap(run, monkeypatch):
    run.mkdir()
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with RunLock(run) as lock:
        lock.take()


def test_another_users_lock_is_seen_without_the_right_to_write(run, tmp_path, monkeypatch):
    run.mkdir()
    holder = Running(hold, run, log=tmp_path / "log")
    wait_for((run / "held").exists)
    real = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ValueError, match=f"is being trained by process {holder.pid} on"), RunLock(run) as lock:
        lock.take()
    holder.kill()


def test_of_another_machine_that_may_be_gone_the_file_is_named(run, tmp_path, monkeypatch):
    run.mkdir()
    holder = Running(hold, run, log=tmp_path / "log")
    wait_for((run / "held").exists)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(ValueError, match=rf"if that machine is gone, remove {run / LOCK}"), RunLock(run) as lock:
        lock.take()
    holder.kill()


def test_the_lock_of_a_folder_that_took_the_place_stays(run, tmp_path):
    run.mkdir()
    with RunLock(run) as lock:
        lock.take()
        run.rename(tmp_path / "elsewhere")
        run.mkdir()
        (run / LOCK).write_text("of another")
    assert (run / LOCK).read_text() == "of another"


def folder_of_images(root):
    for split, number in (("train", 16), ("val", 4)):
        for label in ("ant", "bee"):
            (root / split / label).mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (24, 24), (index, 99, 180)).save(root / split / label / f"{index}.png")
    return root


def test_workers_that_outlive_a_killed_trainer_do_not_keep_the_lock(run, tmp_path):
    data = folder_of_images(tmp_path / "images")
    recipe = tiny(data=str(data), train_limit=None, eval_limit=None, size=24, workers=2, epochs=500, checkpoint_every=2)
    recipes.save(recipe, tmp_path / "recipe.yaml")
    command = [sys.executable, "-m", "aaconv", "train", "--from", str(tmp_path / "recipe.yaml"), "--run", str(run)]
    with (tmp_path / "log").open("w") as log:
        # LOCAL_RANK: what `workers_of` knows the processes of a run by.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0"}
        trainer = subprocess.Popen([*command, "--device", "cpu"], stdout=log, stderr=log, env=environment)
    workers = []
    try:
        wait_for(lambda: checkpoint.paths(run / "checkpoints"), seconds=60)
        workers = workers_of(trainer.pid)
        assert len(workers) >= 2
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # or they would see that they are alone, and end
        with pytest.raises(ValueError, match=f"is being trained by process {trainer.pid}"):
            resume(run, device="cpu")
        trainer.kill()
        trainer.wait()
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        with RunLock(run) as lock:
            lock.take()
            assert (run / LOCK).read_text().startswith(f"process {os.getpid()} ")
    finally:
        trainer.kill()
        trainer.wait()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
