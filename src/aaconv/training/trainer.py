"""Training: one loop for every task and recipe, into a run folder that can be resumed at any step."""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from .. import recipes
from ..data.workers import naming_killed_workers
from ..recipes.recipe import Recipe
from ..runs import run_folder
from ..runs.run_types import STATE_FIELDS, Row, check_fields
from ..tasks.task import Task, create_task
from ..utils.distributed import World, joined, restarted
from ..utils.errors import is_out_of_memory, one_line
from ..utils.memory import peak_bytes
from ..utils.terminal import plural
from ..utils.weights import Tensors
from . import checkpoint
from .checkpoint import Checkpoint
from .learner import GRAPHED, Learner
from .optimize import peak_rate
from .progress import Display
from .run_lock import RunLock
from .run_writer import RunWriter
from .running_sums import RunningSums
from .signals import Interrupts

# What a process tells the others between two steps, and the highest holds: SIGNAL + n is that it received signal n.
GO, LOOK, SIGNAL, FAILED = 0, 1, 10, 1000

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""What cuBLAS wants to see in the environment before it computes the same bits every time."""

Batch = TypeVar("Batch")


class NotFinite(ValueError):
    """The loss, a weight, or what was evaluated is infinite or not a number."""


class Stopped(SystemExit):
    """A signal ended the run, which is saved: `line` says how to resume, the exit code is the shell's."""

    def __init__(self, signal_number: int, line: str) -> None:
        super().__init__(128 + signal_number)
        self.line = line


def train(recipe: Recipe, run: str | Path, *, device: str | None = None) -> dict[str, Any]:
    """Train a recipe into the folder `run`, which must not hold a run yet, and return its summary.

    Ctrl-C and SIGTERM save a checkpoint and raise `Stopped`; a loss that is not finite raises `NotFinite`. Processes
    that torchrun has restarted resume the run by themselves.
    """
    run = Path(run)
    with joined(device) as world, RunLock(run) as lock:
        world.on_main(lock.take)
        # Machines may count restarts differently: one that knows of it is enough.
        again = bool(world.highest(restarted())) and world.on_main(lambda: run_folder.is_run(run))
        if not again:
            world.on_main(lambda: run_folder.check_free(run))
        return _run(recipe, run, world, lock, again=again)


def resume(run: str | Path, *, device: str | None = None) -> dict[str, Any]:
    """Resume a run at its newest whole checkpoint, and return its summary."""
    run = Path(run)
    with joined(device) as world, RunLock(run) as lock:
        recipe = world.on_main(lambda: _recipe_of(run))
        world.on_main(lock.take)
        return _run(recipe, run, world, lock, again=True)


def _recipe_of(run: Path) -> Recipe:
    run_folder.check_run(run)
    return recipes.load(run / run_folder.RECIPE)


def _run(recipe: Recipe, run: Path, world: World, lock: RunLock, *, again: bool) -> dict[str, Any]:
    if again and world.on_main(lambda: run_folder.is_finished(run)):
        if world.is_main:
            print(f"{run} is finished already", flush=True)
        return world.on_main(lambda: run_folder.read_summary(run))
    try:
        with settings(recipe), naming_killed_workers(lambda: _way_out(run, recipe)):
            return Trainer(recipe, run, world, again=again, lock=lock).train()
    except Stopped as stopped:
        if world.is_main:
            print(f"aaconv: {stopped.line}", file=sys.stderr, flush=True)
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        what = "the GPU's memory" if world.device.type == "cuda" else "memory"
        raise ValueError(
            f"{what} does not suffice for batch={recipe.batch} in {plural(recipe.accumulate, 'accumulation step')}; "
            f"raise --accumulate or lower --batch or --size ({one_line(error)})"
        ) from error


def _way_out(run: Path, recipe: Recipe) -> str:
    """How to resume after the system has killed a data worker."""
    resume = f"resume with: aaconv train --resume {run}"
    fewer = f"fewer workers (workers: {recipe.workers} in {run / run_folder.RECIPE}) take less memory"
    return f"{checkpoint.last_good(run / run_folder.CHECKPOINTS)}; {resume}; {fewer}"


