"""Detection from loss to picture: it learns, mAP is COCO's, and a run can be scored where it was not trained."""

import contextlib
import io
import json
import logging
import sys
import types
from dataclasses import replace

import pytest
import torch
from PIL import Image

from aaconv import cli, recipes
from aaconv.data.coco import open_detection
from aaconv.data.detection_loader import make_detection_loader
from aaconv.detection import DetectionLoss, Detections
from aaconv.detection import coco_results as scoring
from aaconv.detection.coco_results import METRICS, mean_average_precision, read_results, to_results, write_results
from aaconv.detection.draw import draw, sheet
from aaconv.inference import evaluate_detector
from aaconv.inference.detect import picture_names
from aaconv.inference.evaluate_detector import evaluate_run, score_run
from aaconv.models import retinanet
from aaconv.recipes.detection import DETECTION, SMALL
from aaconv.recipes.paper import TABLES
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_metrics, read_summary
from aaconv.tasks import detect as detection_task
from aaconv.tasks.detect import Detect, find
from aaconv.training.launch import conclusion
from aaconv.training.trainer import train
from aaconv.utils.distributed import World
from support.detection_data import make_coco
from support.tiny_runs import break_weights

CPU = World(torch.device("cpu"))
SCORERS = pytest.mark.skipif(scoring.scorer() is None, reason="needs torchmetrics and faster-coco-eval")


@pytest.fixture(scope="module")
def coco_folder(tmp_path_factory):
    return make_coco(tmp_path_factory.mktemp("data") / "tiny", number=10)


@pytest.fixture(scope="module")
def coco(coco_folder):
    return open_detection("coco", coco_folder, "test")


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


