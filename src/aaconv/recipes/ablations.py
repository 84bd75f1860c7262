"""The paper's ablations in a size that one GPU does in an evening: ResNet-50 on Imagenette at 160 pixels, kept there.

Rows of tables 3, 6 and 7, and what the paper's text asks besides: heads, relative tables per head, and both curves of
figure 4. All are trained alike. `examples/queue_runs.py 'imagenette-ablation-*' --seeds 0 1 2` trains them all.

Windows: the same network, plain, with SE, with an even average, with the paper's attention and with local attention in
all stages.

And what the layer is for, in one figure: small networks on `shapes`, the objects more and more columns apart.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .catalogue import ON_A_GPU
from .pretrained import AUGMENTED
from .recipe import Model, Recipe

RATIOS = (0.25, 0.5, 0.75, 1.0)
HEADS = (1, 2, 4, 16)
POSITIONS = ("none", "sinusoidal", "coordconv")
PREFIX = "imagenette-ablation"


def _variants() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """(end of the name, model, options, title)."""
    yield "plain", "plain_resnet50", {}, "convolutions only"
    yield "se", "se_resnet50", {}, "Squeeze-and-Excitation"
    yield "aa", "aa_resnet50", {}, "attention with relative positions"
    yield "aa-se", "aa_resnet50", {"gate": "se"}, "attention and Squeeze-and-Excitation"
    for position in POSITIONS:
        title = "attention without positions" if position == "none" else f"attention, {position} positions"
        yield f"position-{position}", "aa_resnet50", {"position": position}, title
    for ratio in RATIOS:
        title = "fully attentional" if ratio == 1 else f"{ratio:.0%} of the channels are attention's"
        options = {"key_ratio": ratio, "value_ratio": ratio}
        yield f"ratio-{ratio}", "aa_resnet50", options, title
        yield f"ratio-{ratio}-no-position", "aa_resnet50", options | {"position": "none"}, f"{title}, no positions"
    for heads in HEADS:
        # Sixteen would leave the narrowest stage without a value channel for each.
        more: dict[str, Any] = {"num_heads": heads} | ({"min_value_channels_per_head": 1} if heads > 8 else {})
        yield f"heads-{heads}", "aa_resnet50", more, f"attention with {heads} head{'s' * (heads > 1)} instead of 8"
    yield "per-head", "aa_resnet50", {"share_heads": False}, "attention with relative tables per head"


def _recipe(variant: str, model: str, options: dict[str, Any], title: str) -> Recipe:
    return Recipe(
        name=f"{PREFIX}-{variant}",
        summary=f"ResNet-50 on Imagenette at 160 pixels: {title}",
        model=Model(model, options),
        data="folder/imagenette160",
        size=160,
        in_memory=True,
        epochs=80,
        batch=128,
        lr_base=0.128,
        weight_decay=1e-4,
        label_smoothing=0.1,
        eval_every=5,
        workers=16,
        keep=1,
        **ON_A_GPU,
    )


WINDOWS_PREFIX = "imagenette-windows"
EIGHT_HEADS = {"num_heads": 8}
"""In all stages: what the network had when the first windows were recorded (`former`)."""
WINDOWED: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": ("plain_resnet50", {}, "convolutions only"),
    "se": ("se_resnet50", {}, "Squeeze-and-Excitation"),
    "average": (
        AUGMENTED,
        {"base": "plain_resnet50", "augmentations": [{"where": "layer[234].*.conv2", "instead": "average"}]},
        "an even average over the map, added in the last three stages behind zero gates",
    ),
    "global": ("aa_resnet50", {}, "attention over the whole map in the last three stages, the first of them pooled"),
    "7": (
        "aa_window_resnet50",
        {"window": 7} | EIGHT_HEADS,
        "attention in windows of 7 x 7 in all four stages, nothing pooled",
    ),
    "13": ("aa_window_resnet50", EIGHT_HEADS, "attention in windows of 13 x 13 in all four stages, nothing pooled"),
    "13-growing-heads": (
        "aa_window_resnet50",
        {},
        "attention in windows of 13 x 13 in all four stages, nothing pooled, in 2, 4, 8 and 8 heads",
    ),
}


def _windowed(variant: str) -> Recipe:
    """20 epochs, for all alike: three seeds of four of them took 441 s of an H200, four side by side. The maps are 40,
    20, 10 and 5 pixels wide, so that windows of 7 leave something out in three stages, those of 13 in two."""
    return replace(
        _recipe(variant, *WINDOWED[variant]),
        name=f"{WINDOWS_PREFIX}-{variant}",
        epochs=20,
        eval_every=10,
        checkpoint_every=730,  # of 1,460 steps: a checkpoint takes as long as an epoch
        workers=4,  # which decode the images before the first epoch, in runs side by side
    )


DISTANCES = (2, 4, 6, 8, 10, 12, 14, 18, 24, 34)
"""Columns between the objects: the windows of the small networks are 15 wide, the images 48."""


def _graded(kind: str, distance: int) -> Recipe:
    return Recipe(
        name=f"shapes-distance-{distance}-{kind}",
        summary=f"small network on shapes {distance} columns apart: {SMALL_KINDS[kind]}",
        model=Model(f"{kind}_small"),
        data=f"shapes:distance={distance}",
        size=48,
        epochs=10,
        batch=64,
        optimizer="adamw",
        lr=0.01,
        weight_decay=0.01,
        eval_every=10,
        workers=0,
        keep=1,
    )


SMALL_KINDS = {"plain": "convolutions only", "se": "with Squeeze-and-Excitation", "aa": "with attention"}
ABLATIONS = (
    *(_recipe(*variant) for variant in _variants()),
    *(_windowed(variant) for variant in WINDOWED),
    *(_graded(kind, distance) for distance in DISTANCES for kind in SMALL_KINDS),
)
