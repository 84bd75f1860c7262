"""Recipes whose network has another default by now: files from before mean what they meant."""

import json
from dataclasses import replace

import pytest
import yaml

from aaconv import recipes
from aaconv.models import create_without_memory
from aaconv.recipes import Model, diff
from aaconv.recipes.former import FORMER, options_meant
from aaconv.recipes.yaml_file import to_yaml
from aaconv.runs import results

RECORDED = [record for record in results.read(results.RECORDED / "results") if record.get("name") in FORMER]


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: f"{record['name']}-{record['seed']}")
def test_the_recipe_of_a_record_builds_the_network_that_was_recorded(record):
    recipe = recipes.get(record["name"])
    network = create_without_memory(recipe.model.name, num_classes=10, **recipe.model.options)
    assert sum(parameter.numel() for parameter in network.parameters()) == record["parameters"]
    assert diff.changes_of(record) == {}
    assert results.recipe_of(record) == replace(recipe, seed=record["seed"])


def test_records_of_every_such_recipe_are_there_and_say_nothing_of_it_themselves():
    assert {record["name"] for record in RECORDED} == FORMER.keys()
    for record in RECORDED:
        with open(record["file"], encoding="utf-8") as file:
            assert "num_heads" not in json.load(file)["options"]


def record_of(folder, number, name, options, overrides):
    record = {"name": name, "model": "aa_window_resnet50", "options": options, "overrides": overrides, "seed": number}
    path = folder / "imagenette160" / f"{number}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record | {"epochs": 20, "top1": 70.0 + number, "top5": 95.0}))


def changed(options):
    return {"model": {"name": "aa_window_resnet50", "options": options}}


def test_runs_from_before_and_of_now_are_one_experiment(tmp_path):
    name, eight = "imagenette-windows-13", {"num_heads": 8}
    record_of(tmp_path, 0, name, {}, {})
    record_of(tmp_path, 1, name, eight, {})
    record_of(tmp_path, 2, name, eight, changed(eight))  # once a change, by now what the recipe says
    record_of(tmp_path, 3, name, {"window": 9}, changed({"window": 9}))
    record_of(tmp_path, 4, name, {"window": 9} | eight, changed({"window": 9} | eight))
    record_of(tmp_path, 5, name, {"num_heads": 4}, changed({"num_heads": 4}))
    found = results.experiments(results.read(tmp_path))
    assert [one.seeds for one in found] == [[0, 1, 2], [3, 4], [5]]
    assert [one.command for one in found] == [
        f"aaconv train {name} --seed 0",
        f"aaconv train {name} --model.window 9 --seed 3",
        f"aaconv train {name} --model.num-heads 4 --seed 5",
    ]


def test_the_default_of_now_is_another_experiment(tmp_path):
    record_of(tmp_path, 0, "imagenette-windows-13", {}, {})
    record_of(tmp_path, 1, "imagenette-windows-13-growing-heads", {}, {})
    heads = [one.options.get("num_heads") for one in results.experiments(results.read(tmp_path))]
    assert heads == [8, None]


@pytest.mark.parametrize("name", FORMER)
def test_a_run_from_before_is_resumed_with_its_network(name, tmp_path):
    fields = yaml.safe_load(to_yaml(recipes.get(name)))
    assert fields["model"]["options"].pop("num_heads") == 8
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    assert recipes.load(tmp_path / "recipe.yaml") == recipes.get(name)


def test_other_recipes_and_networks_are_taken_as_they_are():
    options = {"window": 7}
    assert options_meant("imagenette-aa-window-resnet50", "aa_window_resnet50", options) == options
    assert options_meant("imagenette-windows-7", "aa_resnet50", options) == options
    assert options_meant("imagenette-windows-7", "aa_window_resnet50", {"num_heads": 2}) == {"num_heads": 2}


def test_the_recipes_of_windows_differ_in_heads_as_their_names_say():
    growing, eight = (recipes.get(f"imagenette-windows-{name}") for name in ("13-growing-heads", "13"))
    assert (growing.model, eight.model) == (Model("aa_window_resnet50"), Model("aa_window_resnet50", {"num_heads": 8}))
    assert replace(growing, name="", summary="", model=eight.model) == replace(eight, name="", summary="")
