"""What our experiments gain on a recipe that was trained as they were: `aaconv table DATASET --against RECIPE`."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..recipes import PARTIAL
from ..recipes.diff import options_of
from ..recipes.paper import ACCURACY
from ..runs.results import Experiment, recipe_of
from ..utils.metrics import metric_name
from ..utils.terminal import new_table


@dataclass(frozen=True)
class Difference:
    """How many points an experiment is above another, and half the width of the 95 % interval, None of single runs.

    otherwise: what its training had and that of the other had not; empty where they were trained alike.
    """

    experiment: Experiment
    points: float
    interval: float | None
    otherwise: dict[str, Any]

    @property
    def bounds(self) -> str:
        if self.interval is None:
            return ""
        return f"{self.points - self.interval:+.2f} to {self.points + self.interval:+.2f}"


@dataclass(frozen=True)
class Comparison:
    """Experiments that are compared with one of the recipe's."""

    base: Experiment
    differences: list[Difference]

    def as_json(self) -> list[dict[str, Any]]:
        about = {"base_changes": self.base.changes, "base_runs": len(self.base.runs)}
        return [
            {"recipe": one.experiment.name, "changes": one.experiment.changes}
            | {"difference": one.points, "interval": one.interval, "trained_otherwise": one.otherwise}
            | about
            for one in self.differences
        ]


def comparisons(ours: list[Experiment], against: str) -> list[Comparison]:
    """Every experiment less those of the recipe that were trained like it, for as many epochs and on the same images;
    where there are none, less the one of them that changes least. The recipe's own are compared with those before."""
    bases = sorted((one for one in ours if one.name == against), key=lambda one: len(one.changes))
    if not bases:
        there = ", ".join(dict.fromkeys(one.name for one in ours))
        raise ValueError(f"there are no runs of {against!r} on these data; there are some of {there}")
    metric = next((name for name in map(metric_name, ACCURACY) if any(base.values(name) for base in bases)), None)
    if metric is None:
        raise ValueError(f"the runs of {against!r} have no accuracy to compare with")
    found = [Comparison(base, []) for base in bases]
    for one in ours:
        before = found[: bases.index(one)] if one in bases else found
        fitting = [some for some in before if _setting(some.base) == _setting(one) and some.base.values(metric)]
        for some in [some for some in fitting if some.base.training == one.training] or fitting[:1]:
            if (apart := one.difference(some.base, metric)) is not None:
                some.differences.append(Difference(one, *apart, _otherwise(one, some.base)))
    return [some for some in found if some.differences] or found[:1]


def _setting(one: Experiment) -> tuple[Any, ...]:
    """What must be the same for two experiments to be compared: epochs, and the images they saw."""
    return one.epochs, *(one.changes.get(name) for name in (*PARTIAL, "fold"))


def _otherwise(one: Experiment, base: Experiment) -> dict[str, Any]:
    usual = base.training
    return {name: value for name, value in one.training.items() if value != usual[name]}


def print_comparisons(output: Console, compared: list[Comparison]) -> None:
    """A table for each run of the recipe that something is compared with."""
    shown_ones = [one for some in compared for one in (some.base, *(gain.experiment for gain in some.differences))]
    names = Counter({id(one): (one.name, _options(one)) for one in shown_ones}.values())

    def options(one: Experiment) -> str:
        several = names[one.name, _options(one)] > 1  # a network may have changed under its name
        return _options(one) + (f", {one.parameters:,} parameters" if several and one.parameters else "")

    notes: list[str] = []
    for some in compared:
        shown = new_table(f"against {some.base.name}{options(some.base)}", "points", "95 % interval", right=("points",))
        for one in some.differences:
            text = Text(one.experiment.name).append(options(one.experiment), "dim")
            if one.otherwise:
                note = " ".join(options_of(recipe_of(one.experiment.runs[0]), one.otherwise))
                notes += [note] * (note not in notes)
                text.append(f" {notes.index(note) + 1})", "dim")
            shown.add_row(text, f"{one.points:+.2f}", one.bounds)
        output.print(shown)
        output.print("" if some is not compared[-1] else "  differences of means, Welch's t", highlight=False)
    for place, note in enumerate(notes, 1):
        output.print(f"  {place}) trained otherwise: {note}", highlight=False, markup=False, soft_wrap=True)
    output.print()


def _options(one: Experiment) -> str:
    words = [] if one.recipe is None else options_of(one.recipe, one.changes)
    return "".join(f" {word}" for word in words)
