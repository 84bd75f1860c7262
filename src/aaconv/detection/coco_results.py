"""Detections as COCO writes them, and their mean average precision.

A result is {"image_id", "category_id", "bbox": [x, y, width, height], "score"}, in pixels of the image file.
"""

import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..data.coco import DetectionDataset
from ..utils.files import replacing
from ..utils.json_file import read_json
from ..utils.numbers import is_number, is_whole
from .postprocess import Detections

Result = dict[str, Any]
Scorer = Literal["faster_coco_eval", "pycocotools"]
FILE_NAME = "detections.json"
METRICS = ("mAP", "mAP50", "mAP75", "mAP_small", "mAP_medium", "mAP_large")
TORCHMETRICS = dict(zip(METRICS, ("map", "map_50", "map_75", "map_small", "map_medium", "map_large"), strict=True))
HOW_TO_SCORE = "pip install 'aaconv[detection]', or score the saved detections where that is installed"


def to_results(detections: Detections, image_id: int, category_ids: tuple[int, ...]) -> list[Result]:
    """The detections of one image, best first; rounded, since a hundred per image add up."""
    sides = detections.boxes[:, 2:] - detections.boxes[:, :2]
    boxes = torch.cat([detections.boxes[:, :2], sides], dim=1).double().tolist()
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(number, 2) for number in box],
            "score": round(score, 5),
        }
        for box, label, score in zip(boxes, detections.labels.tolist(), detections.scores.tolist(), strict=True)
    ]


def write_results(path: str | Path, results: list[Result]) -> None:
    """A COCO result file, one detection per line."""
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        lines = (json.dumps(result, separators=(",", ":")) for result in results)
        file.write("[\n" + ",\n".join(lines) + "\n]\n")


def read_results(path: str | Path, dataset: DetectionDataset) -> list[Result]:
    """What `write_results`, or any other detector, has written about the images of a data set."""
    path = Path(path)
    results = read_json(path)
    if not isinstance(results, list):
        raise ValueError(f"{path} is not in COCO's result format: it must be a list of detections")
    known = {dataset.image_ids[dataset.place(index)] for index in range(len(dataset))}
    for result in results:
        if not _is_result(result):
            raise ValueError(f"{path} is not in COCO's result format: {str(result)[:80]}")
        if result["image_id"] not in known:
            raise ValueError(f"{path} is about image {result['image_id']}, which {dataset.name} does not have")
        if result["category_id"] not in dataset.category_ids:
            raise ValueError(f"{path} names category {result['category_id']}, which {dataset.name} does not have")
    return results


def _is_result(result: Any) -> bool:
    if not isinstance(result, dict) or not all(is_whole(result.get(name)) for name in ("image_id", "category_id")):
        return False
    box = result.get("bbox")
    return isinstance(box, list) and len(box) == 4 and all(map(is_number, [*box, result.get("score")]))


def scorer() -> Scorer | None:
    """The package that computes mAP here, None where there is none that works."""
    return _find_scorer()[0]


def why_no_scorer() -> str:
    """Why `scorer` gives None, and the way out, in one line."""
    return _find_scorer()[1]


@cache
def _find_scorer() -> tuple[Scorer | None, str]:
    """The package and what is wrong with those before it; tried, since one may be there without its compiled part."""
    packages: list[Scorer] = [name for name in get_args(Scorer) if importlib.util.find_spec(name) is not None]
    if importlib.util.find_spec("torchmetrics") is None or not packages:
        return None, HOW_TO_SCORE
    troubles = []
    for package in packages:
        try:
            _try_scorer(package)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            troubles.append(f"{package.replace('_', '-')} is installed but does not work ({reason})")
        else:
            return package, ""
    return None, f"{'; '.join(troubles)}; reinstall it, or score the saved detections where it works"


def _try_scorer(package: Scorer) -> None:
    """One box that is found: fails as an evaluation would."""
    from torchmetrics.detection import MeanAveragePrecision

    box, label = torch.tensor([[1.0, 1.0, 9.0, 9.0]]), torch.tensor([0])
    metric = MeanAveragePrecision(box_format="xywh", backend=package, sync_on_compute=False)
    metric.update([{"boxes": box, "scores": torch.ones(1), "labels": label}], [{"boxes": box, "labels": label}])
    metric.compute()


def mean_average_precision(
    dataset: DetectionDataset, results: Iterable[Result], indices: Iterable[int] | None = None
) -> dict[str, float | None]:
    """`METRICS` in percent over all images, or those with these indices; None where there is nothing to find."""
    backend = scorer()
    if backend is None:
        raise ValueError(f"mAP needs torchmetrics and faster-coco-eval: {why_no_scorer()}")
    from torchmetrics.detection import MeanAveragePrecision

    by_image: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        by_image[result["image_id"]].append(result)
    label_of = {number: label for label, number in enumerate(dataset.category_ids)}
    # One process has the results of all: it must not wait for the others to compute theirs.
    metric = MeanAveragePrecision(box_format="xywh", backend=backend, sync_on_compute=False)
    metric.warn_on_many_detections = False
    for index in range(len(dataset)) if indices is None else indices:
        place = dataset.place(index)
        found, there = by_image[dataset.image_ids[place]], dataset.objects[place]
        predicted = {
            "boxes": torch.tensor([result["bbox"] for result in found], dtype=torch.float32).reshape(-1, 4),
            "scores": torch.tensor([result["score"] for result in found], dtype=torch.float32),
            "labels": torch.tensor([label_of[result["category_id"]] for result in found], dtype=torch.int64),
        }
        target = {
            "boxes": _to_xywh(there.boxes),
            "labels": there.labels,
            "area": there.areas,
            "iscrowd": there.crowd.to(torch.int64),
        }
        metric.update([predicted], [target])
    values = metric.compute()
    percent = {name: 100 * float(values[theirs]) for name, theirs in TORCHMETRICS.items()}
    return {name: value if value >= 0 else None for name, value in percent.items()}


def _to_xywh(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
