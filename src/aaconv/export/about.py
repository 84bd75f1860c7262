"""What a file of a network says about itself: which images it takes, and what its outputs mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..runs.load import TrainedModel
from ..version import __version__

EXTRA_FILE = "aaconv.json"
"""Where it is in a .pt2 file: torch.export.load(path, extra_files={"aaconv.json": ""}) fills it in."""


def about(loaded: TrainedModel, size: int, outputs: Sequence[str]) -> dict[str, Any]:
    """Names of the classes (None where they are not known), and all that it takes to prepare an image."""
    return {
        "model": loaded.recipe.model.name if loaded.recipe is not None else loaded.source,
        "task": loaded.task,
        "classes": None if loaded.classes is None else list(loaded.classes),
        "outputs": list(outputs),
        "size": size,
        "crop": loaded.crop,
        "interpolation": loaded.interpolation,
        "mean": list(loaded.mean),
        "std": list(loaded.std),
        "image": "RGB; resize the shorter side to size / crop, cut out the middle, divide by 255, (x - mean) / std"
        if loaded.task == "classify"
        else "RGB; resize the longer side to size, divide by 255, (x - mean) / std, fill up with 0 right or below",
        "aaconv": __version__,
    }


def as_texts(facts: dict[str, Any]) -> dict[str, str]:
    """Texts as they are, all else as JSON: ONNX's metadata are texts."""
    return {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}
