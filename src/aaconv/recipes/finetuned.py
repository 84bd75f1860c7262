"""Does attention help a network that is pretrained? EfficientNet-Lite0, adapted to CIFAR-100 at 96 pixels, all alike.

Every arm begins as the pretrained network's function, but for `aa-concat`, the paper's form, which breaks it. What is
added stands at the last expansion of both stages of stride 16, and has 0.8 to 2.1 % of the network's parameters.
`aaconv train cifar100-lite0-aa-add --pretrained FILE` names the weights.
"""

from typing import Any

from .catalogue import ON_A_GPU
from .pretrained import AUGMENTED
from .recipe import Model, Recipe

BASE = "tf_efficientnet_lite0"
WHERE = ["blocks.3.2.conv_pw", "blocks.4.2.conv_pw"]
"""1 x 1 convolutions to six times the channels, on maps of a sixteenth of the image's side."""
SIZES: dict[str, Any] = {"num_heads": 4, "key_channels": 64, "value_channels": 32}
ARMS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "plain": (None, "as it is"),
    "se": ({"instead": "se", "hidden": 32}, "Squeeze-and-Excitation added, its factor 1 at the start"),
    "average": ({"instead": "average", "value_channels": 32}, "an even average of values added behind zero gates"),
    "aa-concat": ({"combine": "concat", **SIZES}, "attention in the place of 32 channels"),
    "aa-add": ({"combine": "add", **SIZES}, "attention added behind zero gates"),
    "aa-add-norm": ({"combine": "add", "qk_norm": True, **SIZES}, "the same with normalised queries and keys"),
}


def augmentations(arm: str) -> list[dict[str, Any]]:
    """What an arm puts into the network, as the models `augmented` and `augmented_retinanet` take it."""
    options, _ = ARMS[arm]
    return [] if options is None else [{"where": WHERE, **options}]


ADAPTED: dict[str, Any] = {
    "normalize": "model",
    "optimizer": "adamw",
    "weight_decay": 0.05,
    "decay": "matrices",
    "warmup": 0.1,
    "keep": 1,
    **ON_A_GPU,
}
"""How the pretrained network is trained further, whatever for."""


def _recipe(arm: str) -> Recipe:
    return Recipe(
        name=f"cifar100-lite0-{arm}",
        summary=f"EfficientNet-Lite0 pretrained on ImageNet, on CIFAR-100 at 96 pixels: {ARMS[arm][1]}",
        model=Model(AUGMENTED, {"base": BASE, "augmentations": augmentations(arm), "pretrained": True}),
        data="cifar100",
        size=96,
        epochs=6,
        batch=256,
        lr=2e-3,
        lr_backbone=0.5,
        clip_grad=1.0,
        head="zero",
        label_smoothing=0.1,
        eval_every=6,
        workers=0,
        **ADAPTED,
    )


FINETUNED = tuple(_recipe(arm) for arm in ARMS)
