"""What our experiments gain on one of them: `aaconv table DATASET --against RECIPE`."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..recipes import PARTIAL
from ..recipes.diff import options_of
from ..recipes.paper import ACCURACY
from ..runs.results import Experiment
from ..utils.metrics import metric_name
from ..utils.terminal import new_table


@dataclass(frozen=True)
class Difference:
    """How many points an experiment is above another, and half the width of the 95 % interval, None of single runs."""

    experiment: Experiment
    points: float
    interval: float | None

    @property
    def bounds(self) -> str:
        if self.interval is None:
            return ""
        return f"{self.points - self.interval:+.2f} to {self.points + self.interval:+.2f}"

    def as_json(self) -> dict[str, Any]:
        about = {"recipe": self.experiment.name, "changes": self.experiment.changes}
        return about | {"difference": self.points, "interval": self.interval}


def differences(ours: list[Experiment], against: str) -> list[Difference]:
    """Of every experiment of as many epochs, on the same images, its first metric less that of the recipe, of which the
    one that changes least is taken."""
    named = [one for one in ours if one.name == against]
    if not named:
        there = ", ".join(dict.fromkeys(one.name for one in ours))
        raise ValueError(f"there are no runs of {against!r} on these data; there are some of {there}")
    base = min(named, key=lambda one: len(one.changes))
    metric = next((name for name in map(metric_name, ACCURACY) if base.values(name)), None)
    if metric is None:
        raise ValueError(f"the runs of {against!r} have no accuracy to compare with")
    alike = [one for one in ours if one is not base and _setting(one) == _setting(base)]
    found = ((one, one.difference(base, metric)) for one in alike)
    return [Difference(one, *apart) for one, apart in found if apart is not None]


def _setting(one: Experiment) -> tuple[Any, ...]:
    """What must be the same for two experiments to be compared: epochs, and the images they saw."""
    return one.epochs, *(one.changes.get(name) for name in (*PARTIAL, "fold"))


def print_differences(output: Console, against: str, compared: list[Difference]) -> None:
    shown = new_table(f"against {against}", "points", "95 % interval", right=("points",))
    for one in compared:
        recipe, changes = one.experiment.recipe, one.experiment.changes
        changed = "" if recipe is None else "".join(f" {option}" for option in options_of(recipe, changes))
        shown.add_row(Text(one.experiment.name).append(changed, "dim"), f"{one.points:+.2f}", one.bounds)
    output.print(shown)
    output.print("  differences of means, Welch's t\n", highlight=False, markup=False, soft_wrap=True)
