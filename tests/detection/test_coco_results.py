"""Detections in COCO's format: written, read, and scored as COCO scores them."""

import contextlib
import io

import pytest
import torch

from aaconv.data.detection_loader import make_detection_loader
from aaconv.detection import DetectionLoss, Detections
from aaconv.detection.coco_results import mean_average_precision, read_results, to_results, write_results
from aaconv.models import retinanet
from aaconv.tasks.detect import find
from support.detection_runs import CPU, SCORERS, perfect


def noisy(dataset, seed=0):
    """Detections that are somewhat right: moved boxes, some wrong classes, some inventions, scores at random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(len(dataset)):
        place = dataset.place(index)
        there = dataset.objects[place]
        boxes = torch.cat([there.boxes, there.boxes]) + 3 * torch.randn(2 * len(there.boxes), 4, generator=generator)
        boxes[:, 2:] = torch.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        labels = torch.cat([there.labels, torch.randint(3, there.labels.shape, generator=generator)])
        scores = torch.rand(len(boxes), generator=generator)
        one = Detections(boxes, scores, labels)
        found += to_results(one, dataset.image_ids[place], dataset.category_ids)
    return found


@SCORERS
def test_the_truth_as_detections_is_perfect(coco):
    scores = mean_average_precision(coco, perfect(coco))
    assert scores["mAP"] == scores["mAP50"] == scores["mAP75"] == pytest.approx(100)
    assert scores["mAP_large"] is None  # there is no large object
    assert mean_average_precision(coco, [])["mAP"] == 0


@SCORERS
@pytest.mark.parametrize("seed", [0, 1])
def test_mean_average_precision_is_that_of_pycocotools(coco, coco_folder, tmp_path, seed):
    tools = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    found = noisy(coco, seed)
    file = tmp_path / "found.json"
    write_results(file, found)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = tools.COCO(str(coco_folder / "annotations" / "instances_val.json"))
        for one in truth.anns.values():
            one.setdefault("area", one["bbox"][2] * one["bbox"][3])
        theirs = evaluation.COCOeval(truth, truth.loadRes(str(file)), "bbox")
        theirs.evaluate()
        theirs.accumulate()
        theirs.summarize()
    ours = mean_average_precision(coco, read_results(file, coco))
    expected = [100 * value if value >= 0 else None for value in theirs.stats[:6].tolist()]
    assert 5 < expected[0] < 95
    assert list(ours.values()) == pytest.approx(expected, abs=1e-4)


@SCORERS
def test_one_process_computes_mean_average_precision_for_all(coco, monkeypatch):
    from torchmetrics import metric
    from torchmetrics.detection import MeanAveragePrecision

    def wait_for_the_others(*_, **__):
        raise AssertionError("nobody else would answer")

    monkeypatch.setattr(metric, "jit_distributed_available", lambda: True)
    monkeypatch.setattr(MeanAveragePrecision, "_sync_dist", wait_for_the_others)
    assert mean_average_precision(coco, perfect(coco))["mAP"] == pytest.approx(100)


def test_results_are_in_cocos_format_and_pixels_of_the_file(coco):
    one = Detections(torch.tensor([[1.0, 2.0, 11.004, 22.0]]), torch.tensor([0.123456]), torch.tensor([2]))
    expected = {"image_id": 101, "category_id": 90, "bbox": [1.0, 2.0, 10.0, 20.0], "score": 0.12346}
    assert to_results(one, 101, coco.category_ids) == [expected]

    model = retinanet("test_resnet", num_classes=3, channels=16, head_depth=1).eval()
    with torch.no_grad():
        model.class_head.predict.bias.fill_(2.0)
    loader = make_detection_loader(coco, 4, size=32, train=False, workers=0)
    found = find(model, loader.batches(), loader.dataset, DetectionLoss(), CPU)
    assert found.seen == list(range(10))
    sizes = {coco.image_ids[i]: coco.sizes[i].tolist() for i in range(10)}
    reach = {number: [0.0, 0.0] for number in sizes}
    for result in found.results:
        x, y, width, height = result["bbox"]
        so_far = reach[result["image_id"]]
        reach[result["image_id"]] = [max(so_far[0], y + height), max(so_far[1], x + width)]
    for number, (height, width) in sizes.items():
        assert reach[number][0] == pytest.approx(height, abs=0.02)
        assert reach[number][1] == pytest.approx(width, abs=0.02)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[", "is not JSON"),
        ("{}", "must be a list"),
        ('[{"image_id": 101}]', "not in COCO's result format"),
        ('[{"image_id": 101, "category_id": 3, "bbox": [1, 2], "score": 1}]', "not in COCO's result format"),
        ('[{"image_id": 101, "bbox": [1, 2, 3, 4], "score": 1}]', "not in COCO's result format"),
        ('[{"image_id": [101], "category_id": 3, "bbox": [1, 2, 3, 4], "score": 1}]', "not in COCO's result format"),
        ('[{"image_id": 101, "category_id": [3], "bbox": [1, 2, 3, 4], "score": 1}]', "not in COCO's result format"),
        ('[{"image_id": 101, "category_id": 3, "bbox": [1, 2, 3, 1e999], "score": 1}]', "not in COCO's result format"),
        ('[{"image_id": 101, "category_id": 3, "bbox": [1, 2, 3, 4], "score": NaN}]', "not in COCO's result format"),
        ('[{"image_id": 101, "category_id": 3, "bbox": [1, 2, 3, 4], "score": "x"}]', "not in COCO's result format"),
        (f'[{{"image_id": 101, "category_id": 3, "bbox": [1, 2, 3, {10**400}], "score": 1}}]', "COCO's result format"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"image_id": 5, "category_id": 3, "bbox": [1, 2, 3, 4], "score": 1}]', "image 5, which tiny"),
        ('[{"image_id": 101, "category_id": 4, "bbox": [1, 2, 3, 4], "score": 1}]', "category 4, which tiny"),
    ],
)
def test_wrong_result_files_are_named(coco, tmp_path, content, told):
    (tmp_path / "found.json").write_text(content)
    with pytest.raises(ValueError, match=f"found.json .*{told}"):
        read_results(tmp_path / "found.json", coco)
