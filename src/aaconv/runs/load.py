"""A trained network, from a run folder or by its registered name."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo
from torch import nn

from .. import recipes
from ..data.transforms import EVAL_CROP, INTERPOLATION
from ..layers.augment import augment as augment_in_place
from ..layers.dry_run import uncompiled
from ..models import check_pretrained, create_model
from ..models.weights import facts_of as facts_of_weights
from ..recipes.recipe import Recipe
from ..tasks.task import create_task
from ..utils.hub_access import hub_weights
from ..utils.weights import read_weights
from .run_folder import (
    CONFIG,
    RECIPE,
    SUMMARY,
    WEIGHTS,
    check_run,
    default_weights,
    is_run,
    naming_the_way_out,
    read_config,
    read_metrics,
    read_summary,
)
from .run_types import data_info_of


@dataclass(frozen=True)
class TrainedModel:
    """A network in evaluation mode and what it takes to use it: names of classes, statistics and size of images.

    >>> import timm
    >>> in_hand = TrainedModel.of(timm.create_model("test_resnet", num_classes=2), classes=["cat", "dog"])
    >>> in_hand.classes, in_hand.size, in_hand.interpolation
    (('cat', 'dog'), 160, 'bilinear')
    """

    model: nn.Module
    recipe: Recipe | None
    classes: tuple[str, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    task: str
    source: str
    metrics: dict[str, Any] | None
    file: Path | None = None
    """Which the weights were read from; None: they are a name's own, or fresh."""
    crop: float = EVAL_CROP
    """The part of an image's shorter side that the network is evaluated on."""
    interpolation: str = INTERPOLATION
    """How images are resized before that."""
    trained: bool = False
    """Without training, what a network attends to says nothing about learning."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        classes: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        size: int | None = None,
        name: str | None = None,
        device: torch.device | str = "cpu",
    ) -> "TrainedModel":
        """A network in hand, copied: the model itself keeps its mode and device.

        What is left out is what timm knows of its networks (pretrained_cfg), or else as for ImageNet; names of classes
        only where the weights are timm's own.
        """
        model = uncompiled(model)
        known = getattr(model, "pretrained_cfg", None) or {}
        return cls(
            model=copy.deepcopy(model).to(device).eval(),
            recipe=None,
            classes=None if classes is None else tuple(classes),
            mean=tuple(mean or known.get("mean") or IMAGENET_DEFAULT_MEAN),
            std=tuple(std or known.get("std") or IMAGENET_DEFAULT_STD),
            size=size or (known.get("input_size") or (3, 224, 224))[-1],
            task="detect" if hasattr(model, "detect") else "classify",
            source=name or known.get("architecture") or type(model).__name__,
            metrics=None,
            crop=known.get("crop_pct") or EVAL_CROP,
            interpolation=known.get("interpolation") or INTERPOLATION,
            trained=True,
        )

    @property
    def run_recipe(self) -> Recipe:
        """The recipe of a run, where it is known to be one."""
        assert self.recipe is not None
        return self.recipe


def load_model(
    source: str | Path | nn.Module | TrainedModel,
    *,
    weights: str | Path | None = None,
    pretrained: bool = False,
    options: dict[str, Any] | None = None,
    num_classes: int | None = None,
    augment: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> TrainedModel:
    """The network of a run folder, of a folder that save_model wrote, or one by its registered name, which hf-hub:
    before owner/name makes one on the hub; or one in hand (`TrainedModel.of` says more of it).

    weights      of a run: last, best or ema; by default best where it stopped early or could have (`patience`), else
        ema where there is one, else last. Or a file, of tensors only
    pretrained   of a name: with its own weights, ours or timm's
    options, num_classes   of a name: what it is built with
    augment      of a name: what aaconv.augment does to it, `where` and its other keywords

    >>> trained = load_model("aa_wrn16_4", pretrained=True)
    >>> trained.task, trained.size, trained.classes[:3]
    ('classify', 32, ('apple', 'aquarium_fish', 'baby'))
    """
    if isinstance(source, TrainedModel | nn.Module):
        if weights or options or num_classes or pretrained or augment:
            raise ValueError("a network in hand is taken as it is: load weights and augment it before")
        return source if isinstance(source, TrainedModel) else TrainedModel.of(source, device=device)
    if is_run(source):
        if options or num_classes or pretrained or augment:
            raise ValueError(f"{source} is a run, its network is built as it was trained: leave out model options")
        return _load_run(Path(source), weights, device)
    if (Path(source) / CONFIG).is_file():
        source = f"local-dir:{source}"
    elif isinstance(source, Path) or ("/" in source and ":" not in source) or source.startswith("."):
        check_run(source, "and models have no slash in their names")
    name = str(source)
    pretrained = pretrained or (weights is None and name.startswith(("local-dir:", "hf-hub:")))
    return _load_named(name, weights, pretrained, options or {}, num_classes, augment, device)


def _load_run(run: Path, weights: str | Path | None, device: torch.device | str) -> TrainedModel:
    recipe, config = recipes.load(run / RECIPE), read_config(run)
    info = data_info_of(config, run / CONFIG)
    model = create_task(recipe).build(info)
    named, weights = weights, weights or default_weights(run, recipe)
    file = run / WEIGHTS[weights] if weights in WEIGHTS else Path(weights)
    if weights in WEIGHTS and not file.is_file():
        there = [name for name, path in WEIGHTS.items() if (run / path).is_file()]
        hint = f"it has {', '.join(there)}" if there else "it has none yet: wait for its first checkpoint"
        raise ValueError(f"{run} has no weights {weights!r}; {hint}")
    fill(model, file)
    with naming_the_way_out(run):
        metrics = read_summary(run) if (run / SUMMARY).is_file() else None
    loaded = TrainedModel(
        model=model.to(device).eval(),
        recipe=recipe,
        classes=info.classes,
        mean=info.mean,
        std=info.std,
        size=info.size,
        task=recipe.task,
        source=str(run),
        metrics=metrics,
        file=file,
        crop=config["pretrained_cfg"].get("crop_pct") or EVAL_CROP,
        interpolation=config["pretrained_cfg"].get("interpolation") or INTERPOLATION,
        trained=True,
    )
    return loaded if named else measured(loaded, str(weights))


def _load_named(
    name: str,
    weights: str | Path | None,
    pretrained: bool,
    options: dict[str, Any],
    num_classes: int | None,
    augment: Mapping[str, Any] | None,
    device: torch.device | str,
) -> TrainedModel:
    if pretrained:
        check_pretrained(name)
    try:
        with hub_weights(name) if pretrained else nullcontext():
            model = create_model(name, pretrained=pretrained, num_classes=num_classes, **options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {options}: {error}") from None
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged: {error}; reinstall or download them again") from None
    except RuntimeError as error:
        raise ValueError(_why_not_built(name, options, str(error))) from None
    known: Any = model.pretrained_cfg
    size = options.get("img_size", known["input_size"][-1])
    if augment is not None:
        model = _augmented(model, size, augment)
    if weights is not None:
        if weights in WEIGHTS:
            raise ValueError(f"weights {weights!r} belong to a run folder; of a model name a file of weights")
        fill(model, Path(weights))
    own_head = pretrained and num_classes is None
    whole = own_head and augment is None
    return TrainedModel(
        model=model.to(device).eval(),
        recipe=None,
        classes=_class_names(known) if own_head else None,
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        size=size,
        task="classify",
        source=name,
        metrics=facts_of_weights(known) if whole and weights is None else None,
        file=None if weights is None else Path(weights),
        crop=known.get("crop_pct") or EVAL_CROP,
        interpolation=known.get("interpolation") or INTERPOLATION,
        trained=weights is not None or (pretrained and augment is None),
    )


def _augmented(model: nn.Module, size: int, keywords: Mapping[str, Any]) -> nn.Module:
    try:
        return augment_in_place(model, size, **keywords)[0]
    except TypeError as error:
        raise ValueError(str(error)) from None


def _why_not_built(name: str, options: dict[str, Any], reason: str) -> str:
    """In one line, without what torch says about every single tensor."""
    first, *more = reason.splitlines() or [""]
    if not more or "state_dict" not in first:
        return f"{name} cannot be built: {first}"
    known = None if ":" in name else timm.get_pretrained_cfg(name)
    file = known.file if known and known.file else f"the file of weights of {name}"
    way_out = f"leave out {', '.join(options)}" if options else "reinstall the package or export the weights again"
    return f"{file} does not fit the network {name}: {_first_misfit(reason)}; {way_out}"


def _first_misfit(reason: str) -> str:
    """Of all that load_state_dict says."""
    _, first, *_ = reason.splitlines()
    return first.strip().partition(', "')[0].rstrip(".")  # of a list of names the first


def _class_names(known: dict[str, Any]) -> tuple[str, ...] | None:
    """What the weights of a name tell apart; timm has names for ImageNet's own thousand classes."""
    if known.get("label_names"):
        return tuple(known["label_names"])
    return tuple(ImageNetInfo().label_descriptions()) if known["num_classes"] == 1000 else None


def fill(model: nn.Module, path: Path) -> None:
    """Read weights into the network; a ValueError names the first that does not fit."""
    try:
        model.load_state_dict(read_weights(path))  # which fits tables
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network: {_first_misfit(str(error))}") from None


def measured(loaded: TrainedModel, weights: str | None) -> TrainedModel:
    """With the metrics of these weights of a run; without any where only others were evaluated.

    summary.json has those of the averaged weights, or without an average those of the last.
    """
    if loaded.metrics is None or weights is None:
        return loaded
    run, metrics = Path(loaded.source), None
    if weights == ("ema" if (run / WEIGHTS["ema"]).is_file() else "last"):
        metrics = loaded.metrics
    elif weights == "best" and loaded.metrics.get("best"):
        epoch = loaded.metrics["best"]["epoch"]
        metrics = loaded.metrics | next((row for row in read_metrics(run) if row.get("epoch") == epoch), {})
    return replace(loaded, metrics=metrics)
