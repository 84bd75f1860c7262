"""The paper's models and the ones it compares with. Importing this registers them with timm.

A name is `<kind>_<network>`: the kind is plain, se, ge, bam, cbam, gala or aa (attention augmented), the network
resnet18, 34, 50, 101, 152; wrn28_10, 28_2, 16_4, 40_2; for plain and aa mnasnet_075, 100, 125, 140; and for plain, se
and aa the detectors retinanet_resnet50, 101 and the demo's small. Keywords reach the layers:
`timm.create_model("aa_resnet50", key_ratio=0.5, value_ratio=0.5, position="sinusoidal", num_heads=4)`.
Besides there are aa_window_resnet50, with windows in all stages and heads that grow with the channels, and `augmented`:
any other network, with attention put into it; `augmented_retinanet` is RetinaNet on such a one.
"""

import fnmatch
from difflib import get_close_matches
from typing import Any

import timm
from torch import nn

from ..layers import dry_run
from . import aa_mnasnet, aa_resnet, aa_retinanet, aa_small, aa_wide_resnet
from . import augmented as augmented
from . import augmented_retinanet as augmented_retinanet
from .aa_mnasnet import MnasNet
from .aa_resnet import ResNet
from .aa_retinanet import RetinaNet, retinanet
from .aa_small import SmallNet
from .aa_wide_resnet import WideResNet
from .weights import options_of, shipped

__all__ = [
    "MnasNet",
    "ResNet",
    "RetinaNet",
    "SmallNet",
    "WideResNet",
    "create_model",
    "create_without_memory",
    "list_models",
    "retinanet",
]

LOADS_WEIGHTS = ("pretrained", "checkpoint_path", "pretrained_backbone")


def list_models(pattern: str = "*") -> list[str]:
    """Our names that fit the wildcard pattern, family by family; timm.list_models() leaves out the detectors.

    >>> list_models("aa_wrn*")
    ['aa_wrn16_4', 'aa_wrn28_2', 'aa_wrn28_10', 'aa_wrn40_2']
    """
    families = [timm.list_models(module=_last(family)) for family in (aa_resnet, aa_wide_resnet, aa_mnasnet, aa_small)]
    detectors = sorted(aa_retinanet.default_cfgs, key=lambda name: name.partition("_")[0])
    families.insert(3, detectors)
    return [name for family in families for name in fnmatch.filter(family, pattern)]


def create_model(name: str, **options: Any) -> nn.Module:
    """timm.create_model, but a name that does not exist is a ValueError with the nearest ones that do.

    >>> model = create_model("aa_wrn16_4", num_classes=10)
    >>> create_model("aa_resnet51")
    Traceback (most recent call last):
        ...
    ValueError: unknown model 'aa_resnet51'; did you mean aa_resnet50, aa_resnet18, aa_resnet152?
    """
    check_name(name)
    return timm.create_model(name, **options)


def create_without_memory(name: str, **options: Any) -> nn.Module:
    """create_model over meta tensors, to count or to check it; what would load weights is left out."""
    check_name(name)
    kept = {key: value for key, value in options.items() if key not in LOADS_WEIGHTS}
    return dry_run.build(lambda: timm.create_model(name, **kept))


def pretrained_names() -> list[str]:
    """Our names that have weights, family by family; with their tags where those are of a network with options."""
    with_options = [key for key, cfg in shipped().items() if options_of(cfg)]
    names = ((name, key) for name in list_models() for key in (name, *with_options))
    return [key for name, key in names if key.partition(".")[0] == name and timm.is_model_pretrained(key)]


def check_name(name: str) -> None:
    """A ValueError where timm knows no such model; what has a ":" is not looked for here."""
    if ":" in name:
        return
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(name, list_models(), n=3) or get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() has all names"
        raise ValueError(f"unknown model {name!r}; {hint}")
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:
        raise ValueError(f"{architecture} has no weights called {tag!r}; leave out .{tag}") from None


def check_pretrained(name: str) -> None:
    """A ValueError where there are no weights of that name; what has a ":" is not looked for here."""
    check_name(name)
    if ":" not in name and not timm.is_model_pretrained(name):
        ours = ", ".join(pretrained_names())
        hint = f" (these have: {ours})" if ours else ""
        raise ValueError(f"{name} has no pretrained weights{hint}; name a run, or a file of weights with --weights")


def _last(module: Any) -> str:
    return module.__name__.rpartition(".")[2]
