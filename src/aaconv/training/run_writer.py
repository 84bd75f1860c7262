"""The first process's side of a run folder: everything that training writes, and what it resumes from."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import recipes
from ..recipes.recipe import Recipe
from ..runs import run_folder
from ..runs.run_types import Row
from ..tasks.task import Task
from ..utils.files import remove_stale_drafts
from ..utils.weights import Tensors
from . import checkpoint
from .checkpoint import Checkpoint
from .run_lock import RunLock

WRITTEN = (*run_folder.OURS, run_folder.CURVES)
SPEED_COLUMNS = ("epoch", "seconds", "images_per_second", "peak_memory_bytes")


class RunWriter:
    """Writes into the folder `run`. An error names what could not be written and the last good checkpoint."""

    def __init__(self, run: Path, recipe: Recipe, task: Task) -> None:
        self.run, self.recipe, self.task = run, recipe, task
        self.checkpoints = run / run_folder.CHECKPOINTS
        self.lines: list[str] = []
        """What is to be said when the display is there."""

    def begin(self, device: torch.device, processes: int, lock: RunLock | None) -> None:
        """Make the folder; only now, when the data and the network have been found."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if lock is not None:
                lock.take()
            run_folder.check_free(self.run)  # once more: another trainer may have been there meanwhile
            remove_stale_drafts(self.run, WRITTEN)
            recipes.save(self.recipe, self.run / run_folder.RECIPE)
            self._describe(device, processes)
        except OSError as error:
            reason = "no folder can be made there" if error.errno == errno.ENOENT else error.strerror or error
            raise OSError(f"{self.run} cannot be begun: {reason}; name another folder with --run-dir DIR") from error

    def newest(self, device: torch.device, processes: int) -> Checkpoint | None:
        """What the run is resumed from; None: it was ended before its first checkpoint."""
        found = checkpoint.load_newest(self.checkpoints, self.lines.append)
        with self._writing("its environment and weights"):
            remove_stale_drafts(self.run, WRITTEN)
            self._describe(device, processes)
            if found is not None:
                checkpoint.prune(self.checkpoints, found.path, self.recipe.keep)
                self._publish(found.path)
        if found is None:
            self.lines.append(f"{self.run} has no checkpoint yet: starting at the beginning")
        else:
            self.lines.append(f"resuming from {found.path}")
        return found

    def _describe(self, device: torch.device, processes: int) -> None:
        known = run_folder.environment_of(device, processes)
        run_folder.write_json(self.run / run_folder.ENVIRONMENT, known)
        run_folder.write_json(self.run / run_folder.CONFIG, self.task.config(self.task.data_info()))

    def tables(self, rows: list[Row], speed: list[Row]) -> None:
        with self._writing("the metrics"):
            running = [f"train_{name}" for name in self.task.running]
            columns = ["epoch", "step", "lr", "train_loss", *running, *self.task.metrics]
            run_folder.write_rows(self.run / run_folder.METRICS, rows, columns)
            run_folder.write_rows(self.run / run_folder.SPEED, speed, list(SPEED_COLUMNS))

    def best(self, model: nn.Module) -> None:
        with self._writing("the best weights"):
            run_folder.write_weights(self.run / run_folder.WEIGHTS["best"], model.state_dict())

    def checkpoint(self, steps: int, state: dict[str, Any], tensors: dict[str, Tensors]) -> Path:
        """The state after `steps` steps; its weights become the run's last ones."""
        with self._writing(f"the checkpoint of step {steps}"):
            path = checkpoint.save(self.checkpoints, steps, state, tensors, keep=self.recipe.keep)
            self._publish(path)
        return path

    def finish(self, rows: list[Row], speed: list[Row], best: dict[str, Any] | None, parameters: int) -> dict[str, Any]:
        """The curves, and at last summary.json, which is returned: with it a run is finished."""
        from ..runs.curves import draw

        known = run_folder.read_environment(self.run)
        summary = run_folder.summary_of(self.recipe, known, rows, speed, self.task.metrics, parameters)
        summary["best"] = {"metric": self.task.headline, **best} if best else None
        with self._writing("the summary"):
            draw([self.run], self.run / run_folder.CURVES)
            run_folder.write_json(self.run / run_folder.SUMMARY, summary)
        return summary

    def last_good(self, word: str = "good") -> str:
        return checkpoint.last_good(self.checkpoints, word)

    def _publish(self, path: Path) -> None:
        for name, weights in (("model", "last"), ("ema", "ema")):
            file = path / f"{name}.safetensors"
            if file.is_file():
                run_folder.link(file, self.run / run_folder.WEIGHTS[weights])

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.run.is_dir():
                raise OSError(
                    f"{what} cannot be written: {self.run} has vanished, with its checkpoints; put it back and resume "
                    f"with: aaconv train --resume {self.run}"
                ) from error
            raise OSError(f"{what} cannot be written: {error.strerror or error}; {self.last_good()}") from error
