"""Training to find objects: RetinaNet's loss, and mean average precision as COCO measures it."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import recipes
from .data.coco import DetectionDataset, open_detection
from .data.detection_loader import Batch, make_detection_loader
from .detection import DetectionLoss, Detections, PostprocessSettings, Targets, postprocess
from .detection.results import (
    FILE_NAME,
    METRICS,
    Result,
    mean_average_precision,
    read_results,
    scorer,
    to_results,
    why_no_scorer,
    write_results,
)
from .models import create_model
from .recipes.recipe import Recipe
from .training.distributed import World, total
from .training.tasks import Facts, Loader, Task, as_evaluated, hold_out, limited_both, shapes_options

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
        self._judged: DetectionDataset | None = None
        self._world: World | None = None

    @cached_property
    def data(self) -> tuple[DetectionDataset, DetectionDataset]:
        """The images of training and of evaluation."""
        return open_data(self.recipe)

    def facts(self) -> Facts:
        train, _ = self.data
        return Facts(train.classes, tuple(train.mean), tuple(train.std), image_size(self.recipe, train))

    def build(self, facts: Facts) -> nn.Module:
        model = self.recipe.model
        try:
            network = create_model(model.name, num_classes=len(facts.classes), **self._options(facts))
        except TypeError as error:
            raise ValueError(f"{model.name} cannot be built with {model.options}: {error}") from None
        if not hasattr(network, "anchors"):
            raise ValueError(f"{model.name} is no detector; `aaconv models retinanet` lists those there are")
        if facts.size % network.multiple:
            nearest = max(1, round(facts.size / network.multiple)) * network.multiple
            raise ValueError(f"size must be a multiple of {network.multiple}, got {facts.size}; try {nearest}")
        return network

    def config(self, facts: Facts) -> dict[str, Any]:
        config = super().config(facts)
        config["model_args"] = self._options(facts)
        config["category_ids"] = list(self.data[0].category_ids)
        return config

    def _options(self, facts: Facts) -> dict[str, Any]:
        return {"img_size": facts.size} | self.recipe.model.options

    def loaders(self, batch: int, world: World) -> tuple[Loader, Loader]:
        size = self.facts().size
        train, test = (
            _loader(self.recipe, images, batch, world, size, train=training)
            for images, training in zip(self.data, (True, False), strict=True)
        )
        self._judged, self._world = test.dataset, world
        if world.first and scorer() is None:
            _logger.warning("no mAP here, only the loss will be measured: %s", why_no_scorer())
        return train, test

    @cached_property
    def _train_criterion(self) -> nn.Module:
        return self.criterion if self.recipe.compile == "off" else torch.compile(self.criterion, dynamic=False)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        anchors = torch.cat(_bare(model).anchors(tuple(images.shape[-2:]), images.device))
        logits, codes = model(images)
        class_loss, box_loss = self._train_criterion(logits, codes, anchors, targets.boxes, targets.labels)
        return class_loss + box_loss, {}

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | None]:
        if self._judged is None or self._world is None:
            raise RuntimeError("loaders() comes before evaluate(): it says which images the batches are of")
        found = find(model, batches, self._judged, self.criterion, self._world)
        values: dict[str, float | None] = dict(found.losses)
        if scorer() is None:
            return values | dict.fromkeys(METRICS)
        return values | self._world.first_does(lambda: mean_average_precision(self._judged, found.results, found.seen))


def open_data(recipe: Recipe) -> tuple[DetectionDataset, DetectionDataset]:
    """What a recipe trains on and what it evaluates on, limits and held-out images considered."""
    train = open_detection(recipe.data, recipe.data_dir, "train", **shapes_options(recipe, train=True))
    if recipe.holdout:
        train, test = map(train.subset, hold_out(recipe.holdout, len(train)))
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


def _loader(
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
class Found:
    """What a network finds in the images of all processes, and its losses: over the anchors with an object of all."""

    results: list[Result]
    seen: list[int]
    losses: dict[str, float]


@torch.no_grad()
def find(
    model: nn.Module, batches: Iterable[Batch], dataset: DetectionDataset, criterion: DetectionLoss, world: World
) -> Found:
    """Every image of every process once. A last batch that is smaller is filled up: shapes stay, nothing recompiles."""
    results: list[Result] = []
    seen: list[int] = []
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    full = 0
    for images, targets in batches:
        number, full = len(images), max(full, len(images))
        size = tuple(images.shape[-2:])
        if number < full:
            images = torch.cat([images, images[:1].expand(full - number, -1, -1, -1)])
        anchors = _bare(model).anchors(size, images.device)
        logits, codes = (output[:number].float() for output in model(images))
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
    return Found(
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


def evaluate_run(
    loaded: Any,
    *,
    weights: str | None = None,
    data: str | None = None,
    data_dir: str | Path | None = None,
    batch: int | None = None,
    limit: int | None = None,
    save: str | Path | None = None,
) -> dict[str, Any]:
    """The metrics of a trained detector (`run_folder.load_model`) over test images: loss, `METRICS` in percent, images.

    weights   those it was loaded with, None: its usual ones
    data, data_dir, batch, limit   other than the recipe's
    save      where to write the detections, in COCO's result format

    Where nothing computes mAP its values are None, and the detections are saved in any case, by default as
    detections.json in the run folder, for `score_run`.
    """
    from .evaluate import check_finite, precision

    if loaded.task != "detect" or loaded.recipe is None:
        raise ValueError(f"{loaded.source} is no run of a detector")
    recipe, dataset = _test_images(loaded.recipe, loaded.classes, loaded.source, data, data_dir, limit)
    world = World(next(loaded.model.parameters()).device)
    loader = _loader(recipe, dataset, batch or recipe.batch, world, loaded.size)
    with precision(recipe, world.device):
        found = find(loaded.model, loader.batches(), loader.dataset, DetectionLoss(), world)
    check_finite(loaded, recipe.data, found.losses)
    values: dict[str, Any] = found.losses | dict.fromkeys(METRICS)
    if scorer() is not None:
        values |= mean_average_precision(loader.dataset, found.results, found.seen)
    elif save is None:
        save = Path(loaded.source) / (FILE_NAME if weights is None else f"detections-{Path(weights).stem}.json")
    if save is not None:
        write_results(save, found.results)
    if scorer() is None:
        _logger.warning("wrote %s; no mAP here: %s", save, why_no_scorer())
    return values | {"images": len(found.seen)}


def score_run(
    run: str | Path,
    detections: str | Path | None = None,
    *,
    data: str | None = None,
    data_dir: str | Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """`METRICS` in percent of detections that `evaluate_run` has saved, and images; neither weights nor a GPU needed.

    The run's own detections.json, the default, also fills what its summary.json and the last row of its metrics.csv
    lack because nothing could compute mAP where it was trained.
    """
    from . import run_folder

    run = Path(run)
    if not run_folder.is_run(run):
        raise ValueError(f"{run} is no run folder, it has no {run_folder.RECIPE}")
    own = detections is None or Path(detections).resolve() == (run / FILE_NAME).resolve()
    file = run / FILE_NAME if detections is None else Path(detections)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file} of detections; `aaconv eval {run}` writes it")
    classes = run_folder.facts_of(run_folder.read_config(run), run).classes
    _, dataset = _test_images(recipes.load(run / run_folder.RECIPE), classes, str(run), data, data_dir, limit)
    scores = mean_average_precision(dataset, read_results(file, dataset))
    if own and data is None and limit is None and run_folder.is_finished(run):
        summary, rows = run_folder.read_summary(run), run_folder.read_metrics(run)
        if summary.get("mAP") is None and rows:
            run_folder.write_json(run / run_folder.SUMMARY, summary | scores)
            rows[-1] |= scores
            run_folder.write_rows(run / run_folder.METRICS, rows, list(rows[-1]))
    return scores | {"images": len(dataset)}


def _test_images(
    recipe: Recipe,
    classes: tuple[str, ...] | None,
    source: str,
    data: str | None,
    data_dir: str | Path | None,
    limit: int | None,
) -> tuple[Recipe, DetectionDataset]:
    """The recipe with these changes, and the images it evaluates on; the training images need not be there.

    Of other data, and with a limit of the caller's own, the recipe's part of the images says nothing.
    """
    changes: dict[str, Any] = {} if data_dir is None else {"data_dir": str(data_dir)}
    if data is not None:
        changes |= {"data": data, "holdout": 0, "eval_limit": None}
    if limit is not None:
        changes["eval_limit"] = None
    recipe = replace(recipe, **changes)
    dataset = open_data(recipe)[1] if recipe.holdout else as_evaluated(recipe, open_test(recipe))
    if limit is not None:
        dataset = dataset.take(min(limit, len(dataset)))
    if classes is not None and dataset.classes != tuple(classes):
        raise ValueError(f"{dataset.name} has other classes than {source} was trained on")
    return recipe, dataset


def _bare(model: nn.Module) -> nn.Module:
    """The network itself, of what DistributedDataParallel or torch.compile wraps."""
    model = getattr(model, "module", model)
    return getattr(model, "_orig_mod", model)


def print_detections(
    source: str | Path,
    images: Iterable[str],
    output: str | Path,
    *,
    weights: str | None = None,
    device: str | None = None,
    sheet_file: str | Path | None = None,
    **options: Any,
) -> None:
    """Find objects in image files, draw them into the folder `output`, and say how many there are."""
    from .detection.images import detect_files
    from .machine import pick_device
    from .predict import find_images
    from .run_folder import is_run, load_model, read_config

    if sheet_file is not None and Path(sheet_file).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"the sheet must end in .png, .jpg or .webp, got {str(sheet_file)!r}")
    if not is_run(source):
        raise ValueError(f"{source} is no run folder; train one: aaconv train detection-demo")
    files = find_images(images)
    loaded = load_model(source, weights=weights, device=pick_device(device))
    if loaded.task != "detect":
        raise ValueError(f"{source} is a run of a classifier, which finds no objects; `aaconv predict` names images")
    category_ids = tuple(read_config(source).get("category_ids") or ())
    results = detect_files(loaded, files, output, category_ids=category_ids, sheet_file=sheet_file, **options)
    print(f"found {len(results):,} objects in {len(files):,} images; see {output}, {Path(output) / FILE_NAME}")
