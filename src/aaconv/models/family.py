"""What the families share: keywords sorted to where they belong, and how timm builds the networks."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, resolve_pretrained_cfg
from torch import nn

from ..layers.augment import OPTIONS, RULES, augment
from ..layers.channels import Preset
from ..layers.gates import GATES
from .weights import options_of, shipped

# The first word of a name, and what it means.
KINDS = {
    "plain": "plain",
    **{name: f"with {gate.__name__}" for name, gate in GATES.items()},
    "aa": "attention augmented",
}

# `size` follows from img_size; device and dtype from the convolution that is replaced.
_SET_FOR_THE_CALLER = {"size", "device", "dtype"}


def keyword_names(function: Callable[..., Any]) -> set[str]:
    """The names of a function's arguments that a caller may choose."""
    return inspect.signature(function).parameters.keys() - {"self"}


ATTENTION_OPTIONS = OPTIONS - _SET_FOR_THE_CALLER | RULES | {"where"}


def gate_options(gate: str | None) -> set[str]:
    """The keywords of the gate of that name, none without a gate."""
    if gate is None:
        return set()
    if gate not in GATES:
        raise ValueError(f"gate must be one of {', '.join(GATES)} or None, got gate={gate!r}")
    return keyword_names(GATES[gate]) - {"channels"} - _SET_FOR_THE_CALLER


def sort_options(
    options: dict[str, Any], *groups: set[str], owner: str, also: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """One dict a group of names; an option that fits none is a TypeError that suggests the nearest name."""
    known = set().union(*groups)
    for name in options.keys() - known:
        near = get_close_matches(name, known | set(also), n=3)
        elsewhere = " (only the aa_ models have attention)" if name in ATTENTION_OPTIONS else ""
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise TypeError(f"{owner} takes no keyword {name!r}{elsewhere}{hint}")
    return [{name: value for name, value in options.items() if name in group} for group in groups]


def image_size(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an int or a pair."""
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"img_size must be a positive int or (height, width), got img_size={img_size}")
    return size


def augment_network(
    model: nn.Module, in_chans: int, img_size: tuple[int, int], options: dict[str, Any], **rule: Any
) -> None:
    """Augment by the paper's rule (where, downsample); the caller's options override it."""
    augment(model, (in_chans, *img_size), **(rule | options))
    # The name of the model stands for this; only what a caller does to it besides has to be kept.
    del model.augmentations


def imagenet_cfgs(names: Iterable[str], **network: str) -> Any:
    """timm's pretrained_cfg of each name: ImageNet at 224, and what the network calls its ends."""
    common = {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
    }
    return _cfgs(names, common | network)


def small_image_cfgs(names: Iterable[str], **network: Any) -> Any:
    """timm's pretrained_cfg of networks for images of 32 x 32 pixels, as CIFAR's, which are not cropped."""
    common = {
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    return _cfgs(names, common | network)


def _cfgs(names: Iterable[str], common: dict[str, Any]) -> Any:
    """With the weights that come with the package, for the names that have some; a name alone never stands for those
    of a network with options."""
    found: dict[str, Any] = {}
    for name in names:
        tagged = {key: cfg for key, cfg in shipped().items() if key.partition(".")[0] == name}
        usual = {key: common | cfg for key, cfg in tagged.items() if not options_of(cfg)}
        others = {key: common | {"pool_size": None} | cfg for key, cfg in tagged.items() if options_of(cfg)}
        found |= (usual or {name: common}) | others
    defaults = generate_default_cfgs(found)
    for default in defaults.values():
        if "" in default.cfgs:  # timm puts what has weights first
            default.tags.remove("")
            default.tags.appendleft("")
    return defaults


def create(
    model_class: type[nn.Module],
    name: str,
    pretrained: bool,
    options: dict[str, Any],
    settings: dict[str, Any],
    features: dict[str, Any] | None = None,
) -> Any:
    """The network of that name: `model_class` with the paper's settings, which the caller's options override.

    features: what timm is to know for features_only.
    """
    options = _with_own_options(name, options)
    presets = {key: Preset(value) for key, value in settings.items() if key.endswith("_ratio")}
    chosen = {key: value for key, value in (settings | presets).items() if not _replaced(key, options)}
    return build_model_with_cfg(model_class, name, pretrained, feature_cfg=dict(features or {}), **(chosen | options))


def _replaced(setting: str, options: dict[str, Any]) -> bool:
    # A number of channels takes the place of the ratio: the layer refuses both.
    return setting.endswith("_ratio") and f"{setting.removesuffix('_ratio')}_channels" in options


def _with_own_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The caller's keywords, and those that the network of the named weights has; a ValueError where they differ.

    img_size may differ: tables fit any.
    """
    known = resolve_pretrained_cfg(name, options.get("pretrained_cfg")).to_dict()
    own = options_of(known)
    for key in sorted((own.keys() - {"img_size"}) & options.keys()):
        given = list(options[key]) if isinstance(options[key], tuple) else options[key]
        if given != own[key]:
            raise ValueError(
                f"the weights {Path(known['file']).stem} are of a network with {key}={own[key]!r}, got "
                f"{key}={options[key]!r}; leave it out, or build {name} without these weights"
            )
    return own | options
