"""Run folders: what is read from them again, by us and by timm, and what is refused."""

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from training_runs import no_curves, one_thread, tiny  # noqa: F401

from aaconv import curves, recipes, results
from aaconv.models import create_model
from aaconv.recipes import Model
from aaconv.run_folder import (
    check_free,
    is_run,
    load_model,
    overrides_of,
    read_course,
    read_metrics,
    read_speed,
    record_result,
    write_rows,
)
from aaconv.tables import cells
from aaconv.train import resume, train

RECIPE = tiny(ema=0.5, model=Model("aa_small", {"num_heads": 2}), epochs=1, batch=4, train_limit=8, eval_limit=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(RECIPE, folder, device="cpu")
    return folder


def logits(model, size=32):
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size))


def test_a_run_is_loaded_with_all_it_takes_to_use_it(run):
    loaded = load_model(run)
    assert loaded.recipe == RECIPE
    assert loaded.classes == ("different colours", "same colour")
    assert (loaded.size, loaded.task, loaded.source) == (32, "classify", str(run))
    assert loaded.mean == (0.3, 0.3, 0.3)
    assert loaded.metrics["finished"] is True
    assert not loaded.model.training
    assert loaded.model.num_classes == 2


def test_weights_are_chosen_by_name_and_the_average_comes_first(run):
    found = {name: logits(load_model(run, weights=name).model) for name in (None, "ema", "last", "best")}
    assert torch.equal(found[None], found["ema"])
    assert torch.equal(found["best"], found["ema"])  # one epoch: its average is the best there is
    assert not torch.equal(found["last"], found["ema"])
    own = load_model(run, weights=run / "model.safetensors")
    assert torch.equal(logits(own.model), found["last"])


def test_timm_loads_the_folder_itself(run):
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    assert torch.equal(logits(model), logits(load_model(run, weights="last").model))
    assert model.pretrained_cfg["input_size"] == [3, 32, 32]
    assert model.pretrained_cfg["label_names"] == ["different colours", "same colour"]


def test_a_network_by_name():
    loaded = load_model("aa_small", options={"num_heads": 2}, num_classes=7)
    assert (loaded.recipe, loaded.classes, loaded.metrics, loaded.size) == (None, None, None, 32)
    assert logits(loaded.model).shape == (1, 7)


def test_a_network_by_name_with_a_file_of_weights(run, tmp_path):
    options = {"num_heads": 2}
    loaded = load_model("aa_small", options=options, num_classes=2, weights=run / "model.safetensors")
    assert torch.equal(logits(loaded.model), logits(load_model(run, weights="last").model))
    with pytest.raises(ValueError, match=r"does not fit the network: of .* it has \[.*\], the network"):
        load_model("aa_small", options=options, num_classes=3, weights=run / "model.safetensors")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("aa_wrn16_5", {}, "did you mean"),
        ("runs/nothing", {}, "is no run folder"),
        (Path("nothing"), {}, "is no run folder"),
        ("aa_small", {"options": {"hedas": 3}}, "hedas"),
        ("aa_small", {"weights": "best"}, "belong to a run folder"),
        ("aa_small", {"weights": "nothing.safetensors"}, "there is no file"),
    ],
)
def test_what_cannot_be_loaded_is_named(source, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        load_model(source, **options)


def test_a_run_is_built_as_it_was_trained(run):
    with pytest.raises(ValueError, match="leave out model options"):
        load_model(run, num_classes=3)


def test_weights_that_are_not_there_are_named(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "model-ema.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights 'ema'; it has last, best"):
        load_model(copy, weights="ema")
    assert torch.equal(logits(load_model(copy).model), logits(load_model(run, weights="last").model))
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="has none yet"):
        load_model(copy)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "the code ran")


def test_a_run_with_code_in_its_weights_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("*.safetensors"):
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
    with pytest.raises(ValueError, match="no safetensors file"):
        load_model(copy)
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"pretrained_cfg": {}}'])
def test_a_damaged_config_is_named(content, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        load_model(copy)


def test_numbers_in_tables_come_back_as_they_were(tmp_path):
    rows = [{"epoch": 1, "loss": 0.1 + 0.2, "top1": None}, {"epoch": 2, "loss": 1e-300, "top1": float("inf")}]
    write_rows(tmp_path / "metrics.csv", rows, ["epoch", "loss", "top1"])
    assert read_metrics(tmp_path) == rows
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "1,0.30000000000000004,"


def test_a_run_is_told_from_other_folders(run, tmp_path):
    assert is_run(run)
    assert is_run(str(run))
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "nothing")
    assert len(read_speed(run)) == 1


