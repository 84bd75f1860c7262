"""Weights that come with the package: `timm.create_model("aa_wrn16_4", pretrained=True)` without a network.

weights/NAME.TAG.safetensors   matrices in half precision; they become float32 where the network is
weights/NAME.TAG.json          what they are: data, accuracy, recipe, commit, classes, statistics of the images, options
weights/NAME.TAG.md            their model card

Without options the network of NAME is meant, and NAME alone has these weights, too; a network with options, such as
stem_pool=False, is built by NAME.TAG alone, which adds them.

`aaconv export RUN -o src/aaconv/weights/NAME.TAG.safetensors --data-dir DIR` writes all three.
"""

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import timm

FOLDER = Path(__file__).parents[1] / "weights"
OF_TIMM = ("num_classes", "input_size", "mean", "std", "crop_pct", "label_names")
"""What timm's pretrained_cfg takes over as it is."""

_logger = logging.getLogger(__name__)


@cache
def shipped(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """NAME.TAG -> timm's pretrained_cfg of every file of weights in the folder; not of one that is being written."""
    files = [file for file in sorted(folder.glob("[!.]*.safetensors")) if file.with_suffix(".json").is_file()]
    known = {}
    for file in files:
        try:
            known[file.name.removesuffix(file.suffix)] = _cfg(file)
        except (OSError, ValueError, KeyError, TypeError) as error:  # the rest of the package works without it
            reason = f"{type(error).__name__}: {error}"
            _logger.warning("no weights for %s: %s is damaged (%s)", file.stem, file.with_suffix(".json"), reason)
    return known


def _cfg(file: Path) -> dict[str, Any]:
    facts = read_facts(file)
    as_tuples = {name: tuple(facts[name]) if isinstance(facts[name], list) else facts[name] for name in OF_TIMM}
    if not isinstance(facts.get("options", {}), dict):
        raise TypeError(f"options must be a mapping, got {facts['options']!r}")
    if len(facts["label_names"]) != facts["num_classes"]:
        raise ValueError(f"{len(facts['label_names'])} label_names, but num_classes is {facts['num_classes']}")
    trained = f"{facts['recipe']}, seed {facts['seed']}, {facts['epochs']} epochs, commit {facts['commit']}"
    changed = ", ".join(f"{name}={value}" for name, value in dict(facts["overrides"]).items())
    return as_tuples | {
        "file": str(file),
        "description": f"{facts['data']}: top-1 {facts['top1']:.2f} %, top-5 {facts['top5']:.2f} %",
        "notes": (f"data {facts['data']}", f"recipe {trained}", *([f"changed: {changed}"] if changed else [])),
        "license": "apache-2.0",
        "paper_ids": "arXiv:1904.09925",
    }


def read_facts(file: Path) -> dict[str, Any]:
    """The JSON beside a file of weights."""
    return json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))


def facts_of(cfg: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is known about the weights of a pretrained_cfg; None where they did not come with this package."""
    file = cfg.get("file")
    return read_facts(Path(file)) if file and Path(file).parent == FOLDER else None


def options_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the network of the weights of a pretrained_cfg is built with."""
    return (facts_of(cfg) or {}).get("options", {})


def options_of_name(name: str) -> dict[str, Any]:
    """The same of a model's name with its tag; none where its weights did not come with this package."""
    known = None if ":" in name else timm.get_pretrained_cfg(name)
    return options_of(known.to_dict()) if known else {}
