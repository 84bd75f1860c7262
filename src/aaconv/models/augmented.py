"""Any network of timm or torchvision with attention in it, by one registered name: what `augment` did is written down
in keywords, so that a config.json can hold it.

    timm.create_model("augmented", base="resnet50", augmentations=[{"where": "layer[34].*.conv2", "combine": "add"}])
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import timm
import torch
import torchvision
from timm.models import generate_default_cfgs, load_pretrained, register_model, resolve_pretrained_cfg
from torch import nn

from ..layers.augment import augment, example_inputs
from ..layers.comparisons import put_instead
from ..layers.parameters import exclude_from_weight_decay

NAME = "augmented"
TORCHVISION = "torchvision/"
"""Before the name of a network of torchvision's."""
EXAMPLE = 224

default_cfgs = generate_default_cfgs({NAME: {}})


@register_model
def augmented(
    pretrained: bool = False,
    *,
    base: str | None = None,
    augmentations: Sequence[Mapping[str, Any]] = (),
    img_size: int | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: Any = None,
    **options: Any,
) -> nn.Module:
    """`base`, a name of timm's or torchvision/NAME, built with the options and changed by `augment` once for each of
    the augmentations: its keywords, `where` among them. `example` may be left out: it is img_size, or the base's own.
    With instead="se" or "average" it is what attention is compared with (aaconv.layers.comparisons).

    pretrained: with the base's weights; where timm brings a pretrained_cfg, as of local-dir: and hf-hub:, with those
    of the whole augmented network.
    """
    if base is None:
        raise ValueError("augmented needs base=NAME, the network that attention is put into, such as base='resnet50'")
    if options.pop("features_only", False):
        raise ValueError("augmented takes no features_only: build the base with it, and augment what comes out")
    options.pop("pretrained_model_args", None)  # of timm from 1.0.31 on: what a saved network was built with, once more
    whole = pretrained_cfg is not None
    if whole:
        known = resolve_pretrained_cfg(NAME, pretrained_cfg, pretrained_cfg_overlay)
        options.setdefault("num_classes", known.num_classes)
        model = create_base(base, img_size=img_size, **options)
        vars(model).update(pretrained_cfg=known.to_dict(), default_cfg=known.to_dict())
    else:
        weights = {"pretrained": pretrained, "pretrained_cfg_overlay": pretrained_cfg_overlay, "cache_dir": cache_dir}
        model = create_base(base, img_size=img_size, **options, **weights)
    vars(model)["augmented_from"] = {"base": base, **options}
    for keywords in augmentations:
        augment_once(model, base, keywords, img_size)
    if whole and pretrained:
        channels = options.get("in_chans", 3)
        load_pretrained(model, known.to_dict(), options["num_classes"], channels, cache_dir=cache_dir)
    return model


def check_is_name(name: Any) -> None:
    """A ValueError unless it is a text, as --model.base 5 is not."""
    if not isinstance(name, str):
        raise ValueError(f"the network to augment must be a name of timm's, such as resnet50, got {name!r}")


def create_base(name: str, *, img_size: int | None = None, **options: Any) -> nn.Module:
    """The network that is augmented; a ValueError where there is none of that name."""
    options = {key: value for key, value in options.items() if value is not None}
    check_is_name(name)
    if not name.startswith(TORCHVISION):
        if not timm.is_model(name.partition(".")[0]):
            near = get_close_matches(name, timm.list_models(), n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() has all names"
            raise ValueError(f"unknown model {name!r} to augment; {hint}")
        if img_size is not None and _has_a_size(name):
            options["img_size"] = img_size
        return timm.create_model(name, **options)
    options.pop("cache_dir", None)
    if options.pop("pretrained_cfg_overlay", None):
        raise ValueError(f"{name} takes no file of weights: leave it out, or name a network of timm's")
    if options.pop("pretrained", False):
        options["weights"] = "DEFAULT"
    return torchvision.models.get_model(name.removeprefix(TORCHVISION), **options)


def _has_a_size(name: str) -> bool:
    """Whether the network is made for one size of image."""
    known = timm.get_pretrained_cfg(name)
    return known is not None and known.fixed_input_size


def augment_once(model: nn.Module, base: str, keywords: Mapping[str, Any], img_size: int | None) -> None:
    """Put into a network, in place, what one of the augmentations says."""
    if not isinstance(keywords, Mapping) or "where" not in keywords:
        raise ValueError(f"augmentations of {base} must be mappings with `where`, got {keywords!r}")
    keywords = dict(keywords)
    example = keywords.pop("example", None) or img_size or _own_example(model)
    if isinstance(example, Sequence) and isinstance(example[0], Sequence):
        dtype = next(model.parameters()).dtype
        example = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in example)
    if "instead" not in keywords:
        augment(model, example, **keywords)
        return
    done = {"example": [list(x.shape) for x in example_inputs(model, example)], **keywords}
    put_instead(model, keywords.pop("instead"), **keywords)
    vars(model)["augmentations"] = (*getattr(model, "augmentations", ()), done)
    exclude_from_weight_decay(model)


def _own_example(model: nn.Module) -> Sequence[int] | int:
    return getattr(model, "pretrained_cfg", {}).get("input_size") or EXAMPLE
