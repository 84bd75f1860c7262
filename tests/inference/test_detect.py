"""`aaconv detect`, and runs of detectors that are scored where they were not trained."""

import json
import logging
import types
from dataclasses import replace

import pytest
from PIL import Image

from aaconv import cli
from aaconv.inference import evaluate_detector
from aaconv.inference.detect import picture_names
from aaconv.inference.evaluate_detector import evaluate_run, score_run
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_metrics, read_summary
from support.detection_runs import SCORERS
from support.tiny_runs import break_weights


@SCORERS
def test_detections_are_saved_here_and_scored_there(detector_run, monkeypatch, caplog):
    loaded = load_model(detector_run)
    with monkeypatch.context() as elsewhere, caplog.at_level(logging.WARNING):
        elsewhere.setattr(evaluate_detector, "scorer", lambda: None)
        values = evaluate_run(loaded)
    assert "wrote" in caplog.text
    assert values["mAP"] is None
    assert values["images"] == 10
    assert values["loss"] == pytest.approx(read_metrics(detector_run)[0]["loss"], rel=1e-4)
    # weights are large: they may stay where they are
    (detector_run / "model.safetensors").rename(detector_run / "away")
    saved = score_run(detector_run)
    (detector_run / "away").rename(detector_run / "model.safetensors")
    assert 0 <= saved["mAP"] <= saved["mAP50"]
    assert read_summary(detector_run)["mAP"] == saved["mAP"]
    assert read_metrics(detector_run)[-1]["mAP50"] == pytest.approx(saved["mAP50"])
    direct = evaluate_run(loaded, batch=3, save=detector_run / "again.json")
    assert direct["mAP"] == pytest.approx(saved["mAP"], abs=0.2)  # the file is rounded
    assert score_run(detector_run, detector_run / "again.json")["mAP"] == pytest.approx(direct["mAP"], abs=0.2)
    assert evaluate_run(loaded, limit=4)["images"] == 4
    assert evaluate_run(loaded, limit=1000)["images"] == evaluate_run(loaded)["images"]
    with pytest.raises(FileNotFoundError, match=r"nothing\.json of detections; `aaconv eval"):
        score_run(detector_run, detector_run / "nothing.json")
    with pytest.raises(ValueError, match="is not a run folder"):
        score_run(detector_run.parent)


def test_a_run_of_a_fold_is_evaluated_on_other_data(detector_run):
    loaded = load_model(detector_run)
    assert loaded.recipe is not None
    of_a_fold = replace(loaded, recipe=replace(loaded.recipe, holdout=3, fold=1))
    assert evaluate_run(of_a_fold)["images"] == 3
    assert evaluate_run(of_a_fold, data="coco")["images"] == 10


def test_weights_without_a_finite_loss_are_named_and_no_detections_saved(detector_run, tmp_path):
    loaded = load_model(detector_run, weights=break_weights(detector_run, tmp_path / "broken.safetensors"))
    with pytest.raises(ValueError, match=r"loss on coco is not finite: the weights .*broken\.safetensors are damaged"):
        evaluate_run(loaded, save=tmp_path / "detections.json")
    assert not (tmp_path / "detections.json").exists()


def test_weights_that_give_no_finite_scores_find_nothing_and_say_so(detector_run, coco_folder, tmp_path, capsys):
    broken, image = break_weights(detector_run, tmp_path / "broken.safetensors"), next(coco_folder.rglob("*.png"))
    words = ["detect", str(detector_run), str(image), "-o", str(tmp_path / "out")]
    words += ["--device", "cpu", "--weights", str(broken)]
    assert cli.main(words) == 2
    assert f"a score of the network is not finite: the weights {broken} are damaged" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_evaluate_refuses_other_classes_and_other_tasks(detector_run):
    loaded = load_model(detector_run)
    with pytest.raises(ValueError, match="other classes"):
        evaluate_run(loaded, data="shapes", limit=5)
    with pytest.raises(ValueError, match="not a run of a detector"):
        evaluate_run(types.SimpleNamespace(task="classify", recipe=None, source="run"))


def test_pictures_of_the_same_name_do_not_meet(tmp_path):
    files = [tmp_path / "a" / "1.jpg", tmp_path / "b" / "1.png", tmp_path / "2.jpg", tmp_path / "c" / "1.jpg"]
    assert picture_names(files) == ["1.png", "1-2.png", "2.png", "1-3.png"]


def test_the_command_draws_and_writes(detector_run, coco_folder, tmp_path, capsys):
    images = coco_folder / "val"
    out = tmp_path / "found"
    arguments = ["detect", str(detector_run), str(images / "000101.png"), str(images / "000102.png"), "-o", str(out)]
    assert cli.main([*arguments, "--threshold", "0", "--sheet", str(tmp_path / "sheet.png"), "--device", "cpu"]) == 0
    assert "objects in 2 images" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"000101.png", "000102.png", "detections.json"}
    with Image.open(out / "000101.png") as picture, Image.open(tmp_path / "sheet.png") as page:
        assert picture.size == (533, 800)
        assert page.width > 800
    results = json.loads((out / "detections.json").read_text())
    assert {result["image_id"] for result in results} <= {101, 102}
    assert {result["category_id"] for result in results} <= {3, 7, 90}


def test_the_command_names_bad_images_and_does_the_others(detector_run, coco_folder, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    out = tmp_path / "found"
    good = str(coco_folder / "val" / "000103.png")
    assert cli.main(["detect", str(detector_run), str(broken), good, "-o", str(out), "--device", "cpu"]) == 2
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
def test_the_command_explains_what_is_wrong(detector_run, coco_folder, tmp_path, capsys, arguments, told):
    words = {"run": detector_run, "image": coco_folder / "val" / "000101.png", "out": tmp_path}
    filled = [argument.format(**words) for argument in arguments]
    try:
        code = cli.main(["detect", "-o", str(tmp_path / "out"), *filled])
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr().err
    assert code == 2
    assert told in printed
    assert printed.count("\n") == 1
