"""A detector on a pretrained backbone: what learns how fast, what stays frozen, and a run from weights to boxes."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants

from aaconv import cli, recipes
from aaconv.detection.coco_results import METRICS, scorer
from aaconv.inference.evaluate_detector import evaluate_run
from aaconv.layers import attention_parameters
from aaconv.recipes import Model
from aaconv.recipes.pretrained import Start, start_from
from aaconv.runs.load import load_model
from aaconv.runs.record import record_result
from aaconv.runs.results import read
from aaconv.runs.run_folder import read_metrics, read_summary
from aaconv.tasks.task import create_task
from aaconv.training import parameter_groups
from aaconv.training.learner import Learner
from aaconv.training.running_sums import RunningSums
from aaconv.training.trainer import resume, train
from aaconv.utils import hub_access
from aaconv.utils.weights_folder import short_sha256
from support.detection_runs import CPU, tiny_recipe
from support.places import SHARED_DATA
from support.training_runs import outcome

BACKBONE, WHERE = "test_resnet", "layer4.0.conv2"
OPTIONS = {"backbone": BACKBONE, "pretrained": True, "channels": 16, "head_depth": 1, "anchor_scale": 2.0}
FEW = {"where": WHERE, "combine": "add", "qk_norm": True, "num_heads": 2, "key_channels": 8, "value_channels": 4}
LITE0 = SHARED_DATA / "pretrained" / "tf_efficientnet_lite0.safetensors"
COCO_SMALL = SHARED_DATA / "coco-small"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a classifier, with batch norm statistics of their own."""
    torch.manual_seed(0)
    model = timm.create_model(BACKBONE, zero_init_last=False)  # gradients reach all of it
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
    file = tmp_path_factory.mktemp("weights") / f"{BACKBONE}.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def recipe(coco_folder, weights):
    """Two epochs of two steps, fine-tuned as the recipes of the catalogue are."""
    model = start_from(Model("augmented_retinanet", OPTIONS | {"augmentations": [FEW]}), Start(str(weights)))
    fields = ("optimizer", "lr", "lr_backbone", "weight_decay", "decay", "clip_grad", "normalize")
    usual = recipes.get("coco-small-lite0-aa")
    return tiny_recipe(
        coco_folder,
        model=model,
        epochs=2,
        checkpoint_every=1,
        keep=10,
        warmup=0.0,
        **{name: getattr(usual, name) for name in fields},
    )


def network(recipe, start=False):
    task = create_task(recipe)
    return task.build(task.data_info(), start=start)