def test_a_place_where_nobody_may_look_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(OSError, match=rf"^{tmp_path}/run cannot be written: Permission denied; choose another place"):
        check_free(tmp_path / "run")


def test_what_differs_from_the_catalogue_is_kept():
    name = recipes.names()[0]
    usual = recipes.get(name)
    assert overrides_of(usual) == {}
    assert overrides_of(recipes.override(usual, {"epochs": usual.epochs + 1})) == {"epochs": usual.epochs + 1}


def test_of_a_recipe_that_the_catalogue_does_not_have_all_is_kept():
    recipe = tiny(lr=0.3, decay_epochs=(1.0,))
    assert overrides_of(recipe)["lr"] == 0.3
    kept = {"name": recipe.name, "model": recipe.model.name, "options": recipe.model.options, "data": recipe.data}
    kept |= {"epochs": recipe.epochs, "overrides": json.loads(json.dumps(overrides_of(recipe))), "seed": recipe.seed}
    assert results.recipe_of(kept) == recipe


# Results


def finished_run(folder, recipe, top1):
    """A folder with the record of a long run."""
    folder.mkdir()
    recipes.save(recipe, folder / "recipe.yaml")
    summary = {"model": recipe.model.name, "options": recipe.model.options, "data": recipe.data, "seed": recipe.seed}
    summary |= {"epochs": recipe.epochs, "top1": top1, "top5": 95.0, "finished": True}
    (folder / "summary.json").write_text(json.dumps(summary))
    write_rows(folder / "metrics.csv", [{"epoch": 1, "top1": top1}], ["epoch", "top1"])
    return folder


def test_a_result_appears_in_the_papers_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tiny(model=Model("aa_wrn28_10"), data="cifar100", train_limit=None, eval_limit=None, seed=3, epochs=500)
    path = record_result(finished_run(tmp_path / "run", recipe, 81.6))
    assert re.fullmatch(r"results/cifar100/aa_wrn28_10-recipe_tiny-[0-9a-f]{6}-seed3\.json", str(path))
    assert read_csv(path) == "epoch,top1\n1,81.6\n"
    found = [cell for cell in cells([1]) if cell.column == "top-1" and cell.ours is not None]
    assert [cell.exact for cell in found] == [81.6]
    assert record_result(tmp_path / "run") == path  # again: the same
    with pytest.raises(ValueError, match="is there already, of another run"):
        record_result(finished_run(tmp_path / "other", recipe, 70.0))


def read_csv(path):
    return path.with_suffix(".csv").read_text()


def test_results_on_part_of_the_images_are_kept_apart(run, tmp_path):
    path = record_result(run, tmp_path / "results")
    assert path.parent == tmp_path / "results/shapes-part"
    assert re.fullmatch(r"aa_small-num_heads_2-recipe_tiny-[0-9a-f]{6}-seed0\.json", path.name)


def test_a_changed_recipe_has_a_record_of_its_own(tmp_path):
    usual = recipes.get("cifar100-small-aa")
    for number, changes in enumerate(({}, {"epochs": 100, "data_dir": "/home/me", "workers": 0})):
        recipe = recipes.override(usual, changes)
        folder = finished_run(tmp_path / str(number), recipe, 70.0)
        summary = json.loads((folder / "summary.json").read_text()) | {"overrides": overrides_of(recipe)}
        (folder / "summary.json").write_text(json.dumps(summary))
    first, second = (record_result(tmp_path / name, tmp_path / "kept") for name in "01")
    assert (first.name, second.name) == ("aa_wrn16_4-seed0.json", "aa_wrn16_4-epochs_100-seed0.json")
    assert json.loads(second.read_text())["overrides"] == {"epochs": 100, "workers": 0}  # no folder of this machine


