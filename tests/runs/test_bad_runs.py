"""Run folders that somebody has changed: one line that names the file, whatever reads it."""

import json
import shutil

import pytest

from aaconv import cli
from aaconv.runs.load import load_model
from aaconv.runs.run_types import data_info_of
from support.command_line import error_of
from support.tiny_runs import train_tiny

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny", "demo-aa")


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_cfg(**values):
    return lambda content: content["pretrained_cfg"].update(values)


CONFIGS = [
    (set_cfg(mean=[1, 2, 3, 4]), "'mean' must be three numbers"),
    (set_cfg(mean=[0.5, "x", 0.5]), "'mean' must be three numbers"),
    (set_cfg(std=[0.5, 0.5, float("nan")]), "'std' must be three numbers"),
    (set_cfg(std=[0.5, 0.5, 0]), "'std' must be above 0"),
    (set_cfg(input_size=[3, 10**9, 10**9]), "'input_size' must end in 1 to 16384 pixels"),
    (set_cfg(input_size="big"), "'input_size' must end in"),
    (set_cfg(input_size=[]), "'input_size' must end in"),
    (set_cfg(crop_pct="x"), "'crop_pct' must be 0.01 to 1"),
    (set_cfg(crop_pct=-1), "'crop_pct' must be 0.01 to 1"),
    (set_cfg(crop_pct=1e-300), "'crop_pct' must be 0.01 to 1"),
    (lambda content: content.update(pretrained_cfg="x"), "it has no 'pretrained_cfg'"),
    (lambda content: content.update(pretrained_cfg=None), "it has no 'pretrained_cfg'"),
    (lambda content: content.update(label_names=[["a"], ["b"]]), "'label_names' must be the names of the classes"),
    (lambda content: content.update(label_names=7), "'label_names' must be the names of the classes"),
    (lambda content: content.update(label_names=[]), "'label_names' must be the names of the classes"),
]


@pytest.mark.parametrize(("change", "told"), CONFIGS, ids=range(len(CONFIGS)))
def test_what_a_config_holds_is_checked(run, change, told, capsys):
    rewrite(run / "config.json", change)
    assert f"run/config.json is not what a run writes: {told}" in error_of(capsys, "eval", "run", "--device", "cpu")


SUMMARIES = [
    ({"best": "x"}, "'best' is 'x'"),
    ({"best": {"epoch": "one", "value": 3}}, "'best' is"),
    ({"best": {"value": 3}}, "'best' is"),
    ({"finished": "yes"}, "'finished' is 'yes'"),
    ({"epochs": [3]}, "'epochs' is '[3]'"),
    ({"top1": "much"}, "'top1' is 'much'"),
    ({"seconds_per_epoch": None}, "'seconds_per_epoch' is 'None'"),
    ({"parameters": -4}, "'parameters' is '-4'"),
    ({"loss": {"a": 1}}, "'loss' is"),
]


@pytest.mark.parametrize(("change", "told"), SUMMARIES, ids=range(len(SUMMARIES)))
@pytest.mark.parametrize("command", ["push run --to out --weights best", "train --resume run", "report run"])
def test_what_a_summary_holds_is_checked(run, change, told, command, capsys):
    rewrite(run / "summary.json", lambda content: content.update(change))
    assert f"run/summary.json is not what a run writes: {told}" in error_of(capsys, *command.split())


def test_a_summary_that_lacks_what_is_printed(run, capsys):
    (run / "summary.json").write_text('{"finished": true}')
    assert cli.main(["train", "--resume", "run"]) == 2
    assert "run/summary.json is not what a run writes: it lacks epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.json", "eval run"),
        ("summary.json", "eval run"),
        ("summary.json", "record run"),
        ("environment.json", "report run"),
        ("recipe.yaml", "eval run"),
        ("recipe.yaml", "train --from run/recipe.yaml --dry-run"),
    ],
)
def test_nesting_without_end_is_one_line(run, name, command, capsys):
    (run / name).write_text(DEEP[: 10_000 if name.endswith("yaml") else None])
    error = error_of(capsys, *command.split())
    assert f"run/{name} is not opened" in error
    assert "nested too deeply" in error


def test_recorded_results_and_figures_are_read_as_carefully(run, tmp_path, capsys):
    assert cli.main(["record", "run"]) == 0
    (path,) = (tmp_path / "results").rglob("*.json")
    capsys.readouterr()
    path.write_text(DEEP)
    for command in ("table 1", f"plot {path}"):
        assert "nested too deeply" in error_of(capsys, *command.split())


def test_a_number_too_long_in_a_table(run, capsys):
    (run / "metrics.csv").write_text(f"epoch,top1\n1,{'9' * 400}\n")
    assert "run/metrics.csv is damaged: 99999999999999999999... does not fit 64 bits" in error_of(capsys, "plot", "run")


def test_half_letters_in_names_are_drawn_all_the_same(run, capsys):
    rewrite(run / "config.json", lambda content: content.update(label_names=["a\ud800", "b"]))
    assert load_model(run).classes == ("a\N{REPLACEMENT CHARACTER}", "b")
    assert cli.main(["eval", "run", "--device", "cpu", "--data", "shapes", "--limit", "8"]) == 2  # other classes
    assert "classes" in capsys.readouterr().err


def test_the_config_of_a_run_fits(trained):
    info = data_info_of(json.loads((trained / "config.json").read_text()), "config.json")
    assert (info.classes, info.size) == (("different colours", "same colour"), 32)


OPTIONS = [
    ({"features_only": True}, "run/model.safetensors does not fit the network"),
    ({"num_heads": "many"}, "aa_small cannot be built with {'num_heads': 'many'}"),
    ({"num_heads": [1, 2]}, "aa_small cannot be built with"),
    ({"key_ratio": 1e308}, "aa_small cannot be built with"),
    ({"where": 7}, "aa_small cannot be built with"),
    ({"in_chans": -3}, "aa_small cannot be built with"),
]


@pytest.mark.parametrize(("options", "told"), OPTIONS, ids=str)
def test_whatever_a_constructor_raises_is_one_line(run, options, told, capsys):
    text = (run / "recipe.yaml").read_text()
    assert "options: {}" in text
    (run / "recipe.yaml").write_text(text.replace("options: {}", f"options: {json.dumps(options)}"))
    assert told in error_of(capsys, "eval", "run", "--device", "cpu")
