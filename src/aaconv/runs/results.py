"""Results that were kept, `DATASET/*.json`, and the runs of one experiment together: they differ in the seed.

Ours come with the package; those that `aaconv record` keeps in `results/` are read besides, where there are some.

A file is one run: "model", "top1", "top5" of the last epoch (percent; or "mAP", "mAP50", "mAP75"), "epochs", "seed",
"name" of the recipe, "overrides", and "options" where the model was built with some. Its metrics.csv lies beside it.
"""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any, get_type_hints

from .. import recipes
from ..recipes.diff import NEUTRAL, changes_of, fields_of, options_of, usual
from ..recipes.former import FORMER, options_meant
from ..recipes.yaml_file import fit
from ..utils.json_file import read_json
from ..utils.metrics import TITLES

RECORDED = Path(__file__).resolve().parents[1] / "recorded"
"""What comes with the package: results/DATASET/*.json and benchmarks/*.json."""
RESULTS = "results"
"""Where `aaconv record` keeps them."""
MEASURED = (*TITLES, "train_loss", "seconds_per_epoch")
KINDS = {
    **dict.fromkeys(("dataset", "name", "model", "data"), str),
    **dict.fromkeys(("options", "overrides"), dict),
    **dict.fromkeys(("seed", "epochs", "parameters"), int),
    **dict.fromkeys(MEASURED, int | float),
}
"""What the fields of a record are, where they are there; only what is measured may be None."""

NOT_TRAINING = {"name", "model", "data", "epochs"}

Record = dict[str, Any]


