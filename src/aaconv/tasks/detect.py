"""Detection: RetinaNet's loss, and mean average precision as COCO measures it."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.coco import DetectionDataset, open_detection
from ..data.detection_loader import Batch, Targets, make_detection_loader
from ..detection import DetectionLoss, Detections, PostprocessSettings, postprocess
from ..detection.coco_results import (
    METRICS,
    Result,
    mean_average_precision,
    scorer,
    to_results,
    why_no_scorer,
)
from ..recipes.recipe import Recipe
from ..utils.distributed import World, total
from .data import hold_out, limited_both, normalized, shapes_options
from .evaluation import outputs_over
from .task import DataInfo, Loader, Task

LARGE = 640
EVALUATION = PostprocessSettings(threshold=0.01)
"""Precision is measured over all scores: also what is hardly ever right counts, after all that is better."""

_logger = logging.getLogger(__name__)


class Detect(Task):
    """Batches are (images [batch, 3, size, size], `Targets`)."""

    headline = "mAP"
    metrics = ("loss", "class_loss", "box_loss", *METRICS)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.criterion = DetectionLoss()
        self._eval_data: DetectionDataset | None = None
        self._world: World | None = None

    @cached_property
    def data(self) -> tuple[DetectionDataset, DetectionDataset]:
        """The images of training and of evaluation."""
        return normalized(self.recipe, *open_data(self.recipe))

    def data_info(self) -> DataInfo:
        train, _ = self.data
        return DataInfo(train.classes, tuple(train.mean), tuple(train.std), image_size(self.recipe, train))

    def build(self, info: DataInfo, *, start: bool = False) -> nn.Module:
        network: Any = self.create(info, start, img_size=info.size)
        if not hasattr(network, "anchors"):
            name = self.recipe.model.name
            raise ValueError(f"{name} is not a detector; `aaconv models retinanet` lists those there are")
        if info.size % network.multiple:
            nearest = max(1, round(info.size / network.multiple)) * network.multiple
            raise ValueError(f"size must be a multiple of {network.multiple}, got {info.size}; try {nearest}")
        network.check_maps(info.size)
        return network

    def config(self, info: DataInfo) -> dict[str, Any]:
        config = super().config(info)
        config["model_args"] = {"img_size": info.size} | config["model_args"]
        config["category_ids"] = list(self.data[0].category_ids)
        return config

    def loaders(self, batch: int, world: World) -> tuple[Loader, Loader]:
        size = self.data_info().size
        train, test = (
            loader_of(self.recipe, images, batch, world, size, train=training)
            for images, training in zip(self.data, (True, False), strict=True)
        )
        self._eval_data, self._world = test.dataset, world
        if world.is_main and scorer() is None:
            _logger.warning("no mAP here, only the loss will be measured: %s", why_no_scorer())
        return train, test

    @cached_property
    def _train_criterion(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.criterion if self.recipe.compile == "off" else torch.compile(self.criterion, dynamic=False)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        anchors = torch.cat(_bare(model).anchors(tuple(images.shape[-2:]), images.device))
        logits, codes = model(images)
        class_loss, box_loss = self._train_criterion(logits, codes, anchors, targets.boxes, targets.labels)
        return class_loss + box_loss, {}

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | None]:
        dataset, world = self._eval_data, self._world
        if dataset is None or world is None:
            raise RuntimeError("loaders() comes before evaluate(): it says which images the batches are of")
        found = find(model, batches, dataset, self.criterion, world)
        values: dict[str, float | None] = dict(found.losses)
        if scorer() is None:
            return values | dict.fromkeys(METRICS)
        return values | world.on_main(lambda: mean_average_precision(dataset, found.results, found.seen))


def open_data(recipe: Recipe) -> tuple[DetectionDataset, DetectionDataset]:
    """What a recipe trains on and what it evaluates on, limits and held-out images considered."""
    train = open_detection(recipe.data, recipe.data_dir, "train", **shapes_options(recipe, train=True))
    if recipe.holdout:
        train, test = map(train.subset, hold_out(recipe, len(train)))
    else:
        test = open_test(recipe)
    if test.category_ids != train.category_ids or test.classes != train.classes:
        odd = sorted(
            set(zip(test.category_ids, test.classes, strict=True))
            ^ set(zip(train.category_ids, train.classes, strict=True))
        )
        raise ValueError(f"{train.name}: training and test images must have the same categories; only one has {odd[0]}")
    if not any(len(there.boxes) for there in train.objects):
        raise ValueError(f"{train.name}: none of its {len(train):,} training images has a box: nothing to learn from")
    return limited_both(recipe, train, test)


def open_test(recipe: Recipe) -> DetectionDataset:
    return open_detection(recipe.data, recipe.data_dir, "test", **shapes_options(recipe, train=False))


def image_size(recipe: Recipe, dataset: DetectionDataset) -> int:
    """The side of the canvas that the network sees."""
    if recipe.size is not None:
        return recipe.size
    return int(dataset.sizes.max()) if recipe.data == "shapes" else LARGE


def loader_of(
    recipe: Recipe, dataset: DetectionDataset, batch: int, world: World, size: int, *, train: bool = False
) -> Any:
    return make_detection_loader(
        dataset,
        batch,
        size=size,
        train=train,
        workers=recipe.workers,
        max_unreadable=recipe.max_unreadable,
        device=world.device,
        seed=recipe.seed,
        rank=world.rank,
        world_size=world.size,
    )


@dataclass(frozen=True)
class DetectionOutputs:
    """What a network finds in the images of all processes, and its losses: over the anchors with an object of all."""

    results: list[Result]
    seen: list[int]
    losses: dict[str, float]


@torch.no_grad()
def find(
    model: nn.Module, batches: Iterable[Batch], dataset: DetectionDataset, criterion: DetectionLoss, world: World
) -> DetectionOutputs:
    """Every image of every process once."""
    results: list[Result] = []
    seen: list[int] = []
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for images, targets, (logits, codes) in outputs_over(model, batches):
        anchors = _bare(model).anchors(tuple(images.shape[-2:]), images.device)
        sums += torch.stack(criterion.sums(logits, codes, torch.cat(anchors), targets.boxes, targets.labels))
        found = postprocess(logits, codes, anchors, targets.sizes.tolist(), EVALUATION)
        for index, detections in in_image_pixels(found, targets, dataset):
            seen.append(index)
            image_id = dataset.image_ids[dataset.place(index)]
            results += to_results(detections, image_id, dataset.category_ids)
    class_loss, box_loss, number = total(sums).tolist()
    losses = {"loss": class_loss + box_loss, "class_loss": class_loss, "box_loss": box_loss}
    parts = world.gather((results, seen))
    if not any(seen for _, seen in parts):
        raise ValueError("there is no image to evaluate on")
    return DetectionOutputs(
        [result for results, _ in parts for result in results],
        sorted(index for _, seen in parts for index in seen),
        {name: value / max(1.0, number) for name, value in losses.items()},
    )


def in_image_pixels(
    found: list[Detections], targets: Targets, dataset: DetectionDataset
) -> Iterator[tuple[int, Detections]]:
    """(index of the image, what was found in it) with the boxes in pixels of its file instead of its canvas."""
    for one, index, placed in zip(found, targets.index.tolist(), targets.sizes.tolist(), strict=True):
        height, width = dataset.sizes[dataset.place(index)].tolist()
        scale = one.boxes.new_tensor([width / placed[1], height / placed[0]] * 2)
        yield index, Detections((one.boxes * scale).cpu(), one.scores.cpu(), one.labels.cpu())


def _bare(model: nn.Module) -> Any:
    """The detector itself, of what DistributedDataParallel wraps."""
    return model.module if isinstance(model, DistributedDataParallel) else model
