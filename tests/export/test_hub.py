"""Runs on the hub: timm's own loading gives the same bits back, and the card says what was trained."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from aaconv import cli, recipes
from aaconv.export import hub
from aaconv.export.model_card import card_text, escape
from aaconv.recipes.recipe import Evidence
from aaconv.runs import load
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_config, read_metrics
from support.fresh import run_fresh
from support.tiny_runs import TINY, train_tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny", "demo-aa", ema=0.5)


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    return hub.save(run, tmp_path_factory.mktemp("hub") / "tiny-hub")


def same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_folder_is_a_model_of_timms(run):
    model = timm.create_model(f"local-dir:{run}", pretrained=True)
    assert same_weights(model, load_model(run, weights="last").model)


def test_a_saved_folder_loads_back_to_the_bit(run, saved):
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    model = timm.create_model(f"local-dir:{saved}", pretrained=True).eval()
    loaded = load_model(run)
    assert same_weights(model, loaded.model)
    assert not same_weights(model, load_model(run, weights="last").model)  # the averaged ones are taken by default
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), loaded.model(x))
    assert tuple(model.pretrained_cfg["mean"]) == loaded.mean
    assert list(model.pretrained_cfg["input_size"]) == [3, 32, 32]


def test_the_card_says_what_how_well_and_whom_to_cite(run, saved):
    text = (saved / "README.md").read_text()
    head, _, body = text.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["tags"] == ["image-classification", "timm", "aaconv"]
    loaded = load_model(run)
    assert f"{sum(p.numel() for p in loaded.model.parameters()):,}" in body
    assert f"| top-1 | {loaded.metrics['top1']:.2f} | - |" in body
    assert "@inproceedings{bello2019attention" in body
    assert 'timm.create_model("local-dir:tiny-hub", pretrained=True)' in body
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", body, re.DOTALL)[1])
    assert recipe["name"] == "demo-aa"
    assert recipe["train_limit"] == TINY["train_limit"]


@pytest.mark.slow
def test_the_usage_of_the_card_works_in_a_clean_process(run, saved):
    (program,) = re.findall(r"```python\n(.*?)```", (saved / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    name, _, probability = run_fresh(program, cwd=saved.parent).strip().rpartition(" ")
    assert name in load_model(run).classes
    assert 0.5 <= float(probability) <= 1


@pytest.mark.slow
def test_the_usage_of_a_detectors_card_works(tmp_path, monkeypatch):
    run = train_tiny(tmp_path / "detector", "detection-demo", batch=2, train_limit=2, eval_limit=2, size=64)
    saved = hub.save(run, tmp_path / "hub")
    (program,) = re.findall(r"```python\n(.*?)```", (saved / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "from torchvision.transforms.v2 import functional" in program
    monkeypatch.chdir(tmp_path)
    exec(program, found := {})
    assert found["found"].boxes.shape[1] == 4


def test_the_hub_reads_the_evaluation_results(run, saved):
    card = ModelCard((saved / "README.md").read_text(encoding="utf-8"))
    (result,) = card.data.eval_results
    metrics = load_model(run).metrics
    assert (result.metric_type, result.metric_name) == ("accuracy", "top-1 (%)")
    assert result.metric_value == pytest.approx(metrics["top1"], abs=1e-4)
    assert (result.task_type, result.dataset_name) == ("image-classification", "shapes")
    assert card.data.model_name == "tiny-hub"


def test_the_card_has_the_metrics_of_the_weights_it_is_about(run):
    summary = load_model(run).metrics
    best = next(row for row in read_metrics(run) if row["epoch"] == summary["best"]["epoch"])
    loaded = replace(load_model(run), metrics=summary | {"top1": 1.25})
    assert [load.measured(loaded, weights).metrics["top1"] for weights in (None, "ema")] == [1.25, 1.25]
    assert load.measured(loaded, "best").metrics["top1"] == best["top1"] == summary["best"]["value"]
    assert load.measured(loaded, "last").metrics is None  # the averaged ones were evaluated


def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(timm.models, "save_for_hf", full)
    assert cli.main(["push", str(run), "--to", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("No space left on device (os error 28)\n")
    assert list(tmp_path.iterdir()) == []


def test_the_card_keeps_local_folders_private_and_knows_the_paper(run):
    loaded = load_model(run)
    recipe = replace(
        loaded.recipe, data="folder//home/me/secret/birds", data_dir="/home/me", evidence=Evidence(1, "AA-Wide-ResNet"),
        train_limit=None, eval_limit=None,
    )  # fmt: skip
    text = card_text(replace(loaded, recipe=recipe), "me/birds")
    assert "/home/me" not in text
    assert "| top-1 | " in text
    assert f"{recipes.paper_value(recipe, 'top-1'):.2f} |" in text
    assert 'timm.create_model("hf-hub:me/birds"' in text


class Api:
    """The hub's client, as far as it is used."""

    def __init__(self, **_):
        self.repo_id = "me/tiny"

    def create_repo(self, repository, *, private, exist_ok):
        Api.created = (repository, private, exist_ok)
        return self

    has_readme = False

    def file_exists(self, *, repo_id, filename):
        assert (repo_id, filename) == ("me/tiny", "README.md")
        return self.has_readme

    def upload_folder(self, *, repo_id, folder_path, commit_message, **_):
        Api.uploaded = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return f"https://example.org/{repo_id}"


