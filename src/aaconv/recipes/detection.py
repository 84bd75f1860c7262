"""Recipes for detection: the paper's experiments on COCO (tables 5 and 8), a small subset of it, from scratch and on a
pretrained backbone, and a demonstration.

The paper trains from scratch for 150 epochs and refers to the focal loss and DropBlock papers for the rest: SGD with
momentum 0.9, batches of 64, a learning rate of 0.08 that decays to a tenth after 120 and 140 epochs, weight decay 1e-4,
images of 640 pixels with a scale jitter of 0.8 to 1.2 and flips. Warm-up and gradient clipping are ours.
"""

import re
from dataclasses import replace
from typing import Any

from .catalogue import ON_A_GPU
from .finetuned import ADAPTED, ARMS, BASE, augmentations
from .paper import TABLES, Row
from .recipe import Evidence, Model, Recipe

KINDS = {"plain": "plain", "se": "squeeze and excitation", "aa": "attention augmented"}
SGD: dict[str, Any] = {"lr_base": 0.08, "lr_base_size": 64, "weight_decay": 1e-4, "clip_grad": 10.0}


def _of_the_paper(table: int, row: Row) -> Recipe:
    found = re.fullmatch(r"(\w+)_retinanet_resnet(\d+)", row.model)
    assert found is not None
    kind, depth = found.groups()
    position = row.options.get("position")
    return Recipe(
        name=f"coco-retinanet{depth}-{kind}" + (f"-{position}" if position else ""),
        summary=f"RetinaNet-ResNet-{depth}, {KINDS[kind]}{f', positions: {position}' if position else ''}, on COCO",
        task="detect",
        model=Model(row.model, dict(row.options)),
        data="coco",
        size=640,
        evidence=Evidence(table, row.name),
        epochs=150,
        batch=64,
        schedule="step",
        decay_epochs=(120, 140),
        warmup=0.01,
        eval_every=5,
        workers=16,
        **SGD,
        **ON_A_GPU,
    )


def _small(kind: str) -> Recipe:
    return Recipe(
        name=f"coco-small-{kind}-retinanet50",
        summary=f"RetinaNet-ResNet-50, {KINDS[kind]}, from scratch on 5,000 images of COCO at 256 pixels",
        task="detect",
        # Objects are 0.4 times as large as at 640 pixels, and so are the anchors, about.
        model=Model(f"{kind}_retinanet_resnet50", {"anchor_scale": 2.0}),
        data="coco/coco-small",
        size=256,
        epochs=60,
        batch=32,
        warmup=0.05,
        eval_every=5,
        checkpoint_every=1560,  # ten epochs
        workers=16,
        keep=1,
        **SGD,
        **ON_A_GPU,  # CUDA graphs: a step of so small images has more launches than work
    )


LITE0_ARMS = {"plain": "plain", "se": "se", "aa": "aa-add-norm"}
"""Kinds of detectors, and what of recipes.finetuned is put into their backbone."""


def _lite0(kind: str) -> Recipe:
    """A pretrained backbone, adapted: what is new learns five times as fast as what is not."""
    arm = LITE0_ARMS[kind]
    options = {"backbone": BASE, "pretrained": True, "anchor_scale": 2.0, "augmentations": augmentations(arm)}
    return Recipe(
        name=f"coco-small-lite0-{kind}",
        summary=f"RetinaNet on pretrained EfficientNet-Lite0, 5,000 images of COCO at 256 pixels: {ARMS[arm][1]}",
        task="detect",
        model=Model("augmented_retinanet", options),
        data="coco/coco-small",
        size=256,
        epochs=20,
        batch=32,
        lr=1e-3,
        lr_backbone=0.2,
        clip_grad=10.0,
        eval_every=20,
        checkpoint_every=1560,  # ten epochs
        workers=4,
        **ADAPTED,
    )


WINDOWS = replace(
    _small("aa"),
    name="coco-small-aa-window-retinanet50",
    summary="RetinaNet-ResNet-50, attention in windows of 13 x 13 in all stages, on 5,000 images of COCO at 512 pixels",
    model=Model(
        "aa_retinanet_resnet50", {"anchor_scale": 3.0, "window": 13, "where": "layer*.*.conv2", "downsample": 0}
    ),
    size=512,
    batch=16,
)

DEMO = Recipe(
    name="detection-demo",
    summary="a small attention augmented RetinaNet on drawn shapes, on a CPU in minutes",
    task="detect",
    model=Model("aa_retinanet_resnet18", {"anchor_scale": 1.5, "channels": 64, "head_depth": 2}),
    data="shapes",
    size=64,
    train_limit=1000,
    eval_limit=200,
    epochs=6,
    batch=16,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=1e-2,
    clip_grad=10.0,
    workers=0,
)

PAPER = tuple(
    _of_the_paper(table, row)
    for table in (5, 8)
    for row in TABLES[table].rows
    if table == 5 or row.options  # the row with relative positions is that of table 5
)
SMALL = (*(_small(kind) for kind in KINDS), WINDOWS)
ON_LITE0 = tuple(_lite0(kind) for kind in LITE0_ARMS)
DETECTION = (DEMO, *SMALL, *ON_LITE0, *PAPER)
