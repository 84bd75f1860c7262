"""Two processes train as one would: the same course, and whatever stops one stops both."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from aaconv import recipes
from aaconv.data import DeviceLoader
from aaconv.recipes import Model
from aaconv.runs.run_folder import read_metrics
from aaconv.tasks.classify import Classify
from aaconv.training import checkpoint
from aaconv.training.trainer import resume, train
from aaconv.utils.distributed import World
from support.training_runs import Pair, free_port, tiny, train_child, wait_for, workers_of

PLAIN = Model("test_efficientnet_gn")  # no batch norm, and no dropout, which would differ between the processes
RECIPE = tiny(model=PLAIN, eval_limit=29, lr=0.01, ema=0.8)
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    train(RECIPE, run, device="cpu")
    return run


def assert_same_course(run, alone, rel=2e-4):
    for one, other in zip(read_metrics(run), read_metrics(alone), strict=True):
        assert one == pytest.approx(other, rel=rel)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_have_the_course_of_one(accumulate, alone, tmp_path):
    recipe = tiny(model=PLAIN, eval_limit=29, lr=0.01, ema=0.8, accumulate=accumulate)
    codes, text = Pair(tmp_path, recipe, tmp_path / "run").wait()
    assert codes == [0, 0], text
    assert_same_course(tmp_path / "run", alone)
    assert text.count("epoch 2/2") == 1  # one of them tells


def test_one_process_goes_on_with_the_run_of_two(tmp_path):
    run, pair = (
        tmp_path / "run",
        Pair(tmp_path, tiny(model=PLAIN, lr=0.01, epochs=40, checkpoint_every=2), tmp_path / "run"),
    )
    wait_for(lambda: checkpoint.paths(run / "checkpoints"))
    pair.both[1].send(signal.SIGTERM)  # to one of them
    codes, text = pair.wait()
    assert codes == [143, 143]
    assert text.count("stopped at step") == 1
    stopped = checkpoint.load(checkpoint.paths(run / "checkpoints")[-1])
    assert stopped.tensors["random"].keys() == {"0.cpu", "1.cpu"}
    recipe = recipes.load(run / "recipe.yaml")
    recipes.save(recipes.override(recipe, {"epochs": stopped.state["epoch"] + 1}), run / "recipe.yaml")
    assert resume(run, device="cpu")["finished"]


def train_with_bad_loss(recipe, run):
    real, calls = Classify.loss, 0

    def loss(self, model, batch):
        nonlocal calls
        value, metrics = real(self, model, batch)
        calls += 1
        return (value * float("nan") if calls == 7 else value), metrics

    Classify.loss = loss
    train_child(recipe, run)


def test_a_loss_that_is_not_finite_in_one_process_stops_both(tmp_path):
    pair = Pair(tmp_path, RECIPE, tmp_path / "run", targets=(train_child, train_with_bad_loss))
    codes, text = pair.wait()
    assert codes == [2, 2], text
    assert "the loss is not finite at step 7, epoch 2; the last finite checkpoint is" in text
    assert [path.name for path in checkpoint.paths(tmp_path / "run/checkpoints")] == ["step-00000005"]


def train_with_bad_data(recipe, run):
    real = DeviceLoader.load

    def load(self, plan):
        load.calls += 1
        if load.calls == 4:
            raise OSError("the disk with the images is gone")
        return real(self, plan)

    load.calls = 0
    DeviceLoader.load = load
    train_child(recipe, run)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_ends_both_at_once(rank, tmp_path):
    targets = [train_child, train_child]
    targets[rank] = train_with_bad_data
    start = time.monotonic()
    codes, text = Pair(tmp_path, RECIPE, tmp_path / "run", targets=targets).wait()
    assert codes == [2, 2], text
    assert text.count("error:") == 1
    assert "the disk with the images is gone" in text
    assert time.monotonic() - start < 30


def train_with_full_disk(recipe, run):
    real = checkpoint.write_file

    def write(path, data):
        if "step-00000010" in str(path):
            raise OSError(28, "No space left on device")
        real(path, data)

    checkpoint.write_file = write
    train_child(recipe, run)


def test_a_full_disk_ends_both_with_one_line(tmp_path):
    codes, text = Pair(tmp_path, RECIPE, tmp_path / "run", targets=[train_with_full_disk] * 2).wait()
    assert codes == [2, 2], text
    assert text.count("error:") == 1
    assert "the checkpoint of step 10 cannot be written: No space left on device; the last good" in text


def test_errors_before_the_first_step_are_told_once(alone, tmp_path):
    codes, text = Pair(tmp_path, RECIPE, alone).wait()
    assert codes == [2, 2]
    assert text.count("holds a run already") == 1


def test_synchronised_batch_norm_needs_gpus(tmp_path):
    recipe = tiny(model=Model("test_resnet"), sync_batch_norm=True)
    codes, text = Pair(tmp_path, recipe, tmp_path / "run").wait()
    assert codes == [2, 2]
    assert "sync_batch_norm needs GPUs" in text
    assert "Traceback" not in text


def test_batch_norms_statistics_are_those_of_the_first_process(tmp_path):
    """Each process has seen other images; what is evaluated and saved is one network."""
    recipe = tiny(model=Model("test_resnet"), epochs=1)
    codes, text = Pair(tmp_path, recipe, tmp_path / "run").wait()
    assert codes == [0, 0], text
    assert read_metrics(tmp_path / "run")[0]["top5"] == 100.0


def test_a_process_alone_needs_nobody():
    world = World(torch.device("cpu"))
    model = torch.nn.Linear(1, 1)
    assert world.is_main
    assert (world.highest(3), world.lowest(3), world.share("x"), world.gather("x")) == (3, 3, "x", ["x"])
    assert world.wrap(model) is model
    assert world.prepare(model, sync_batch_norm=True) is model
    with pytest.raises(OSError, match="as it was"):
        world.on_main(lambda: (_ for _ in ()).throw(OSError("as it was")))


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(tmp_path):
    """The metrics at the end are those of a run that nobody killed, byte for byte."""
    recipe, run = tiny(model=PLAIN, lr=0.01, epochs=4, checkpoint_every=2), tmp_path / "run"
    recipes.save(recipe, tmp_path / "recipe.yaml")
    codes, text = Pair(tmp_path, recipe, tmp_path / "whole").wait()
    assert codes == [0, 0], text
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    torchrun += ["--master-port", str(free_port())]
    # --run-dir: torchrun would take --run for an option of its own.
    command = [*torchrun, "-m", "aaconv", "train", "--from", str(tmp_path / "recipe.yaml"), "--run-dir", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(lambda: checkpoint.paths(run / "checkpoints"), seconds=60)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert process.wait(timeout=90) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "log").read_text()
    assert f"resuming from {run}/checkpoints/step-" in text
    assert (run / "summary.json").exists()
    assert (run / "metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()