def test_recipes_of_one_name_of_ones_own_have_records_of_their_own(tmp_path):
    """Also runs of a time when the summary said nothing of such recipes."""
    usual = replace(recipes.get("cifar100-small-aa"), name="mine")
    changes = {"first": {}, "second": {"seed": 1, "data_dir": "/home/me"}, "third": {"lr": 0.1}}
    for name, some in changes.items():
        finished_run(tmp_path / name, replace(usual, **some), 70.0)
    first, second, third = (record_result(tmp_path / name, tmp_path / "kept") for name in changes)
    assert second.name == first.name.replace("seed0", "seed1")
    assert third.name not in (first.name, second.name)
    assert json.loads(second.read_text())["overrides"]["batch"] == 256
    assert "data_dir" not in json.loads(second.read_text())["overrides"]


def test_runs_on_different_parts_of_the_images_lie_side_by_side(tmp_path):
    limits = ({}, {"eval_limit": 100}, {"eval_limit": 200}, {"train_limit": 500, "eval_limit": 100})
    records = []
    for number, changes in enumerate(limits):
        recipe = recipes.override(recipes.get("demo-aa"), changes)
        folder = finished_run(tmp_path / str(number), recipe, 60.0 + number)
        summary = json.loads((folder / "summary.json").read_text()) | {"overrides": overrides_of(recipe)}
        (folder / "summary.json").write_text(json.dumps(summary))
        records.append(record_result(folder, tmp_path / "kept"))
    assert {path.parent.name for path in records} == {"shapes-part"}
    names = ["", "-eval_limit_100", "-eval_limit_200", "-eval_limit_100-train_limit_500"]
    assert [path.name for path in records] == [f"aa_small{name}-seed0.json" for name in names]