class Trainer:
    """A run at one position: `epoch` epochs are complete, and `step` steps of the next one."""

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        world: World,
        *,
        again: bool = False,
        task: Task | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.recipe, self.run, self.world = recipe, run, world
        self.interrupts = Interrupts(answer=world.is_main)
        share = world.size * recipe.accumulate
        if recipe.batch % share:
            raise ValueError(
                f"batch must be divisible by processes x accumulate, got batch={recipe.batch} for {world.size} x "
                f"{recipe.accumulate}; try {max(1, recipe.batch // share) * share}"
            )
        self.task = task or create_task(recipe)
        self.train_loader, self.eval_loader = self.task.loaders(recipe.batch // share, world)
        self.steps_per_epoch = len(self.train_loader) // recipe.accumulate
        if self.steps_per_epoch == 0:
            raise ValueError(f"the images for training do not fill one batch of {recipe.batch}; lower batch")
        self.writer = RunWriter(run, recipe, self.task)
        found = world.on_main(lambda: self.writer.newest(world.device, world.size)) if again else None
        # A checkpoint has all weights: the file that the first ones came from may be gone.
        self.learner = Learner(recipe, self.task, world, self.steps_per_epoch, start=found is None)
        self.epoch = self.step = self.seen = 0
        self.sums = RunningSums(self.task.running, world.device)
        self.rows: list[Row] = []
        self.speed: list[Row] = []
        self.best: dict[str, Any] | None = None
        self.seconds = 0.0
        self._begun: float | None = None
        self._looks_bad = False
        self.display = Display.silent()
        self._open(again, found, lock)

    @property
    def steps(self) -> int:
        """Steps since the beginning of the run."""
        return self.epoch * self.steps_per_epoch + self.step

    @property
    def _over(self) -> bool:
        return is_over(self.recipe, self.epoch, self.rows, self.best, self.task.headline)

    def train(self) -> dict[str, Any]:
        """Train to the end; the summary is returned."""
        if self.world.is_main:
            self.display = Display(self.recipe, self.steps_per_epoch, (self.epoch, self.step))
        with self.interrupts, self.display:
            for line in self.writer.lines:
                self.display.say(line)
            while not self._over:
                self.train_epoch()
                self.finish_epoch()
        return self.world.on_main(self._finish)

    def train_epoch(self) -> None:
        """The steps of the epoch that are left."""
        self._start_clock()
        self.learner.begin_epoch(self.epoch)
        batches = iter(self.train_loader.batches(self.epoch, self.step * self.recipe.accumulate))
        while self.step < self.steps_per_epoch:
            try:
                first = next(batches)
            except Exception:
                self.world.leave(FAILED)
                raise
            self._listen()
            self.learner.take_step(self.steps, first, batches, self.sums)
            self.step += 1
            self.seen += self.recipe.batch
            self._show()
            every = self.recipe.checkpoint_every
            if every and self.steps % every == 0 and self.step < self.steps_per_epoch:
                self._save()

    def _listen(self) -> None:
        """Between two steps: does any process have to stop?"""
        news = SIGNAL + self.interrupts.received if self.interrupts.received else GO
        if not news and (self._looks_bad or (self.world.device.type == "cpu" and self.sums.first_bad() is not None)):
            news = LOOK
        news = self.world.highest(news)
        if news == FAILED:
            raise SystemExit(2)
        if news == LOOK:
            self._check_finite()
        if news >= SIGNAL:
            self._stop(news - SIGNAL)

    def _show(self) -> None:
        if not self.display.due():
            return
        self.sums.ask()
        if (answer := self.sums.answer()) is None:
            return
        (loss, *metrics), finite, parts = answer
        self._looks_bad = not finite
        self.display.step(
            self.epoch,
            parts // self.recipe.accumulate,
            loss=loss,
            accuracy=metrics[0] if metrics else None,
            lr=self.learner.rate,
            images=self.seen,
        )

    def _check_finite(self) -> None:
        """All processes look together; the first step with a loss that is not finite ends the run."""
        bad, none = self.sums.first_bad(), 2**62
        bad = self.world.lowest(none if bad is None else bad)
        if bad != none:
            step = self.epoch * self.steps_per_epoch + bad // self.recipe.accumulate + 1
            raise NotFinite(f"the loss is not finite at step {step}, epoch {self.epoch + 1}; {self._start_again()}")
        if not self.world.lowest(int(self.learner.is_finite())):
            raise NotFinite(f"a weight is not finite after step {self.steps}; {self._start_again()}")

    def _start_again(self) -> str:
        """What may help a run that diverged: not to resume it, its last checkpoint may be on the way there already."""
        recipe, lower = self.run / run_folder.RECIPE, peak_rate(self.recipe) / 10
        last = self.writer.last_good("finite")
        return f"{last}; start again with a lower lr, or clip_grad: aaconv train --from {recipe} --lr {lower:g}"

    def finish_epoch(self) -> None:
        """Evaluate, write down what came out, save, and go to the next epoch."""
        self._check_finite()
        loss, *running = self.sums.means(self.world.size)
        seconds = self._stop_clock()
        row: Row = {"epoch": self.epoch + 1, "step": self.steps, "lr": self.learner.rate, "train_loss": loss}
        row |= {f"train_{name}": value for name, value in zip(self.task.running, running, strict=True)}
        last = self.epoch + 1 == self.recipe.epochs
        if last or (self.epoch + 1) % self.recipe.eval_every == 0:
            row |= self._finite(self._evaluate(), last)
        self.rows.append(row)
        images = self.recipe.batch * self.steps_per_epoch
        speed = {"epoch": self.epoch + 1, "seconds": round(seconds, 3), "images_per_second": round(images / seconds, 1)}
        peak = _peak_memory(self.world.device, graphs=self.recipe.compile in GRAPHED)
        self.speed.append(speed | {"peak_memory_bytes": peak})
        value, best = row.get(self.task.headline), self.best
        improved = value is not None and (best is None or value > best["value"])
        if improved:
            self.best = {"value": value, "epoch": self.epoch + 1}
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self.sums = RunningSums(self.task.running, self.world.device)
        self.world.on_main(lambda: self._write_epoch(improved))
        self.display.epoch(row)
        every = self.recipe.checkpoint_every
        if self._over or every is None or self.steps % every == 0:
            self._save()

    def _evaluate(self) -> dict[str, float | None]:
        eval_model = self.learner.eval_model.eval()
        self.world.same_buffers(eval_model)
        try:
            # Not compiled: to compile the network once more, as it evaluates, takes longer than many evaluations.
            with torch.no_grad(), self.learner.precision(), torch.compiler.set_stance("force_eager"):
                return self.task.evaluate(eval_model, self._watched(self.eval_loader.batches()))
        except _Interrupted:
            self._stop(self.interrupts.received)

    def _finite(self, found: dict[str, float | None], last: bool) -> dict[str, float | None]:
        """What was evaluated, or nothing if some of it is not finite: half precision may overflow while
        the statistics of the norms are young. After the last step no loss tells any more of weights that are too large.
        """
        bad = next((name for name, value in found.items() if value is not None and not math.isfinite(value)), None)
        if bad is None:
            return found
        line = f"the {bad} of the evaluation is not finite after step {self.steps}, epoch {self.epoch + 1}"
        if last:
            raise NotFinite(f"{line}; {self._start_again()}")
        self.display.say(f"{line}: it is left out")
        return {}

    def _watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """A process that is alone obeys a signal in the middle of an evaluation; many finish it first."""
        for batch in batches:
            if self.interrupts.received and self.world.size == 1:
                raise _Interrupted
            yield batch

    def _write_epoch(self, improved: bool) -> None:
        if improved:
            self.writer.best(self.learner.eval_model)
        self.writer.tables(self.rows, self.speed)

    def _stop(self, signal_number: int) -> NoReturn:
        path = self._save()
        line = f"stopped at step {self.steps}, saved {path}; resume with: aaconv train --resume {self.run}"
        raise Stopped(signal_number, line)

    def _save(self) -> Path:
        """A checkpoint of this position, unless the loss was not finite on the way to it."""
        self._check_finite()
        random, sums = self.world.gather(self.learner.random_state()), self.world.gather(self.sums.state())
        return self.world.on_main(lambda: self._write_checkpoint(random, sums))

    def _write_checkpoint(self, random: list[Tensors], sums: list[dict[str, Any]]) -> Path:
        """The state of the first process, and of each what is its own: random numbers and sums."""
        tensors, rest = self.learner.state(random)
        position = {"epoch": self.epoch, "step": self.step, "sums": sums, "seconds": self._elapsed()}
        tables = {"rows": self.rows, "speed": self.speed, "best": self.best}
        return self.writer.checkpoint(self.steps, position | tables | rest, tensors)

    def _open(self, again: bool, found: Checkpoint | None, lock: RunLock | None) -> None:
        """Begin the folder, or take the state that was found in it; the first process reads and writes for all."""
        if not again:
            self.world.on_main(lambda: self.writer.begin(self.world.device, self.world.size, lock))
            return
        if found is not None:
            self._load(found)
        # Rows of epochs after the checkpoint are made again.
        self.world.on_main(lambda: self.writer.tables(self.rows, self.speed))

    def _load(self, found: Checkpoint) -> None:
        state = found.state
        check_fields(state, STATE_FIELDS, found.path / checkpoint.STATE, needed=True)
        try:
            _check_position(found, self.steps_per_epoch)
            self.learner.load(found.tensors, state)
            self.sums.load(state["sums"], self.world)
            self.epoch, self.step, self.seconds = state["epoch"], state["step"], float(state["seconds"])
            self.rows, self.speed, self.best = state["rows"], state["speed"], state["best"]
        except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            recipe = self.run / run_folder.RECIPE
            raise ValueError(f"{found.path} does not fit {recipe}: {one_line(error)}") from None

    def _finish(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.learner.model.parameters())
        return self.writer.finish(self.rows, self.speed, self.best, parameters)

    def _start_clock(self) -> None:
        self._looks_bad = False
        self._begun = time.perf_counter()
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def _elapsed(self) -> float:
        """Seconds of this epoch's steps so far, those before an interruption included."""
        if self.step == 0:
            return 0.0
        return self.seconds + (time.perf_counter() - self._begun if self._begun is not None else 0.0)

    def _stop_clock(self) -> float:
        self.seconds, self._begun = self._elapsed(), None
        return max(self.seconds, 1e-9)


def is_over(recipe: Recipe, epoch: int, rows: list[Row], best: dict[str, Any] | None, headline: str) -> bool:
    """Are all epochs done, or were there so many evaluations without a better one as the recipe allows?"""
    if epoch >= recipe.epochs or recipe.patience is None or best is None:
        return epoch >= recipe.epochs
    return sum(row.get(headline) is not None for row in rows[best["epoch"] :]) >= recipe.patience


def _check_position(found: Checkpoint, steps_per_epoch: int) -> None:
    """A ValueError where an epoch had another number of steps when the checkpoint was saved."""
    saved, epoch, step = int(found.path.name.rpartition("-")[2]), found.state["epoch"], found.state["step"]
    if saved != epoch * steps_per_epoch + step or step > steps_per_epoch:
        raise ValueError(
            f"it is of step {saved}, which is not {plural(epoch, 'epoch')} of {plural(steps_per_epoch, 'step')} and "
            f"{step} more: batch, accumulate or the number of images is another now"
        )


class _Interrupted(Exception):
    """A signal came during an evaluation."""


def _peak_memory(device: torch.device, *, graphs: bool) -> int:
    """Bytes: of torch's allocator on a GPU, of the whole process on a CPU."""
    if device.type != "cuda":
        return peak_bytes()
    # What CUDA graphs hold is not counted as allocated, only as reserved.
    return torch.cuda.max_memory_reserved(device) if graphs else torch.cuda.max_memory_allocated(device)


@contextmanager
def settings(recipe: Recipe) -> Iterator[None]:
    """Torch's global switches as the recipe wants them, and as they were afterwards."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = not recipe.deterministic
    workspace = os.environ.get(WORKSPACE)
    if recipe.deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
