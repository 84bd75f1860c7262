"""RetinaNet on the features of any network of timm that has pretrained weights, with attention put into it, by one
registered name: what was done is written down in keywords, so that a config.json can hold it.

    timm.create_model("augmented_retinanet", pretrained=True, backbone="resnet50", num_classes=20, img_size=256,
                      augmentations=[{"where": "layer[34].*.conv2", "combine": "add"}])
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs, load_pretrained, resolve_pretrained_cfg
from torch import nn

from ..layers.parameters import exclude_from_weight_decay
from .aa_retinanet import RetinaNet
from .augmented import TORCHVISION, augment_once, check_is_name, create_base
from .family import keyword_names
from .timm_seam import register_unlisted

NAME = "augmented_retinanet"
BACKBONE = "tf_efficientnet_lite0"
OF_THE_DETECTOR = keyword_names(RetinaNet.__init__) - {"backbone", "img_size", "pretrained_backbone", "options"}
OF_THE_WEIGHTS = ("mean", "std", "input_size", "interpolation", "license")
"""What the detector takes over of what timm knows about its backbone's weights."""

default_cfgs = generate_default_cfgs({NAME: {}})


@register_unlisted
def augmented_retinanet(
    pretrained: bool = False,
    *,
    backbone: str = BACKBONE,
    augmentations: Sequence[Mapping[str, Any]] = (),
    img_size: int | None = None,
    in_chans: int = 3,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: Any = None,
    **options: Any,
) -> RetinaNet:
    """RetinaNet on `backbone`, a name of timm's, changed by `augment` once for each of the augmentations: its keywords,
    `where` among them, with names as features_only=True leaves them. Options that RetinaNet does not have are the
    backbone's.

    pretrained: with the backbone's weights; where timm brings a pretrained_cfg, as of local-dir: and hf-hub:, with
    those of the whole detector.
    """
    options.pop("pretrained_model_args", None)  # of timm from 1.0.31 on: what a saved network was built with, once more
    whole = None if pretrained_cfg is None else resolve_pretrained_cfg(NAME, pretrained_cfg, pretrained_cfg_overlay)
    own = {name: options.pop(name) for name in OF_THE_DETECTOR & options.keys()}
    if whole is not None:
        own.setdefault("num_classes", whole.num_classes)
    else:
        options |= {"pretrained": pretrained, "pretrained_cfg_overlay": pretrained_cfg_overlay, "cache_dir": cache_dir}
    features = _features(backbone, img_size, in_chans=in_chans, **options)
    model = RetinaNet(features, in_chans=in_chans, **own)
    # Last, so that detectors with and without attention start from the same numbers where they have the same seed.
    for keywords in augmentations:
        augment_once(model.backbone, backbone, keywords, img_size)
    exclude_from_weight_decay(model)
    known = _known(model, img_size)
    if whole is not None:
        known = replace(whole, first_conv=known.first_conv, classifier=known.classifier)
    vars(model).update(pretrained_cfg=known.to_dict(), default_cfg=known.to_dict())
    if whole is not None and pretrained:
        load_pretrained(model, known.to_dict(), model.num_classes, in_chans, cache_dir=cache_dir)
    return model


def _features(name: str, img_size: int | None, **options: Any) -> nn.Module:
    """The backbone, which gives several maps; a ValueError where it is not timm's."""
    check_is_name(name)
    if name.startswith(TORCHVISION):
        raise ValueError(f"the backbone must be a network of timm's, got {name!r}; timm.list_models() has all names")
    features: Any = create_base(name, img_size=img_size, features_only=True, **options)
    features.pretrained_cfg.pop("state_dict", None)  # it is in the network
    return features


def _known(model: RetinaNet, img_size: int | None) -> Any:
    """timm's pretrained_cfg of a detector: images as the backbone's weights know them."""
    theirs: Any = model.backbone.pretrained_cfg
    found = {name: theirs[name] for name in OF_THE_WEIGHTS if theirs.get(name)}
    sides = (img_size, img_size) if img_size is not None else tuple(found.get("input_size", ()))[1:]
    if sides:
        found["input_size"] = (model.in_chans, *sides)
    first = theirs.get("first_conv") or ()
    names = tuple(f"backbone.{name}" for name in ((first,) if isinstance(first, str) else first))
    ends = {"first_conv": names[0] if len(names) == 1 else names, "classifier": "class_head.predict"}
    return resolve_pretrained_cfg(NAME, {**found, **ends, "num_classes": model.num_classes, "pool_size": None})
