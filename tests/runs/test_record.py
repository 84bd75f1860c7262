"""Records of finished runs: what is kept of them, under which name, and what is refused."""

import json
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aaconv import recipes
from aaconv.paper.cells import cells
from aaconv.recipes import Model
from aaconv.recipes.diff import overrides_of
from aaconv.runs import curves, record, results
from aaconv.runs.record import record_result
from aaconv.runs.run_folder import read_epochs, write_rows
from aaconv.training.trainer import resume, train
from support.training_runs import tiny

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = Model("aa_small", {"num_heads": 2})
    train(tiny(model=model, epochs=1, batch=4, train_limit=8, eval_limit=4), folder, device="cpu")
    return folder


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


def finished_run(folder, recipe, top1):
    """A folder with the record of a long run."""
    folder.mkdir()
    recipes.save(recipe, folder / "recipe.yaml")
    summary = {"model": recipe.model.name, "options": recipe.model.options, "data": recipe.data, "seed": recipe.seed}
    summary |= {"epochs": recipe.epochs, "top1": top1, "top5": 95.0, "finished": True}
    (folder / "summary.json").write_text(json.dumps(summary))
    write_rows(folder / "metrics.csv", [{"epoch": 1, "top1": top1}], ["epoch", "top1"])
    return folder


@pytest.mark.usefixtures("nothing_recorded")
def test_a_result_appears_in_the_papers_table(tmp_path):
    recipe = tiny(model=Model("aa_wrn28_10"), data="cifar100", train_limit=None, eval_limit=None, seed=3, epochs=500)
    path = record_result(finished_run(tmp_path / "run", recipe, 81.6))
    assert re.fullmatch(r"results/cifar100/tiny-[0-9a-f]{6}-seed3\.json", str(path))
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
    assert re.fullmatch(r"tiny-[0-9a-f]{6}-seed0\.json", path.name)


def test_a_changed_recipe_has_a_record_of_its_own(tmp_path):
    usual = recipes.get("cifar100-small-aa")
    for number, changes in enumerate(({}, {"epochs": 100, "data_dir": "/home/me", "workers": 0})):
        recipe = recipes.override(usual, changes)
        folder = finished_run(tmp_path / str(number), recipe, 70.0)
        summary = json.loads((folder / "summary.json").read_text()) | {"overrides": overrides_of(recipe)}
        (folder / "summary.json").write_text(json.dumps(summary))
    first, second = (record_result(tmp_path / name, tmp_path / "kept") for name in "01")
    assert (first.name, second.name) == ("cifar100-small-aa-seed0.json", "cifar100-small-aa-epochs_100-seed0.json")
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
    assert [path.name for path in records] == [f"demo-aa{name}-seed0.json" for name in names]


def test_every_recipe_of_the_catalogue_has_records_of_its_own(tmp_path):
    """Several train the same network on the same images."""
    names = [name for name in recipes.names("imagenette-*") if recipes.get(name).model.name == "plain_resnet50"]
    assert len(names) > 1
    runs = [finished_run(tmp_path / name, recipes.get(name), 70.0) for name in names]
    records = [record_result(run, tmp_path / "kept") for run in runs]
    assert [path.name for path in records] == [f"{name}-seed0.json" for name in names]


def test_another_network_is_named(tmp_path):
    for number, options in enumerate(({}, {"num_heads": 2})):
        recipe = replace(recipes.get("demo-aa"), model=Model("aa_wrn16_4", options))
        folder = finished_run(tmp_path / str(number), recipe, 60.0)
        summary = json.loads((folder / "summary.json").read_text()) | {"overrides": overrides_of(recipe)}
        (folder / "summary.json").write_text(json.dumps(summary))
    records = [record_result(tmp_path / name, tmp_path / "kept").name for name in "01"]
    assert records == ["demo-aa-model_aa_wrn16_4-seed0.json", "demo-aa-model_aa_wrn16_4-num_heads_2-seed0.json"]


def test_only_finished_runs_have_results(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"is not finished; .*--resume"):
        record_result(copy, tmp_path)
    with pytest.raises(ValueError, match="is not a run folder"):
        record_result(tmp_path, tmp_path)
    (copy / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not JSON: .*; remove .*summary.json and have it .*--resume"):
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
    for read in (lambda: record_result(run, tmp_path / "kept"), lambda: curves._read([run]), lambda: read_epochs(run)):
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
    with pytest.raises(ValueError, match=r"is damaged: line 2 .*; have it rewritten: aaconv train --resume .*/run$"):
        read_epochs(copy)
    resume(copy, device="cpu")
    assert read_epochs(copy) == read_epochs(run)


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


def test_of_two_runs_recorded_at_once_under_one_name_none_is_lost(tmp_path, monkeypatch):
    """One is kept whole, its metrics beside it; the other is told that the name is taken."""
    runs = [finished_run(tmp_path / f"run{number}", tiny(), 60.0 + number) for number in range(4)]
    write, ready, outcomes = record.write_rows, threading.Barrier(len(runs)), []

    def write_slowly(*arguments):
        time.sleep(0.02)
        write(*arguments)

    def keep(run):
        ready.wait()
        try:
            outcomes.append(record_result(run, tmp_path / "kept"))
        except ValueError as error:
            outcomes.append(str(error))

    monkeypatch.setattr(record, "write_rows", write_slowly)
    threads = [threading.Thread(target=keep, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = [one for one in outcomes if isinstance(one, Path)]
    assert sum("is there already, of another run" in str(one) for one in outcomes) == len(runs) - 1
    assert json.loads(path.read_text())["top1"] == float(read_csv(path).split(",")[-1])
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".csv", ".json"]
