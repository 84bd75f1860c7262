"""Weights of a network that its name alone does not build: NAME.TAG brings size, classes and keywords with it."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import aaconv
from aaconv import recipes
from aaconv.cli import main
from aaconv.export.model_card import shipped_card
from aaconv.export.weights import _check
from aaconv.models import create_model, family, list_models, weights
from aaconv.models.weights import options_of_name
from aaconv.runs.load import TrainedModel, load_model
from support.fresh import run_fresh
from support.tiny_imagenet_data import WNIDS, expect, make_tiny_imagenet
from support.tiny_runs import train_tiny

PACKAGE = Path(aaconv.__file__).parent
NAME, RECIPE = "aa_resnet18.tiny_imagenet", "tiny-imagenet-resnet18-aa"
OWN = {"stem_pool": False, "img_size": 64}

# Run by a copy of the package that has the weights.
SCRIPT = """
import contextlib, io, json, sys
import timm, torch
import aaconv
from aaconv import recipes
from aaconv.cli import main
from aaconv.tasks.classify import Classify
from aaconv.tasks.task import DataInfo, Task

NAME = "aa_resnet18.tiny_imagenet"

def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return [code, out.getvalue(), err.getvalue()]

def refused(name, **options):
    try:
        timm.create_model(name, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)

model = timm.create_model(NAME, pretrained=True).eval()
x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    logits = model(x)
attended = timm.create_model(NAME, pretrained=True)
aaconv.augment(attended, (3, 64, 64), where="layer1.0.conv2", combine="add")
aaconv.save_model(attended, "attended")
with torch.no_grad():
    saved_logits = aaconv.load_model("attended").model(x)
alone = timm.create_model("aa_resnet18")
size = lambda network: list(network.layer2[0].conv1.rel_h.shape)
recipe = recipes.override(recipes.get("demo-aa"), {"model": NAME})
print(json.dumps({
    "package": aaconv.__file__,
    "logits": logits.tolist(),
    "saved logits": saved_logits.tolist(),
    "cfg": model.pretrained_cfg,
    "listed": timm.list_pretrained("aa_resnet*"),
    "alone": [alone.num_classes, alone.pretrained_cfg["input_size"], type(alone.maxpool).__name__],
    "alone pretrained": refused("aa_resnet18", pretrained=True),
    "untrained": type(timm.create_model(NAME).maxpool).__name__,
    "seven": list(timm.create_model(NAME, pretrained=True, num_classes=7).get_classifier().weight.shape),
    "same": refused(NAME, pretrained=True, stem_pool=False),
    "conflict": refused(NAME, pretrained=True, stem_pool=True),
    "tables": [size(model), size(timm.create_model(NAME, pretrained=True, img_size=96))],
    "reduction": timm.create_model(NAME, pretrained=True, features_only=True).feature_info.reduction(),
    "config": Task.config(Classify(recipe), DataInfo(("a", "b"), (0.5,) * 3, (0.5,) * 3, 64))["model_args"],
    "commands": {words: run(*words.split()) for words in sys.argv[1:]},
}))
"""
COMMANDS = ("models resnet18", f"predict {NAME} --pretrained photo.png", "predict aa_resnet18 --pretrained photo.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of the very recipe, on few images and for one epoch."""
    place = tmp_path_factory.mktemp("tiny")
    root = make_tiny_imagenet(place / "data")
    with pytest.MonkeyPatch.context() as patch:
        expect(root, patch)
        changes = {"data_dir": str(root), "compile": "off", "workers": 0, "precision": "float32"}
        yield train_tiny(place / "run", RECIPE, batch=4, train_limit=None, eval_limit=None, **changes)