@pytest.fixture(scope="module")
def run(coco_folder, tmp_path_factory):
    """A run that was trained where nothing can compute mAP."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(detection_task, "scorer", lambda: None)
        train(tiny_recipe(coco_folder), folder, device="cpu")
    return folder


def perfect(dataset):
    """The objects of a data set as detections."""
    found = []
    for index in range(len(dataset)):
        place = dataset.place(index)
        there = dataset.objects[place]
        single = ~there.crowd
        one = Detections(there.boxes[single], torch.ones(int(single.sum())), there.labels[single])
        found += to_results(one, dataset.image_ids[place], dataset.category_ids)
    return found


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


def test_without_a_scorer_training_measures_the_loss(run):
    rows = read_metrics(run)
    assert rows[0]["loss"] == pytest.approx(rows[0]["class_loss"] + rows[0]["box_loss"])
    assert all(rows[0][name] is None for name in METRICS)
    summary = read_summary(run)
    assert summary["mAP"] is None
    assert conclusion(summary, run).startswith(f"loss {summary['loss']:.4f}\n")


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


def test_the_run_is_timms_too(run, coco_folder):
    import timm

    config = json.loads((run / "config.json").read_text())
    assert config["label_names"] == ["car", "train", "toothbrush"]
    assert config["category_ids"] == [3, 7, 90]
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    loaded = load_model(run)
    assert (loaded.task, loaded.size, loaded.classes) == ("detect", 32, ("car", "train", "toothbrush"))
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(images), loaded.model(images))


@SCORERS
def test_detections_are_saved_here_and_scored_there(run, monkeypatch, caplog):
    loaded = load_model(run)
    with monkeypatch.context() as elsewhere, caplog.at_level(logging.WARNING):
        elsewhere.setattr(evaluate_detector, "scorer", lambda: None)
        values = evaluate_run(loaded)
    assert "wrote" in caplog.text
    assert values["mAP"] is None
    assert values["images"] == 10
    assert values["loss"] == pytest.approx(read_metrics(run)[0]["loss"], rel=1e-4)
    (run / "model.safetensors").rename(run / "away")  # weights are large: they may stay where they are
    saved = score_run(run)
    (run / "away").rename(run / "model.safetensors")
    assert 0 <= saved["mAP"] <= saved["mAP50"]
    assert read_summary(run)["mAP"] == saved["mAP"]
    assert read_metrics(run)[-1]["mAP50"] == pytest.approx(saved["mAP50"])
    direct = evaluate_run(loaded, batch=3, save=run / "again.json")
    assert direct["mAP"] == pytest.approx(saved["mAP"], abs=0.2)  # the file is rounded
    assert score_run(run, run / "again.json")["mAP"] == pytest.approx(direct["mAP"], abs=0.2)
    assert evaluate_run(loaded, limit=4)["images"] == 4
    assert evaluate_run(loaded, limit=1000)["images"] == evaluate_run(loaded)["images"]
    with pytest.raises(FileNotFoundError, match=r"nothing\.json of detections; `aaconv eval"):
        score_run(run, run / "nothing.json")
    with pytest.raises(ValueError, match="is not a run folder"):
        score_run(run.parent)


def test_weights_without_a_finite_loss_are_named_and_no_detections_saved(run, tmp_path):
    loaded = load_model(run, weights=break_weights(run, tmp_path / "broken.safetensors"))
    with pytest.raises(ValueError, match=r"loss on coco is not finite: the weights .*broken\.safetensors are damaged"):
        evaluate_run(loaded, save=tmp_path / "detections.json")
    assert not (tmp_path / "detections.json").exists()


def test_weights_that_give_no_finite_scores_find_nothing_and_say_so(run, coco_folder, tmp_path, capsys):
    broken, image = break_weights(run, tmp_path / "broken.safetensors"), next(coco_folder.rglob("*.png"))
    words = ["detect", str(run), str(image), "-o", str(tmp_path / "out"), "--device", "cpu", "--weights", str(broken)]
    assert cli.main(words) == 2
    assert f"a score of the network is not finite: the weights {broken} are damaged" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_evaluate_refuses_other_classes_and_other_tasks(run):
    loaded = load_model(run)
    with pytest.raises(ValueError, match="other classes"):
        evaluate_run(loaded, data="shapes", limit=5)
    with pytest.raises(ValueError, match="not a run of a detector"):
        evaluate_run(types.SimpleNamespace(task="classify", recipe=None, source="run"))


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


def test_pictures_have_boxes_in_the_colours_of_their_classes():
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    found = Detections(
        torch.tensor([[10.0, 10.0, 30.0, 30.0], [10.0, 10.0, 30.0, 30.0], [0.0, 0.0, 60.0, 40.0]]),
        torch.tensor([0.9, 0.8, 0.5]),
        torch.tensor([0, 1, 2]),
    )
    picture = draw(image, found, ["cat", "a_dog", "a name far longer than the picture is wide" * 2], side=240)
    assert picture.size == (240, 160)
    colours = {colour for _, colour in picture.getcolors(100_000)}
    assert len(colours) > 3
    assert picture.getpixel((119, 80)) != (0, 0, 0)  # the right edge of the two boxes
    nothing = draw(image, Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0).long()), [])
    assert nothing.size == (800, 533)
    assert nothing.getcolors() == [(800 * 533, (0, 0, 0))]
    page = sheet([picture, nothing, picture], cell=100)
    assert page.width > 2 * 100
    assert page.getpixel((0, 0)) == (255, 255, 255)


def test_pictures_of_the_same_name_do_not_meet(tmp_path):
    files = [tmp_path / "a" / "1.jpg", tmp_path / "b" / "1.png", tmp_path / "2.jpg", tmp_path / "c" / "1.jpg"]
    assert picture_names(files) == ["1.png", "1-2.png", "2.png", "1-3.png"]


def test_the_command_draws_and_writes(run, coco_folder, tmp_path, capsys):
    images = coco_folder / "val"
    out = tmp_path / "found"
    arguments = ["detect", str(run), str(images / "000101.png"), str(images / "000102.png"), "-o", str(out)]
    assert cli.main([*arguments, "--threshold", "0", "--sheet", str(tmp_path / "sheet.png"), "--device", "cpu"]) == 0
    assert "objects in 2 images" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"000101.png", "000102.png", "detections.json"}
    with Image.open(out / "000101.png") as picture, Image.open(tmp_path / "sheet.png") as page:
        assert picture.size == (533, 800)
        assert page.width > 800
    results = json.loads((out / "detections.json").read_text())
    assert {result["image_id"] for result in results} <= {101, 102}
    assert {result["category_id"] for result in results} <= {3, 7, 90}


def test_the_command_names_bad_images_and_does_the_others(run, coco_folder, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    out = tmp_path / "found"
    good = str(coco_folder / "val" / "000103.png")
    assert cli.main(["detect", str(run), str(broken), good, "-o", str(out), "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"found 0 objects in 1 image; see {out}, {out}/detections.json\n"
    assert f"1 of 2 images could not be read; the first is {broken}" in printed.err
    assert (out / "000103.png").exists()
    assert json.loads((out / "detections.json").read_text()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", "{image}"], "nowhere is not a run folder"),
        (["{run}", "missing.png"], "no image or folder missing.png"),
        (["{run}", "{image}", "--threshold", "2"], "a number from 0 to 1"),
        (["{run}", "{image}", "--sheet", "sheet.gif"], "must end in .png"),
        (["{run}", "{image}", "--sheet", "{out}/nowhere/sheet.png"], "no folder"),
        (["{run}", "{image}", "--weights", "ema"], "no weights 'ema'"),
        (["{run}", "{image}", "-o", "{image}"], "is a file, not a folder"),
        (
            ["{run}", "{image}", "-o", "found.json"],
            "found.json is to be a folder for the pictures and detections.json; leave out .json",
        ),
        (["{run}", "{image}", "-o", "{image}/x"], "000101.png/x cannot be written: Not a directory; choose another"),
    ],
)
def test_the_command_explains_what_is_wrong(run, coco_folder, tmp_path, capsys, arguments, told):
    words = {"run": run, "image": coco_folder / "val" / "000101.png", "out": tmp_path}
    filled = [argument.format(**words) for argument in arguments]
    try:
        code = cli.main(["detect", "-o", str(tmp_path / "out"), *filled])
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr().err
    assert code == 2
    assert told in printed
    assert printed.count("\n") == 1
