"""How good a detector is: mean average precision of a run over test images, or of detections that were saved."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..data.coco import DetectionDataset
from ..detection import DetectionLoss
from ..detection.coco_results import (
    FILE_NAME,
    METRICS,
    mean_average_precision,
    read_results,
    scorer,
    why_no_scorer,
    write_results,
)
from ..recipes.recipe import Recipe
from ..runs import run_folder
from ..runs.run_types import data_info_of
from ..tasks.data import as_evaluated
from ..tasks.detect import find, loader_of, open_data, open_test
from ..utils.distributed import World
from ..utils.files import resolved
from ..utils.precision import autocast_like
from .checks import check_finite

_logger = logging.getLogger(__name__)


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
    """The metrics of a trained detector (`runs.load_model`) over test images: loss, `METRICS` in percent, images.

    weights   those it was loaded with, None: its usual ones
    data, data_dir, batch, limit   other than the recipe's
    save      where to write the detections, in COCO's result format

    Where nothing computes mAP its values are None, and the detections are saved in any case, by default as
    detections.json in the run folder, for `score_run`.
    """
    if loaded.task != "detect" or loaded.recipe is None:
        raise ValueError(f"{loaded.source} is not a run of a detector")
    recipe, dataset = _test_images(loaded.recipe, loaded.classes, loaded.source, data, data_dir, limit)
    dataset = replace(dataset, mean=loaded.mean, std=loaded.std)
    world = World(next(loaded.model.parameters()).device)
    loader = loader_of(recipe, dataset, batch or recipe.batch, world, loaded.size)
    with autocast_like(recipe.precision, world.device):
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
    run = Path(run)
    run_folder.check_run(run)
    own = detections is None or resolved(detections) == resolved(run / FILE_NAME)
    file = run / FILE_NAME if detections is None else Path(detections)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file} of detections; `aaconv eval {run}` writes it")
    classes = data_info_of(run_folder.read_config(run), run / run_folder.CONFIG).classes
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
        changes |= {"data": data, "holdout": 0, "fold": 0, "eval_limit": None}
    if limit is not None:
        changes["eval_limit"] = None
    recipe = replace(recipe, **changes)
    dataset = open_data(recipe)[1] if recipe.holdout else as_evaluated(recipe, open_test(recipe))
    if limit is not None:
        dataset = dataset.take(min(limit, len(dataset)))
    if classes is not None and dataset.classes != tuple(classes):
        raise ValueError(f"{dataset.name} has other classes than {source} was trained on")
    return recipe, dataset