def test_pushing_uploads_the_same_files(run, saved, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", Api)
    assert cli.main(["push", str(run), "me/tiny", "--private"]) == 0
    assert capsys.readouterr().out == f"uploaded {run} to https://example.org/me/tiny\n"
    assert Api.created == ("me/tiny", True, True)
    assert Api.uploaded["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert Api.uploaded["config.json"] == (saved / "config.json").read_bytes()
    assert b"# Model card for tiny" in Api.uploaded["README.md"]


def test_no_network_is_one_line(run, monkeypatch, capsys):
    class Offline(Api):
        def create_repo(self, *_, **__):
            raise ConnectionError("no route to the hub\nand many more lines")

    monkeypatch.setattr(hub, "HfApi", Offline)
    assert cli.main(["push", str(run), "me/tiny"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "was not uploaded to me/tiny: no route to the hub; --to DIR" in error


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nothing", "me/tiny"], "nothing is not a run folder"),
        (["RUN", "tiny"], "must be owner/name"),
        (["RUN"], "either a repository on the hub"),
        (["RUN", "me/tiny", "--to", "x"], "either a repository on the hub"),
        (["RUN", "--to", "full"], "full is there already"),
        (["RUN", "--to", "no/such/folder"], "make it first"),
        (["RUN", "--to", "full/file/x"], "full/file is a file, not a folder to write x in"),
        (
            ["RUN", "--to", "/proc/x"],
            "/proc/x cannot be written: /proc is not writable; choose another place",
        ),
    ],
)
def test_what_is_wrong_is_one_line(arguments, hint, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert cli.main(["push", *(str(run) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_readme_that_the_repository_has_stays(run, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(Api, "has_readme", True)
    hub.push(run, "me/tiny")
    assert sorted(Api.uploaded) == ["config.json", "model.safetensors"]


def test_all_files_have_the_mode_of_new_files(saved, tmp_path):
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in (*saved.iterdir(), tmp_path / "new")}
    assert len(modes) == 1


@pytest.mark.parametrize("text", ["a: b", "- x", "<img src=x onerror=alert(1)>", "[a](javascript:b)", "``` `` `", "#|"])
def test_names_in_the_card_are_text_and_nothing_else(run, text):
    loaded = load_model(run)
    recipe = replace(loaded.recipe, data=f"folder/{text.replace('/', '')}", summary=f"{text} {text}")
    card = card_text(replace(loaded, recipe=recipe), "me/name")
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(head)["datasets"] == [recipe.data.removeprefix("folder/").lower()]
    outside = re.sub(r"(?ms)^(`{3,})\w+$.*?^\1$", "", body)
    assert "<img" not in outside
    assert "[a](" not in outside.replace("\\[", "").replace("\\]", "")
    assert "whom" not in outside
    assert outside.count("## ") == 5  # no fence was closed within


def test_escaped_text_has_no_markup():
    assert escape("a_b <c>\n*d* [e](f) `g` | &") == r"a_b &lt;c&gt; \*d\* \[e\](f) \`g\` \| &amp;"


def start_from_weights(folder, **options):
    """A run whose network starts from weights in a file."""
    weights = folder.parent / "start.safetensors"
    torch.manual_seed(5)
    save_file(timm.create_model("aa_small", img_size=32, num_classes=2).state_dict(), weights)
    return train_tiny(folder, "demo-aa", model_options={"checkpoint_path": str(weights)} | options, lr=1e-9), weights


def test_a_run_may_start_from_weights_and_is_loaded_without_them(tmp_path, recwarn):
    run, weights = start_from_weights(tmp_path / "run", num_heads=4)
    assert not recwarn.list
    started, loaded = load_file(weights), load_model(run, weights="last").model.state_dict()
    for name, parameter in load_model(run).model.named_parameters():
        assert torch.allclose(loaded[name], started[name], atol=1e-6), parameter
    weights.unlink()
    assert json.loads((run / "config.json").read_text())["model_args"] == {"num_heads": 4, "img_size": 32}
    model = timm.create_model(f"local-dir:{run}", pretrained=True)
    assert same_weights(model, load_model(run, weights="last").model)
    saved = hub.save(run, tmp_path / "saved")
    assert same_weights(timm.create_model(f"local-dir:{saved}", pretrained=True), load_model(run).model)


def test_start_weights_in_an_older_config_are_not_passed_on(tmp_path):
    run, weights = start_from_weights(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model_args"] |= {"checkpoint_path": str(weights), "pretrained": True}
    (run / "config.json").write_text(json.dumps(config))
    saved = hub.save(run, tmp_path / "saved")
    found = json.loads((saved / "config.json").read_text())["model_args"]
    known_to_timm = {"img_size": [32, 32], "num_classes": 2, "in_chans": 3, "global_pool": "avg"}  # from 1.0.31 on
    assert found in ({"img_size": 32}, known_to_timm)


@pytest.mark.parametrize("change", [{"drop_rate": "much"}, {"num_heads": 3}, {"nonsense": 1}])
def test_what_timm_cannot_load_is_not_written(run, tmp_path, change, monkeypatch, capsys):
    config = read_config(run)
    config["model_args"] |= change
    monkeypatch.setattr(hub, "read_config", lambda run: config)
    assert cli.main(["push", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "timm cannot load what was written, and it is not kept: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_says_how_images_are_resized(run, saved):
    for folder in (run, saved):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert timm.data.resolve_model_data_config(model)["interpolation"] == "bilinear"
