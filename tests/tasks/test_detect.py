"""Detection as a task: it learns, and says before training what cannot be trained."""

import json
import logging
import re
import sys
from dataclasses import replace

import pytest
import torch

from aaconv import cli, recipes
from aaconv.data.coco import open_detection
from aaconv.data.detection_loader import make_detection_loader
from aaconv.detection import DetectionLoss
from aaconv.detection import coco_results as scoring
from aaconv.detection.coco_results import METRICS, mean_average_precision
from aaconv.models import retinanet
from aaconv.recipes import Model
from aaconv.recipes.detection import DETECTION, SMALL
from aaconv.recipes.paper import TABLES
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_metrics, read_summary
from aaconv.tasks.detect import Detect, find
from aaconv.tasks.task import DataInfo, create_task
from aaconv.training.launch import conclusion
from aaconv.training.trainer import train
from support.detection_data import make_coco
from support.detection_runs import CPU, SCORERS, perfect, tiny_recipe


@pytest.mark.slow
@SCORERS
def test_four_images_are_learned_by_heart():
    torch.manual_seed(0)
    dataset = open_detection("shapes", size=64, number=4)
    model = retinanet("test_resnet", num_classes=4, channels=64, head_depth=1, anchor_scale=1.5)
    images, targets = next(iter(make_detection_loader(dataset, 4, size=64, train=False, workers=0).batches()))
    anchors, criterion = torch.cat(model.anchors((64, 64))), DetectionLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = sum(criterion(*model(images), anchors, targets.boxes, targets.labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = find(model.eval(), [(images, targets)], dataset, criterion, CPU)
    assert mean_average_precision(dataset, found.results)["mAP50"] > 90
    assert found.losses["loss"] < 0.1


def test_without_a_scorer_training_measures_the_loss(detector_run):
    rows = read_metrics(detector_run)
    assert rows[0]["loss"] == pytest.approx(rows[0]["class_loss"] + rows[0]["box_loss"])
    assert all(rows[0][name] is None for name in METRICS)
    summary = read_summary(detector_run)
    assert summary["mAP"] is None
    assert conclusion(summary, detector_run).startswith(f"loss {summary['loss']:.4f}\n")


@pytest.fixture
def broken_scorers(tmp_path, monkeypatch):
    """Packages that are there, but not their compiled part."""
    pytest.importorskip("torchmetrics")
    for package in ("faster_coco_eval", "pycocotools"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"import {package}.compiled")
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    scoring._find_scorer.cache_clear()
    yield
    scoring._find_scorer.cache_clear()


def test_a_broken_scorer_is_named_before_training_not_after_it(broken_scorers, coco_folder, coco, tmp_path, caplog):
    assert scoring.scorer() is None
    with caplog.at_level(logging.WARNING):
        Detect(tiny_recipe(coco_folder)).loaders(5, CPU)
    (line,) = caplog.messages
    assert "only the loss will be measured: faster-coco-eval is installed but does not work (" in line
    assert "\n" not in line
    train(tiny_recipe(coco_folder), tmp_path / "run", device="cpu")
    assert read_summary(tmp_path / "run")["mAP"] is None
    with pytest.raises(ValueError, match="does not work"):
        mean_average_precision(coco, perfect(coco))


def test_the_run_is_timms_too(detector_run, coco_folder):
    import timm

    config = json.loads((detector_run / "config.json").read_text())
    assert config["label_names"] == ["car", "train", "toothbrush"]
    assert config["category_ids"] == [3, 7, 90]
    model = timm.create_model(f"local-dir:{detector_run}", pretrained=True).eval()
    loaded = load_model(detector_run)
    assert (loaded.task, loaded.size, loaded.classes) == ("detect", 32, ("car", "train", "toothbrush"))
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(images), loaded.model(images))


def test_training_and_test_images_must_have_the_same_categories(coco_folder, tmp_path):
    folder = make_coco(tmp_path / "odd")
    file = folder / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    content["categories"].append({"id": 91, "name": "hair brush"})
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"same categories; only one has .*hair brush"):
        Detect(tiny_recipe(folder)).data_info()


def test_there_must_be_a_box_to_learn_from(tmp_path):
    folder = make_coco(tmp_path / "bare")
    file = folder / "annotations" / "instances_train.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"annotations": []}))
    with pytest.raises(ValueError, match="training images has a box"):
        Detect(tiny_recipe(folder)).data_info()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": 40}, "multiple of 32, got 40; try 32"),
        ({"model": recipes.Model("plain_resnet18")}, "plain_resnet18 is not a detector"),
        ({"model": recipes.Model("aa_retinanet_resnet18", {"positon": "none"})}, "cannot be built.*positon"),
        ({"train_limit": 11}, "train_limit must be 1 to 10"),
        ({"holdout": 10}, "holdout must be 0 to 9"),
    ],
)
def test_impossible_recipes_are_named(coco_folder, changes, told):
    task = Detect(tiny_recipe(coco_folder, **changes))
    with pytest.raises(ValueError, match=told):
        task.build(task.data_info())


def test_held_out_images_are_not_trained_on(coco_folder):
    train_images, held_out = Detect(tiny_recipe(coco_folder, holdout=4, train_limit=5)).data
    ids = [[images.image_ids[images.place(i)] for i in range(len(images))] for images in (train_images, held_out)]
    assert [len(some) for some in ids] == [5, 4]
    assert not set(ids[0]) & set(ids[1])
    assert max(max(some) for some in ids) <= 10


def test_recipes_stand_behind_tables_5_and_8():
    names = {recipe.name: recipe for recipe in DETECTION}
    assert names.keys() <= set(recipes.names())
    compared = [recipe for recipe in SMALL if "window" not in recipe.name]  # that one is for larger images
    assert [recipe.model.name.partition("_")[0] for recipe in compared] == ["plain", "se", "aa"]
    schedules = {(r.epochs, r.batch, r.lr_base, r.size, r.seed, r.weight_decay) for r in compared}
    assert len(schedules) == 1  # what is compared differs in the network alone
    rows = {(r.evidence.table, r.evidence.row) for r in DETECTION if r.evidence}
    wanted = {(5, row.name) for row in TABLES[5].rows} | {(8, row.name) for row in TABLES[8].rows if row.options}
    assert rows == wanted
    assert all(r.epochs == 150 and r.size == 640 for r in DETECTION if r.evidence)
    assert names["coco-retinanet50-aa-coordconv"].model.options == {"position": "coordconv"}


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("inception_v3", "at size 256 and stride 8 one is 29 x 29 instead of 32 x 32; name another backbone"),
        ("efficientformer_l1", "does not run at size 256: "),
    ],
)
def test_a_backbone_that_does_not_fit_the_anchors_is_refused(backbone, message):
    recipe = replace(recipes.get("coco-small-lite0-plain"), model=Model("augmented_retinanet", {"backbone": backbone}))
    with pytest.raises(ValueError, match=re.escape(message)):
        create_task(recipe).build(DataInfo(("cat",), (0.5,) * 3, (0.5,) * 3, 256))


@pytest.mark.parametrize("name", ["augmented_retinanet", "plain_retinanet_resnet18"])
def test_a_classifier_is_wanted_where_images_are_classified(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "demo-plain", "--model", name, "--device", "cpu", "--workers", "0", "--run", "run"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name} is a detector, not a classifier; `aaconv recipes` lists those that train one" in error
