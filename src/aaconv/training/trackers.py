"""Experiment trackers beside the CSV files: trackio and wandb, which are called alike."""

import importlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import recipes
from ..recipes.recipe import Recipe
from ..runs.run_folder import RECIPE
from ..utils.errors import one_line
from ..utils.numbers import is_number

PROJECT = "aaconv"


class Tracker:
    """A follower that tells the package `name` of every step and epoch of a run; a resumed run goes on where it was."""

    def __init__(self, name: str, run: Path, recipe: Recipe | None) -> None:
        try:
            self._package = importlib.import_module(name)
        except ImportError:
            raise ValueError(f"--track {name} needs the package {name}: pip install {name}") from None
        self.name, self._run, self._recipe = name, run, recipe

    @cached_property
    def _begun(self) -> Any:
        """Begun when there is something to tell: a run that cannot begin is not tracked."""
        recipe = self._recipe or recipes.load(self._run / RECIPE)
        about = {"project": PROJECT, "name": self._run.resolve().name, "config": asdict(recipe), "resume": "allow"}
        if self.name == "wandb":
            about |= {"id": about["name"], "dir": str(self._run)}
        try:
            return self._package.init(**about)
        except Exception as error:  # of a server, a login, a disk
            raise ValueError(f"--track {self.name}: {one_line(error)}; leave it out, or log in first") from None

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._log({f"step/{name}": value for name, value in values.items()}, step)

    def epoch(self, row: Mapping[str, Any]) -> None:
        values = {name: value for name, value in row.items() if name != "step" and is_number(value)}
        self._log({f"epoch/{name}": float(value) for name, value in values.items()}, int(row.get("step", row["epoch"])))

    def close(self) -> None:
        if "_begun" in vars(self):
            self._package.finish()

    def _log(self, values: dict[str, float], step: int) -> None:
        _ = self._begun
        self._package.log(values, step=step)
