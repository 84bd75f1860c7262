"""Small training runs for tests: recipes that take a second, in this process or in real ones that can be killed."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from aaconv import recipes
from aaconv.recipes import Model, Recipe
from aaconv.training import checkpoint

TINY = Recipe(
    name="tiny",
    summary="a network of twenty thousand weights on shapes",
    model=Model("plain_small", {"drop_rate": 0.1}),
    data="shapes",
    epochs=2,
    batch=16,
    train_limit=80,
    eval_limit=30,
    lr=0.02,
    weight_decay=1e-4,
    warmup=0.2,
    workers=0,
)
"""Five steps an epoch. Dropout makes the result depend on torch's random state, batch norm on running statistics."""


def tiny(**changes):
    return replace(TINY, **changes)


def outcome(run):
    """What has to be the same, byte for byte, however often a run was interrupted: weights and metrics."""
    names = ["metrics.csv", *sorted(path.name for path in Path(run).glob("model*.safetensors"))]
    return {name: hashlib.sha256((Path(run) / name).read_bytes()).hexdigest() for name in names}


TEN_STEPS = tiny(epochs=2, checkpoint_every=2, ema=0.8)
"""Ten steps; checkpoints after 2, 4, 6, 8 and 10 of them, the last three of which are kept."""


def checkpoints(run):
    return [path.name for path in checkpoint.paths(Path(run) / "checkpoints")]


def end_like(whole, run):
    """Resume to the end, and compare."""
    from aaconv.training.trainer import resume

    resume(run, device="cpu")
    assert outcome(run) == outcome(whole)
    assert checkpoints(run) == checkpoints(whole)


def cut(whole, run, *, newest):
    """A copy of the finished run as it was when its newest checkpoint was that of a given step."""
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    for path in checkpoint.paths(run / "checkpoints"):
        if int(path.name[5:]) > newest:
            shutil.rmtree(path)


def edit_recipe(run, **changes):
    recipes.save(replace(recipes.load(run / "recipe.yaml"), **changes), run / "recipe.yaml")


# A server that has torch imported forks the processes: each starts in a moment, and has computed nothing before.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["aaconv.training.trainer", "aaconv.tasks.classify", "aaconv.runs.curves"])


class Running:
    """A process that trains; its output goes to a file beside the run."""

    def __init__(self, target, *arguments, environment=None, log):
        self.log = Path(log)
        arguments = target, arguments, environment or {}, str(log)
        self.process = _processes.Process(target=_child, args=arguments, daemon=True)
        self.process.start()

    @property
    def pid(self):
        return self.process.pid

    def wait(self, timeout=60):
        """The exit code as a shell has it, and what was printed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s: {self.text}")
        code = self.process.exitcode
        return (128 - code if code < 0 else code), self.text

    @property
    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def send(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.join()


def _child(target, arguments, environment, log):
    torch.set_num_threads(1)
    os.environ.update(environment)
    # An interrupt of the whole group, as at a terminal, must not reach the tests.
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(target(*arguments))
    except (ValueError, OSError) as error:
        print(f"aaconv: error: {error}", file=sys.stderr)
        sys.exit(2)


def train_child(recipe, run):
    from aaconv.training.trainer import train

    train(recipe, run, device="cpu")


def resume_child(run):
    from aaconv.training.trainer import resume

    resume(run, device="cpu")


def wait_for(condition, seconds=30):
    """Look again and again, until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Pair:
    """Two processes as torchrun would start them; `targets` are what each of them runs."""

    def __init__(self, folder, *arguments, targets=(train_child, train_child)):
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.both = [
            Running(
                target,
                *arguments,
                environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                log=folder / f"log{rank}",
            )
            for rank, target in enumerate(targets)
        ]

    def wait(self, timeout=60):
        """Both exit codes, and what both printed."""
        codes = [one.wait(timeout)[0] for one in self.both]
        return codes, "".join(one.text for one in self.both)


def workers_of(pid):
    """The processes that a process has started, and that train."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            environment = (status.parent / "environ").read_bytes()
        except OSError:
            continue
        if parent == pid and b"LOCAL_RANK=" in environment:
            found.append(int(status.parent.name))
    return sorted(found)
