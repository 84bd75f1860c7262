"""A detector that is trained in seconds, and what its tests need."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch

from aaconv import recipes
from aaconv.detection import Detections, coco_results
from aaconv.tasks import detect
from aaconv.training.trainer import train
from aaconv.utils.distributed import World

CPU = World(torch.device("cpu"))
SCORERS = pytest.mark.skipif(coco_results.scorer() is None, reason="needs torchmetrics and faster-coco-eval")


def tiny_recipe(folder, **changes):
    """One epoch on ten images, with a network that is as small as they come."""
    options = {"channels": 16, "head_depth": 1, "anchor_scale": 2.0}
    recipe = replace(
        recipes.get("detection-demo"),
        name="tiny",
        model=recipes.Model("plain_retinanet_resnet18", options),
        data="coco",
        data_dir=str(folder),
        size=32,
        train_limit=None,
        eval_limit=None,
        epochs=1,
        batch=5,
    )
    return replace(recipe, **changes)


def perfect(dataset):
    """The objects of a data set as detections."""
    found = []
    for index in range(len(dataset)):
        place = dataset.place(index)
        there = dataset.objects[place]
        single = ~there.crowd
        one = Detections(there.boxes[single], torch.ones(int(single.sum())), there.labels[single])
        found += coco_results.to_results(one, dataset.image_ids[place], dataset.category_ids)
    return found


def train_without_scorer(data, run):
    """A run that was trained where nothing can compute mAP."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(detect, "scorer", lambda: None)
        train(tiny_recipe(data), run, device="cpu")
    return run
