"""The costs of our models, counted once and kept in known.json: `aaconv models` and `aaconv table` answer from there.

"models" are ours in their own image size, "variants" the other settings of the paper's tables. What they cost follows
from their code: `make costs` counts all of them again, and the tests compare.
"""

import json
from collections.abc import Iterable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from ..utils.files import replacing
from .totals import AttentionCost, Totals

FILE = Path(__file__).with_name("known.json")
WEIGHTS = Path(__file__).parents[1] / "weights"

Setting = tuple[str, tuple[int, int], dict[str, Any]]
"""A model's name, the size of its image, and its options."""


def cost_of(name: str, size: tuple[int, int] | None = None, **options: Any) -> Totals:
    """What a registered model costs, built for `size` (default: its own) with `options`; counted where not known.

    >>> cost = cost_of("aa_resnet50")
    >>> cost.params, round(cost.gflops, 2), round(cost.true_gflops, 2)
    (25809392, 8.32, 8.46)
    """
    found = _known().get(_key(name, size, options))
    if found is not None:
        return found
    from .counting import count_named

    return count_named(name, size, **options)


def known_models() -> list[str]:
    """The names of our models, family by family."""
    return [record["model"] for record in read()["models"]]


def pretrained() -> dict[str, str]:
    """Model -> what its weights that come with the package reach; as timm's cfg describes them, without timm. With its
    tag where the weights are of a network with options, for which the name alone does not stand."""
    found: dict[str, str] = {}
    for file in sorted(WEIGHTS.glob("[!.]*.json")):
        facts = json.loads(file.read_text(encoding="utf-8"))
        if file.with_suffix(".safetensors").is_file():
            reached = f"top-1 {facts['top1']:.2f} %, top-5 {facts['top5']:.2f} %"
            name = file.stem if facts.get("options") else facts["architecture"]
            found.setdefault(name, f"{facts['data']}: {reached}")
    return found


def write(variants: Iterable[Setting], file: Path = FILE) -> None:
    """Count every model of ours, and the variants, and keep what comes out."""
    from ..models import list_models
    from .counting import count_named

    kept = {
        "models": [_record(count_named(name)) for name in list_models()],
        "variants": [
            _record(count_named(name, size, **options)) | {"options": options} for name, size, options in variants
        ],
    }
    with replacing(file) as draft:
        draft.write_text(_a_line_each(kept), encoding="utf-8")


def _record(cost: Totals) -> dict[str, Any]:
    branches = [astuple(branch) for branch in cost.attention]
    return cost.summary() | {"largest_map": cost.largest_map, "attention": branches}


def _a_line_each(kept: dict[str, list[dict[str, Any]]]) -> str:
    groups = (f'"{group}": [\n' + ",\n".join(map(json.dumps, records)) + "\n]" for group, records in kept.items())
    return "{" + ",\n".join(groups) + "}\n"


@cache
def read(file: Path = FILE) -> dict[str, list[dict[str, Any]]]:
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def _known() -> dict[str, Totals]:
    models: list[tuple[dict[str, Any], dict[str, Any], Any]] = [(record, {}, None) for record in read()["models"]]
    variants = [(record, record["options"], tuple(record["size"])) for record in read()["variants"]]
    found: dict[str, Totals] = {}
    for record, options, size in [*models, *variants]:
        about = {name: value for name, value in record.items() if name != "options"}
        about |= {
            "size": tuple(record["size"]),
            "attention": [AttentionCost(*branch) for branch in record["attention"]],
        }
        totals = Totals(**about)
        found |= dict.fromkeys((_key(totals.model, one, options) for one in (size, totals.size)), totals)
    return found


def _key(name: str, size: tuple[int, int] | None, options: dict[str, Any]) -> str:
    return json.dumps([name, size, options], sort_keys=True, default=repr)