@pytest.fixture(scope="module")
def site(run, tmp_path_factory):
    """A copy of the package with the weights of that run."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, place / "aaconv", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    (place / "aaconv" / "weights").mkdir()
    assert main(["export", str(run), "-o", str(place / f"aaconv/weights/{NAME}.safetensors"), "--device", "cpu"]) == 0
    return place


@pytest.fixture(scope="module")
def used(site):
    """What timm and the commands make of them, in a process of its own."""
    from PIL import Image

    Image.new("RGB", (70, 64), (90, 160, 40)).save(site / "photo.png")
    found = json.loads(run_fresh(SCRIPT, *COMMANDS, cwd=site, PYTHONPATH=str(site), OMP_NUM_THREADS="1"))
    assert Path(found["package"]).is_relative_to(site)
    return found


@pytest.fixture(scope="module")
def facts(site):
    return json.loads((site / f"aaconv/weights/{NAME}.json").read_text())


def test_timm_builds_the_network_of_the_run_and_its_logits(used, run, site):
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    files = str(site / f"aaconv/weights/{NAME}.safetensors"), None
    with torch.no_grad():
        stored, trained = (load_model(run, weights=file).model(x) for file in files)
    torch.testing.assert_close(torch.tensor(used["logits"]), stored, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored, trained, rtol=0.02, atol=0.02)  # stored in half precision


def test_the_name_with_its_tag_brings_classes_size_and_statistics(used, run):
    cfg, loaded = used["cfg"], load_model(run)
    assert (cfg["num_classes"], cfg["input_size"], cfg["crop_pct"]) == (3, [3, 64, 64], 1.0)
    assert (tuple(cfg["mean"]), tuple(cfg["std"])) == (loaded.mean, loaded.std)
    assert tuple(cfg["label_names"]) == tuple(sorted(WNIDS))
    assert cfg["pool_size"] is None
    assert used["reduction"] == [2, 2, 4, 8, 16]
    assert used["untrained"] == "Sequential"  # the tag names the network, trained or not
    assert used["seven"] == [7, 512]


def test_the_name_alone_stays_what_it_was(used):
    assert used["listed"] == [NAME]
    assert used["alone"] == [1000, [3, 224, 224], "MaxPool2d"]
    assert "No pretrained weights exist for aa_resnet18" in used["alone pretrained"]


def test_keywords_that_the_weights_were_not_trained_with_are_refused(used):
    assert used["same"] is None
    assert used["conflict"] == (
        f"the weights {NAME} are of a network with stem_pool=False, got stem_pool=True; leave it out, or build "
        "aa_resnet18 without these weights"
    )
    (one, _), (other, _) = used["tables"]
    assert one < other  # tables fit any size


def test_a_run_that_starts_from_them_is_built_alike_by_timm(used):
    assert used["config"] == OWN


def test_with_attention_added_they_are_saved_and_loaded(used):
    torch.testing.assert_close(torch.tensor(used["saved logits"]), torch.tensor(used["logits"]), rtol=1e-4, atol=1e-4)


def test_the_commands_name_the_weights_with_their_tag(used, facts):
    code, out, _ = used["commands"]["models resnet18"]
    assert code == 0
    assert f"pretrained: {NAME} on tiny-imagenet: top-1 {facts['top1']:.2f} %, top-5 " in out
    assert used["commands"][COMMANDS[1]][0] == 0
    code, _, err = used["commands"][COMMANDS[2]]
    assert (code, "aa_resnet18 has no pretrained weights" in err, f"(these have: {NAME})" in err) == (2, True, True)


@pytest.mark.slow
def test_the_description_has_the_options_and_the_size_the_file(site, facts):
    file = site / f"aaconv/weights/{NAME}.safetensors"
    assert facts["options"] == OWN
    assert (facts["architecture"], facts["input_size"], facts["dtype"]) == ("aa_resnet18", [3, 64, 64], "float16")
    assert (facts["recipe"], facts["images"], facts["weights"]) == (RECIPE, 6, "last")
    assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert 20e6 < file.stat().st_size < 25e6


@pytest.mark.slow
def test_the_card_lies_beside_and_its_usage_works(site, facts):
    text = (site / f"aaconv/weights/{NAME}.md").read_text(encoding="utf-8")
    assert text == shipped_card(NAME, facts)
    head, _, body = text.removeprefix("---\n").partition("---\n")
    (result,) = yaml.safe_load(head)["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "accuracy", "name": "top-1 (%)", "value": round(facts["top1"], 4)}
    assert f"| top-1 | {facts['top1']:.2f} |" in body
    assert "- **Model:** aa_resnet18, stem_pool=False" in body
    assert f"{RECIPE}, seed 0, 1 epochs" in body
    assert "on all 6 test images of tiny-imagenet" in body
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    name, _, probability = run_fresh(program, cwd=site, PYTHONPATH=str(site)).strip().rpartition(" ")
    assert name in WNIDS
    assert 1 / 3 <= float(probability) <= 1


@pytest.mark.slow
def test_matrices_in_bfloat16_if_asked_for(run, tmp_path):
    file = tmp_path / f"{NAME}.safetensors"
    assert main(["export", str(run), "-o", str(file), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert {one.dtype for one in load_file(file).values() if one.dim() > 1} == {torch.bfloat16}
    assert json.loads(file.with_suffix(".json").read_text())["dtype"] == "bfloat16"
    assert "matrices in bfloat16" in file.with_suffix(".md").read_text(encoding="utf-8")


# Without a run


@pytest.fixture
def described(monkeypatch):
    """Files called own are of a network with options."""
    monkeypatch.setattr(family, "options_of", lambda cfg: OWN if "own" in cfg.get("file", "") else {})


def test_the_name_alone_stands_for_weights_without_options_only(described, monkeypatch):
    names = "a.own", "b.usual", "c.own", "c.usual"
    monkeypatch.setattr(family, "shipped", lambda: {name: {"file": name} for name in names})
    found = family.imagenet_cfgs(["a", "b", "c", "d"])
    assert {name: list(one.tags) for name, one in found.items()} == {
        "a": ["", "own"],
        "b": ["usual"],
        "c": ["usual", "own"],
        "d": [""],
    }
    assert found["a"].default.input_size == (3, 224, 224)
    assert not found["a"].default.has_weights


@pytest.mark.parametrize("given", [{}, {"stem_pool": False}, {"img_size": 96}, {"drop_rate": 0.5}])
def test_keywords_are_added_to_the_callers(given, described):
    model = create_model("aa_resnet18", pretrained_cfg={"file": "aa_resnet18.own.safetensors"}, **given)
    assert isinstance(model.maxpool, torch.nn.Sequential)
    height = given.get("img_size", 64) // 4
    assert model.layer2[0].conv1.size == (height, height)


def test_lists_and_tuples_are_the_same_keyword(monkeypatch):
    monkeypatch.setattr(family, "options_of", lambda cfg: {"num_heads": [1, 2, 4, 8]})
    assert create_model("aa_resnet18", num_heads=(1, 2, 4, 8))
    with pytest.raises(ValueError, match=r"network with num_heads=\[1, 2, 4, 8\], got num_heads=4; leave it out"):
        create_model("aa_resnet18", num_heads=4, pretrained_cfg={"file": "aa_resnet18.own.safetensors"})


def test_only_our_own_weights_bring_keywords():
    for name in ("local-dir:run", "resnet18.a1_in1k", "resnet18", *list_models("aa_wrn16_4"), "aa_wrn16_4.cifar100"):
        assert options_of_name(name) == {}


def test_options_that_are_none_cost_only_their_weights(tmp_path, caplog):
    own = weights.read_facts(Path(weights.shipped()["aa_wrn16_4.cifar100"]["file"]))
    (tmp_path / "aa_wrn16_4.tag.safetensors").touch()
    (tmp_path / "aa_wrn16_4.tag.json").write_text(json.dumps(own | {"options": ["stem_pool"]}))
    assert weights.shipped(tmp_path) == {}
    assert "options must be a mapping, got ['stem_pool']" in caplog.text


def test_a_card_is_written_without_a_commit():
    own = weights.read_facts(Path(weights.shipped()["aa_wrn16_4.cifar100"]["file"]))
    assert "- **Commit:** unknown" in shipped_card("aa_wrn16_4.cifar100", own | {"commit": None})


@pytest.mark.parametrize("name", ["resnet18", "augmented", "local-dir:net"])
def test_networks_that_are_not_ours_are_not_shipped(name, tmp_path):
    loaded = TrainedModel.of(create_model("plain_small"))
    recipe = replace(recipes.get("demo-plain"), model=recipes.Model(name))
    with pytest.raises(ValueError, match=f"{name} is not a registered model of ours"):
        _check(replace(loaded, recipe=recipe), tmp_path / f"{name}.shapes.safetensors")