def test_only_finished_runs_have_results(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"is not finished; .*--resume"):
        record_result(copy, tmp_path)
    with pytest.raises(ValueError, match="is no run folder"):
        record_result(tmp_path, tmp_path)
    (copy / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not JSON: .*; remove .*summary.json and have both .*--resume"):
        record_result(copy, tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (None, "it lacks model, options, data, seed"),
        ({"options": None}, "'options' is None"),
        ({"overrides": [1]}, r"'overrides' is \[1\]"),
        ({"overrides": {"epochs": "x"}}, "overrides: epochs must be a whole number, got 'x'"),
        ({"top1": "high"}, "'top1' is 'high'"),
        ({"top1": float("nan")}, "'top1' is nan"),
        ({"seed": True}, "'seed' is True"),
        ({"data": 5}, "'data' is 5"),
    ],
)
def test_no_result_is_kept_of_a_damaged_summary(changes, told, tmp_path):
    run = finished_run(tmp_path / "run", tiny(), 60.0)
    summary = {"finished": True} if changes is None else json.loads((run / "summary.json").read_text()) | changes
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=rf"run/summary\.json is not what a run writes: {told}; copy it again"):
        record_result(run, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"", "has no rows"),
        (b"epoch,top1\n", "has no rows"),
        (b"epoch,top1\n1,60.0,3\n", "is damaged: line 2 has not as many fields"),
        (b"epoch,top1\n1\n", "is damaged: line 2 has not as many fields"),
        (b"epoch,top1\n1,high\n", "is damaged: could not convert"),
        (b"epoch,top1\n1,\xff\n", "is damaged: .* decode"),
        (b"epoch,top1\n1," + b"1" * 200_000, "is damaged: field larger"),
        (b"top1\n60.0\n", "is damaged: line 2 is not epoch 1"),
        (b"epoch,top1\n1,50.0\n3,60.0\n", "is damaged: line 3 is not epoch 2"),
        (b"epoch,top1\n1,50.0\n", r"ends with top1 50\.0, but summary\.json has 60\.0"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_no_result_is_kept_with_damaged_metrics(content, told, tmp_path):
    run = finished_run(tmp_path / "run", tiny(), 60.0)
    (run / "metrics.csv").unlink() if content is None else (run / "metrics.csv").write_bytes(content)
    for read in (lambda: record_result(run, tmp_path / "kept"), lambda: curves._read([run]), lambda: read_course(run)):
        with pytest.raises(ValueError, match=rf"run/metrics\.csv {told}.*; copy it again"):
            read()
    assert not (tmp_path / "kept").exists()


def test_damaged_metrics_are_written_again_as_the_error_says(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "metrics.csv").write_text("")
    for read in (lambda: record_result(copy, tmp_path / "kept"), lambda: curves._read([copy])):
        with pytest.raises(ValueError, match=r"has no rows; remove .*/summary\.json and .* --resume"):
            read()
    (copy / "summary.json").unlink()
    resume(copy, device="cpu")
    assert read_csv(record_result(copy, tmp_path / "kept")) == (run / "metrics.csv").read_text()


def test_damaged_metrics_of_a_run_that_goes_on_are_written_by_going_on(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "summary.json").unlink()
    (copy / "metrics.csv").write_text("epoch,top1\n1\n")
    with pytest.raises(ValueError, match=r"is damaged: line 2 .*; have it written anew: aaconv train --resume .*/run$"):
        read_course(copy)
    resume(copy, device="cpu")
    assert read_course(copy) == read_course(run)


def test_a_recorded_course_is_checked_like_that_of_its_run(tmp_path):
    run = finished_run(tmp_path / "run", tiny(), 60.0)
    path = record_result(run, tmp_path / "kept")
    whole = read_csv(path)
    for content, told in (
        ("", "has no rows"),
        ("epoch,top1\n2,60.0\n", "is damaged: line 2 is not epoch 1"),
        ("epoch,top1\n1,50.0\n", rf"ends with top1 50\.0, but {path.name} has 60\.0"),
    ):
        path.with_suffix(".csv").write_text(content)
        with pytest.raises(ValueError, match=rf"\.csv {told}; record its run again: aaconv record RUN"):
            curves._read([path])
    record_result(run, tmp_path / "kept")
    assert read_csv(path) == whole
    curves._read([path])


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    run = finished_run(tmp_path / "run", tiny(), 60.0)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", "/proc/x"):
        with pytest.raises(ValueError, match=rf"^{place}/.* cannot be written: .*; keep it elsewhere: .* --results"):
            record_result(run, place)


@pytest.mark.parametrize("data", ["..", "folder/.", ""])
def test_no_result_is_kept_beside_the_folder_of_its_data(data, tmp_path):
    run = finished_run(tmp_path / "run", tiny(data=data), 60.0)
    with pytest.raises(ValueError, match="gives no name"):
        record_result(run, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_result_that_diverged_is_kept_once(tmp_path):
    run = finished_run(tmp_path / "run", tiny(), 50.0)
    summary = json.loads((run / "summary.json").read_text()) | {"loss": float("nan")}
    (run / "summary.json").write_text(json.dumps(summary))
    write_rows(run / "metrics.csv", [{"epoch": 1, "top1": 50.0, "loss": float("nan")}], ["epoch", "top1", "loss"])
    assert record_result(run, tmp_path / "kept") == record_result(run, tmp_path / "kept")


DAMAGES = [
    ({"seed": None}, "'seed' is None"),
    ({"seed": True}, "'seed' is True"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"name": None}, "'name' is None"),
    ({"model": None}, "'model' is None"),
    ({"options": None}, "'options' is None"),
    ({"top1": float("nan")}, "'top1' is nan"),
    ({"top1": float("inf")}, "'top1' is inf"),
    ({"overrides": {"epochs": "x"}}, "overrides: epochs must be a whole number"),
    ({"overrides": {"lr": [1]}}, "overrides: lr must be a number, got"),
    ({"overrides": {"decay_epochs": 3}}, "overrides: decay_epochs must be a list"),
    ({"overrides": {"model": {"name": "aa_small", "options": None}}}, "overrides: model: options must be a mapping"),
]


@pytest.mark.parametrize(("changes", "told"), DAMAGES, ids=[told for _, told in DAMAGES])
def test_a_damaged_record_is_named(changes, told, tmp_path):
    usual = recipes.get("cifar100-small-aa")
    path = record_result(finished_run(tmp_path / "run", usual, 70.0), tmp_path / "kept")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": usual.name} | changes))
    for read in (lambda: cells([1], tmp_path / "kept"), lambda: curves._read([path])):
        with pytest.raises(ValueError, match=rf"^{path} is not what `aaconv record` keeps: {told}.*; move it away"):
            read()


def test_the_network_is_the_one_that_was_trained(run):
    """Options reach it: two heads, and tables for images of 32 pixels."""
    loaded = load_model(run).model.state_dict()
    fresh = create_model("aa_small", num_heads=2, num_classes=2, img_size=32).state_dict()
    assert {name: value.shape for name, value in loaded.items()} == {name: value.shape for name, value in fresh.items()}