def factors(recipe, model):
    """Name of a parameter -> (factor of its learning rate, whether it decays)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups.parameter_groups(recipe, model)
    return {names[id(p)]: (g["lr_scale"], "weight_decay" not in g) for g in groups for p in g["params"]}


def test_the_backbone_alone_learns_slowly_and_matrices_alone_decay(recipe):
    model = network(recipe)
    attention, left_out = attention_parameters(model), model.no_weight_decay()
    found = factors(replace(recipe, lr_backbone=0.1, lr_attention=3.0), model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, (factor, decays) in found.items():
        assert factor == (3.0 if name in attention else 0.1 if name.startswith("backbone.") else 1.0), name
        assert decays == (model.get_parameter(name).dim() > 1 and name not in left_out), name


@pytest.mark.parametrize(
    ("backbone", "order"),
    [
        ("resnet18", ["conv1.weight", "layer1.0.conv1.weight", "layer3.1.conv2.weight", "layer4.0.conv1.weight"]),
        ("test_efficientnet", ["conv_stem.weight", "blocks.1.0.conv_exp.weight", "blocks.4.0.conv_pw.weight"]),
        ("convnext_atto", ["stem_0.weight", "stages_0.blocks.0.conv_dw.weight", "stages_3.blocks.1.conv_dw.weight"]),
    ],
)
def test_the_rate_decays_stage_by_stage_towards_the_input(recipe, backbone, order):
    options = {name: value for name, value in OPTIONS.items() if name not in ("backbone", "pretrained")}
    recipe = replace(recipe, model=Model("augmented_retinanet", options | {"backbone": backbone}))
    found = factors(replace(recipe, layer_decay=0.5, lr_backbone=1.0), network(recipe))
    rates = [found[f"backbone.{name}"][0] for name in order]
    assert rates == sorted(set(rates))
    assert rates[-1] < found["pyramid.fpn.inner_blocks.0.0.weight"][0] == 1.0


def test_a_frozen_backbone_stays_and_all_that_is_new_learns(recipe):
    recipe = replace(recipe, freeze_epochs=1)
    task = create_task(recipe)
    learner = Learner(recipe, task, CPU, 2)
    batches = task.loaders(recipe.batch, CPU)[0]
    changed = []
    for epoch in range(2):
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        learner.begin_epoch(epoch)
        epochs_batches = batches.batches(epoch)
        for step, batch in enumerate(epochs_batches):
            learner.take_step(2 * epoch + step, batch, epochs_batches, RunningSums(task.running, CPU.device))
        after = learner.model.state_dict()
        changed.append({name for name, value in after.items() if not torch.equal(value, before[name])})
    old = {name for name in changed[0] if name.startswith("backbone.")}
    assert old <= attention_parameters(learner.model)
    assert f"backbone.{WHERE}.gate" in old
    new = {"pyramid.fpn.inner_blocks.0.0.weight", "class_head.convs.0.weight", "box_head.predict.bias"}
    assert new | {"pyramid.norms.0.running_mean", "class_head.norms.0.0.running_var"} <= changed[0]
    assert {"backbone.conv1.0.weight", "backbone.bn1.running_mean"} <= changed[1]


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(replace(recipe, ema=0.5), folder, device="cpu")
    return folder


def test_nothing_is_said_of_the_head_that_a_detector_has_no_place_for(recipe, tmp_path, caplog):
    name, file = "test_efficientnet", tmp_path / "test_efficientnet.safetensors"
    state = timm.create_model(name).state_dict()
    safetensors.torch.save_file(state, file)
    model = start_from(Model("augmented_retinanet", OPTIONS | {"backbone": name}), Start(str(file)))
    network(replace(recipe, model=model), start=True)
    assert "Unexpected keys" not in caplog.text
    timm.create_model(name, pretrained=True, features_only=True, pretrained_cfg_overlay={"state_dict": state})
    assert "Unexpected keys" in caplog.text  # timm says it of its own networks, still


def test_training_starts_from_the_weights_of_the_file(recipe, weights):
    backbone = network(recipe, start=True).backbone
    assert "state_dict" not in backbone.pretrained_cfg
    own = backbone.state_dict()
    there = safetensors.torch.load_file(weights)
    own = {name.replace(f"{WHERE}.conv.", f"{WHERE}."): value for name, value in own.items()}
    kept = own.keys() & there.keys()
    assert len(kept) == len(own) - 6  # qkv, project, two tables, gate and temperature
    assert all(torch.equal(own[name], there[name]) for name in kept)


def test_images_are_normalised_as_the_weights_know_them(run, recipe):
    known = json.loads((run / "config.json").read_text())["pretrained_cfg"]
    assert (known["mean"], known["std"]) == ([0.5] * 3, [0.5] * 3)
    task = create_task(recipe)
    assert [tuple(loader.dataset.mean) for loader in task.loaders(5, CPU)] == [(0.5,) * 3] * 2
    assert replace(recipe, normalize="data") != recipe
    assert create_task(replace(recipe, normalize="data")).data_info().mean != (0.5,) * 3


def test_the_run_is_loaded_again_without_the_file(run, weights, monkeypatch):
    monkeypatch.setattr("aaconv.tasks.pretrained_file.read_weights", None)  # whoever reads it, fails
    loaded = load_model(run, weights="last")
    again = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert all(map(torch.equal, again(images), loaded.model(images)))
    assert (loaded.task, loaded.mean, loaded.recipe.model.base) == ("detect", (0.5,) * 3, BACKBONE)
    other = timm.create_model(f"local-dir:{run}", pretrained=True, num_classes=7).eval()
    assert other(images)[0].shape[-1] == 7
    assert torch.equal(other(images)[1], again(images)[1])


def test_an_evaluation_gives_the_figures_of_the_run(run):
    """With the averaged weights, and images normalised as in training."""
    found, last = evaluate_run(load_model(run)), read_metrics(run)[-1]
    assert all(found[name] == pytest.approx(last[name]) for name in ("loss", "class_loss", "box_loss"))
    assert METRICS[3:] == ("mAP_small", "mAP_medium", "mAP_large")
    assert set(METRICS) <= read_summary(run).keys()
    if scorer() is not None:
        assert found["mAP"] == pytest.approx(last["mAP"])


def test_a_resumed_run_is_the_same_to_the_bit(run, recipe, tmp_path, monkeypatch):
    taken, take = [], Learner.take_step

    def stopping(self, *arguments):
        if len(taken) == 3:
            raise InterruptedError
        taken.append(1)
        take(self, *arguments)

    monkeypatch.setattr(Learner, "take_step", stopping)
    with pytest.raises(InterruptedError):
        train(replace(recipe, ema=0.5), tmp_path / "stopped", device="cpu")
    monkeypatch.setattr(Learner, "take_step", take)
    monkeypatch.setattr("aaconv.tasks.pretrained_file.read_weights", None)  # the file may be gone
    resume(tmp_path / "stopped", device="cpu")
    assert outcome(tmp_path / "stopped") == outcome(run)


def test_a_record_says_nothing_of_this_machine_and_has_a_short_name(run, weights, tmp_path):
    path = record_result(run, tmp_path / "results")
    assert re.fullmatch(r"tiny-[0-9a-f]{6}-seed\d\.json", path.name)
    assert str(weights.parent) not in path.read_text()


@pytest.mark.parametrize("content", [{}, {"sha256": recipes.diff.USUAL_WEIGHTS["tf_efficientnet_lite0"]}])
def test_a_catalogues_recipe_is_the_same_experiment_wherever_its_weights_lie(content):
    """Runs from before their sha256 was kept have none."""
    usual = recipes.get("coco-small-lite0-plain")
    overlay = {"pretrained_cfg_overlay": {"file": "/home/me/weights.safetensors"} | content}
    changed = replace(usual, model=Model(usual.model.name, usual.model.options | overlay))
    assert recipes.diff.overrides_of(changed) == {}
    assert recipes.diff.experiment_key(changed) == recipes.diff.experiment_key(usual)


def test_runs_from_other_weights_are_other_experiments(tmp_path):
    usual = recipes.get("coco-small-lite0-plain")

    def started(place, content):
        (tmp_path / place).write_bytes(content)
        return replace(usual, model=start_from(usual.model, Start(str(tmp_path / place))))

    here, there, other = started("a.pth", b"1"), started("b.pth", b"1"), started("c.pth", b"2")
    keys = list(map(recipes.diff.experiment_key, (here, there, other, usual)))
    assert keys[0] == keys[1]
    assert len({*keys}) == 3
    assert str(tmp_path) not in keys[0]
    changes = recipes.diff.options_of(usual, recipes.diff.overrides_of(here))
    assert changes == [f"--pretrained sha256:{short_sha256(tmp_path / 'a.pth')}"]


def test_a_run_and_its_record_say_which_weights_it_started_from(run, weights, tmp_path):
    kept = {"sha256": short_sha256(weights)}
    assert read_summary(run)["options"]["pretrained_cfg_overlay"] == kept
    record_result(run, tmp_path)
    (record,) = read(tmp_path)
    assert record["options"]["pretrained_cfg_overlay"] == kept
    with pytest.raises(ValueError, match="name a file with --pretrained FILE"):
        network(replace(load_model(run).recipe, model=Model(record["model"], record["options"])), start=True)


def test_a_file_that_has_changed_since_is_refused(recipe, weights, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(weights.read_bytes())
    changed = replace(recipe, model=start_from(recipe.model, Start(str(other))))
    safetensors.torch.save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="is not what it was: its sha256 begins with"):
        network(changed, start=True)


@pytest.mark.skipif(not LITE0.is_file(), reason=f"no weights in {LITE0}")
def test_the_usual_weights_are_those_of_our_runs():
    assert {LITE0.stem: short_sha256(LITE0)} == recipes.diff.USUAL_WEIGHTS


def test_without_a_file_the_message_says_where_to_put_one(coco_folder, tmp_path, monkeypatch, capsys, weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AACONV_WEIGHTS", str(tmp_path / "weights"))
    words = ["train", "coco-small-lite0-plain", "--data", "coco", "--data-dir", str(coco_folder), "--device", "cpu"]
    words += ["--size", "32", "--epochs", "1", "--batch", "5", "--workers", "0", "--model.backbone", BACKBONE]
    assert cli.main([*words, "--run", "run"]) == 2
    place = tmp_path / "weights" / f"{BACKBONE}.safetensors"
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"put a file of them at {place} and start again, or name one with --pretrained FILE" in error
    place.parent.mkdir()
    place.write_bytes(weights.read_bytes())
    assert cli.main([*words, "--run", "run", "--model.channels", "16", "--model.head-depth", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "aa"])
def test_real_weights_and_images_from_the_command_to_boxes(kind, tmp_path, capsys):
    if not LITE0.is_file() or not (COCO_SMALL / "val.tar").is_file():
        pytest.skip(f"no weights in {LITE0}, or no COCO subset in {COCO_SMALL}")
    for part in ("train", "val"):
        subprocess.run(["tar", "xf", COCO_SMALL / f"{part}.tar", "-C", tmp_path], check=True)
    run, found = tmp_path / "run", tmp_path / "found"
    words = ["train", f"coco-small-lite0-{kind}", "--pretrained", str(LITE0), "--data-dir", str(tmp_path)]
    words += ["--train-limit", "16", "--eval-limit", "4", "--epochs", "1", "--batch", "8", "--workers", "0"]
    words += ["--model.channels", "16", "--model.head-depth", "1", "--device", "cpu", "--run", str(run)]
    assert cli.main(words) == 0
    assert load_model(run).mean == (0.5,) * 3
    assert cli.main(["eval", str(run), "--device", "cpu"]) == 0
    images = sorted(map(str, (tmp_path / "coco-small" / "val").iterdir()))[:2]
    assert cli.main(["detect", str(run), *images, "-o", str(found), "--device", "cpu"]) == 0
    assert "in 2 images" in capsys.readouterr().out
    assert len(list(found.glob("*.png"))) == 2
