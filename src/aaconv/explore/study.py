"""A network looked at: some images, what it predicts for them, and the attention of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.class_names import class_title
from ..layers.accelerate import accelerate
from ..runs.load import TrainedModel, load_model, measured
from ..utils.metrics import metric_title, telling
from .alignment import cell_shifts
from .capture import Layer, attention_layers, capture, has_attention
from .factors import Packed
from .images import each_image, fit, load_image, normalise

TOP = 5
LARGEST_SIZE = 2048
"""Pixels of a side: at a stride of 32 its map is beyond what a page takes."""


@dataclass(frozen=True)
class Picture:
    """One image as the network saw it, uint8 [3, size, size]; the classes it thinks of with their probabilities."""

    name: str
    pixels: Tensor
    top: list[tuple[str, float]]
    attention: dict[str, Packed]


@dataclass(frozen=True)
class Study:
    """`trained` is False for weights nobody has trained: their maps say nothing about learning."""

    title: str
    facts: list[str]
    trained: bool
    size: int
    layers: list[Layer]
    pictures: list[Picture]

    @property
    def error(self) -> float:
        return max(packed.error for picture in self.pictures for packed in picture.attention.values())


def study(
    source: str | Path | nn.Module | TrainedModel,
    images: Any,
    *,
    names: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    size: int | None = None,
    weights: str | None = None,
    pretrained: bool = False,
    augment: Mapping[str, Any] | None = None,
    look: Callable[[Picture, int], None] = lambda picture, images: None,
) -> Study:
    """Run a run folder's network, a registered one, or one in hand, on images (`each_image` says which).

    augment: of a registered one, what aaconv.augment does to it: {"where": ..., ...}.
    look: is called with every picture as it comes, and the number of all; what it raises ends the rest.
    """
    images = each_image(images)
    if not images:
        raise ValueError("name at least one image")
    if names is not None and len(names) != len(images):
        raise ValueError(f"names must be one per image, got {len(names)} names and {len(images)} images")
    pixels = [load_image(image) for image in images]  # a bad file is found before the network is built
    loaded = measured(load_model(source, weights=weights, pretrained=pretrained, augment=augment), weights)
    if not isinstance(source, TrainedModel):
        _accelerate_others(loaded.model)
    title = Path(loaded.source).resolve().name if loaded.recipe is not None else str(loaded.source)
    chosen = attention_layers(loaded.model, _model_name(loaded), layers)
    size = size or loaded.size
    if size > LARGEST_SIZE:
        raise ValueError(f"the size must be at most {LARGEST_SIZE} pixels, got {size}")
    pictures: list[Picture] = []
    facts: list[Layer] = []
    for index, (image, original) in enumerate(zip(images, pixels, strict=True)):
        shown = fit(original, size, loaded.crop, loaded.interpolation)
        output, facts, attention = _run(loaded, normalise(shown, loaded.mean, loaded.std), chosen)
        name = names[index] if names else _image_name(image, index)
        pictures.append(Picture(name, shown, _top(output, loaded.classes), attention))
        look(pictures[-1], len(images))
    shifts = cell_shifts(loaded.model, normalise(shown, loaded.mean, loaded.std)[None], list(chosen))
    parts = {name: (down / size, right / size) for name, (down, right) in shifts.items()}
    facts = [layer.shifted(*parts[layer.name]) for layer in facts]
    return Study(title, _facts(loaded), loaded.trained, size, facts, pictures)


def _accelerate_others(model: nn.Module) -> None:
    """Relative attention of other networks is read through aaconv.accelerate."""
    if any(map(has_attention, model.modules())):
        return
    with suppress(ValueError):  # it has none, as attention_layers will say
        accelerate(model)
    for module in model.modules():
        if hasattr(module, "strict_img_size"):  # timm's SAM fits its tables to any size, and refuses to by default
            module.strict_img_size = False  # type: ignore[assignment]


def _run(
    loaded: TrainedModel, image: Tensor, chosen: dict[str, nn.Module]
) -> tuple[Any, list[Layer], dict[str, Packed]]:
    try:
        return capture(loaded.model, image, chosen)
    except (RuntimeError, AssertionError) as error:  # timm asserts what its patches can divide
        sides = " x ".join(map(str, image.shape[-2:]))
        raise ValueError(f"{_model_name(loaded)} does not run on images of {sides} pixels: {error}") from None


def _model_name(loaded: TrainedModel) -> str:
    return loaded.recipe.model.name if loaded.recipe is not None else str(loaded.source)


def _image_name(image: Any, index: int) -> str:
    return Path(image).name if isinstance(image, str | Path) else f"image {index + 1}"


def _top(output: Any, classes: Sequence[str] | None) -> list[tuple[str, float]]:
    """The most likely classes of an output [1, classes]; none where the network does not classify."""
    if not isinstance(output, Tensor) or output.dim() != 2:
        return []
    probability, index = output[0].float().softmax(-1).topk(min(TOP, output.shape[-1]))
    names = classes if classes is not None and len(classes) == output.shape[-1] else None
    return [
        (class_title(names[i]) if names is not None else f"class {i}", p)
        for i, p in zip(index.tolist(), probability.tolist(), strict=True)
    ]


def _facts(loaded: TrainedModel) -> list[str]:
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    facts = [f"{parameters:,} parameters"]
    if loaded.recipe is not None:
        data = loaded.recipe.data.rstrip("/").rpartition("/")[2]  # pages are sent around: no local folders
        facts = [loaded.recipe.model.name, f"trained on {data}", *facts]
    elif loaded.metrics is not None:
        facts.append(f"trained on {loaded.metrics['data']}")
    elif loaded.trained:
        facts.append("trained weights")
    metrics = telling(loaded.metrics or {})
    for name, unit in (("top1", " %"), ("mAP", "")):
        if name in metrics:
            facts.append(f"{metrics[name]:.1f}{unit} {metric_title(name)}")
    return facts