@cache
def t_95(freedom: float) -> float:
    """Student's t at 97.5 %, for any degrees of freedom from 1 on."""
    # Between -t and t, t = sqrt(freedom) tan(angle), lies the integral of cos ** (freedom - 1), by Simpson's rule.
    wanted = 0.95 * math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high, steps = 0.0, math.atan(13 / math.sqrt(freedom)), 200
    while high - low > 1e-12:
        middle = (low + high) / 2
        heights = [math.cos(middle * step / steps) ** (freedom - 1) for step in range(steps + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        found = 2 * middle / steps / 3 * (heights[0] + inner + heights[-1])
        low, high = (middle, high) if found < wanted else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """Runs of one recipe with the same changes, in the order of the seeds; `name` is the recipe, or else the model."""

    dataset: str
    name: str
    model: str
    options: dict[str, Any]
    epochs: int | None
    changes: dict[str, Any]
    runs: tuple[Record, ...]

    def values(self, metric: str) -> list[float]:
        return [run[metric] for run in self.runs if run.get(metric) is not None]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return mean(values) if values else None

    def deviation(self, metric: str) -> float | None:
        """The standard deviation of a run; None where there is only one."""
        values = self.values(metric)
        return stdev(values) if len(values) > 1 else None

    def interval(self, metric: str) -> float | None:
        """Half the width of the 95 % interval of the mean, by Student's t; None where there is only one run."""
        deviation, number = self.deviation(metric), len(self.values(metric))
        if deviation is None:
            return None
        return t_95(number - 1) * deviation / math.sqrt(number)

    def difference(self, other: "Experiment", metric: str) -> tuple[float, float | None] | None:
        """How much higher the mean is than the other's, and half the width of its 95 % interval by Welch's t, which is
        None where one has a single run; None if one has no run with the metric."""
        ours, theirs = self.values(metric), other.values(metric)
        if not ours or not theirs:
            return None
        apart = mean(ours) - mean(theirs)
        if min(len(ours), len(theirs)) < 2:
            return apart, None
        squares = [variance(values) / len(values) for values in (ours, theirs)]
        if not sum(squares):
            return apart, 0.0
        parts = (square**2 / (len(values) - 1) for square, values in zip(squares, (ours, theirs), strict=True))
        return apart, t_95(sum(squares) ** 2 / sum(parts)) * math.sqrt(sum(squares))

    @property
    def parameters(self) -> int | None:
        """Of the network, where the runs say it."""
        return self.runs[0].get("parameters")

    @property
    def recipe(self) -> recipes.Recipe | None:
        """What the catalogue has under the name."""
        return recipes.get(self.name) if self.name in recipes.names() else None

    @property
    def training(self) -> dict[str, Any]:
        """How the network was trained: the fields of its recipe but for network, data and number of epochs."""
        fields = fields_of(recipe_of(self.runs[0]))
        return {name: value for name, value in fields.items() if name not in NEUTRAL | NOT_TRAINING}

    @property
    def command(self) -> str | None:
        """What trains the first of its runs; None without a recipe of that name."""
        if self.recipe is None:
            return None
        changes = options_of(self.recipe, self.changes)
        return " ".join(["aaconv train", self.name, *changes, f"--seed {self.seeds[0]}"])

    @property
    def note(self) -> str | None:
        """The command, or what is known of a recipe that the catalogue does not have."""
        if self.recipe is not None or not self.changes:
            return self.command
        bare = usual(self.name, recipes.Model(self.model, self.options), self.dataset, self.epochs or 1)
        return " ".join(["not in the catalogue:", *options_of(bare, self.changes)])

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @property
    def repeated(self) -> dict[int, list[str]]:
        """Seed -> the files of its runs, of seeds that were run more than once."""
        files = {seed: [run["file"] for run in self.runs if run["seed"] == seed] for seed in self.seeds}
        return {seed: some for seed, some in files.items() if len(some) > 1}


def read(folder: str | Path | None = None) -> list[Record]:
    """Every run recorded below a folder, once, with its "file"; a line on stderr names a file that is left out.

    Without a folder: what comes with the package, and what is in `results/`.
    """
    folders = [RECORDED / RESULTS, Path(RESULTS)] if folder is None else [Path(folder)]
    if folders[-1].resolve() == folders[0]:
        folders = folders[:1]
    found: dict[str, Record] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.json"))):
        content = read_json(path)
        if not isinstance(content, dict) or "model" not in content:
            _say_once(f"{path} is left out: it names no model, so `aaconv record` has not written it")
            continue
        record = as_record(content, path)
        first = found.setdefault(json.dumps(record, sort_keys=True), record | {"file": str(path)})
        if first["file"] != str(path):
            _say_once(f"{path} is left out: it is a copy of {first['file']}")
    return list(found.values())


def fitting(pattern: str) -> list[Path]:
    """The results that come with the package whose DATASET/NAME fits a wildcard pattern."""
    pattern = pattern.removeprefix(f"{RESULTS}/").removesuffix(".json")
    found = sorted((RECORDED / RESULTS).glob("*/*.json"))
    return [path for path in found if fnmatchcase(f"{path.parent.name}/{path.stem}", pattern)]


@cache  # a figure reads the results for each of its points
def _say_once(line: str) -> None:
    _logger.warning(line)


def as_record(content: Any, path: Path) -> Record:
    """The content of a file, with what a run has by default where older ones say nothing: they are not another
    experiment. A ValueError where `aaconv record` would not have written it."""
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{path} is not what `aaconv record` keeps")
    record = {"dataset": path.parent.name, "options": {}, "overrides": {}, "seed": 0} | content
    try:
        check(record)
    except ValueError as error:
        way_out = "move it away and record its run again"
        raise ValueError(f"{path} is not what `aaconv record` keeps: {str(error)[:300]}; {way_out}") from None
    record = _as_meant(record)
    if "epochs" not in record and _name(record) in recipes.names():
        record["epochs"] = recipe_of(record).epochs
    return record


def _as_meant(record: Record) -> Record:
    """With the options that its recipe did not have to name in its day, and no change to what it says by now."""
    if _name(record) not in FORMER:
        return record
    options, overrides = options_meant(_name(record), record["model"], record["options"]), dict(record["overrides"])
    network = recipes.Model(record["model"], options)
    if overrides.pop("model", None) is not None and network != recipes.get(_name(record)).model:
        overrides["model"] = {"name": network.name, "options": options}
    return record | {"options": options, "overrides": overrides}


def check(record: Record) -> None:
    """A ValueError where a field is not of its kind, or no recipe can be made of all."""
    for name, value in record.items():
        if name in KINDS and not (value is None and name in MEASURED) and not _is_a(KINDS[name], value):
            raise ValueError(f"{name!r} is {repr(value)[:60]}")
    recipe_of(record)


def _is_a(kind: Any, value: Any) -> bool:
    """Is it of the kind? No bool is a number here, and NaN and infinity are none."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool) and finite


def experiments(records: Iterable[Record]) -> list[Experiment]:
    """The runs, those of one experiment together; in the order of the catalogue, other ones last, and of each recipe
    first what is nearest to it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = [record["dataset"], _name(record), record["model"], record["options"], record.get("epochs")]
        key.append(record.get("parameters"))  # a network may have changed under its name
        groups.setdefault(json.dumps([*key, changes_of(record)], sort_keys=True), []).append(record)
    order = {name: place for place, name in enumerate(recipes.names())}
    found = [_experiment(group) for group in groups.values()]
    return sorted(found, key=lambda one: (order.get(one.name, len(order)), len(one.changes)))


def common_epochs(ours: Iterable[Experiment]) -> int | None:
    """How many epochs most networks were trained for, the most of them if several numbers are as common: experiments of
    other lengths cannot be compared with these."""
    networks: dict[int | None, set[str]] = {}
    for one in ours:
        networks.setdefault(one.epochs, set()).add(f"{one.dataset} {one.model} {sorted(one.options.items())}")
    return max(networks, key=lambda epochs: (len(networks[epochs]), epochs or 0), default=None)


def _experiment(group: list[Record]) -> Experiment:
    first = group[0]
    return Experiment(
        dataset=first["dataset"],
        name=_name(first),
        model=first["model"],
        options=first["options"],
        epochs=first.get("epochs"),
        changes=changes_of(first),
        runs=tuple(sorted(group, key=lambda record: record["seed"])),
    )


def recipe_of(record: Record) -> recipes.Recipe:
    """The recipe that a record is about; a ValueError names the override that does not fit."""
    name, model = _name(record), recipes.Model(record["model"], record.get("options") or {})
    data = record["data"] if "data" in record else record["dataset"]
    recipe = usual(name, model, data, record.get("epochs", 1))
    hints, overrides = get_type_hints(recipes.Recipe), record.get("overrides") or {}
    changes = {key: fit(value, hints[key], key, "overrides") for key, value in overrides.items() if key in hints}
    evidence = recipe.evidence if recipe.model == model else None
    own = {"name": recipe.name, "model": model, "evidence": evidence, "seed": record.get("seed", 0)}
    return replace(recipe, **changes | own)


def _name(record: Record) -> str:
    return record["name"] if "name" in record else record["model"]
