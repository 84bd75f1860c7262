"""From pretrained weights to an adapted network: what is trained how fast, what stays, and when it ends."""

from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from torch import nn

from aaconv import augment, cli
from aaconv.export.model_card import card_text
from aaconv.layers import attention_parameters
from aaconv.layers.last_stage import last_stage
from aaconv.recipes.pretrained import Start, start_from
from aaconv.recipes.recipe import Model
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_metrics
from aaconv.tasks.task import create_task
from aaconv.training.finetune import LAST_STAGE, finetune_recipe
from aaconv.training.learner import Learner
from aaconv.training.optimize import make_optimizer, make_schedule, rate_of
from aaconv.training.running_sums import RunningSums
from aaconv.training.trainer import Stopped, Trainer, resume
from aaconv.training.trainer import train as train_recipe
from aaconv.utils import hub_access
from aaconv.utils.distributed import World
from aaconv.utils.weights_folder import short_sha256
from support.training_runs import tiny

FEW = {"num_heads": 2, "key_channels": 8, "value_channels": 4, "combine": "add"}
SMALL = "test_resnet"  # timm's own, for tests


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a network of another number of classes."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / f"{SMALL}.safetensors"
    safetensors.torch.save_file(timm.create_model(SMALL).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes, 20 images each: dark and light ones."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    generator = torch.Generator().manual_seed(0)
    for name, light in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            pixels = (light + torch.randint(-30, 30, (40, 40, 3), generator=generator)).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def network():
    return augment(timm.create_model(SMALL, num_classes=3), 64, where="layer4.*.conv1", **FEW)[0]


def rates(model, **fields):
    recipe = tiny(lr=1.0, warmup=0.0, weight_decay=0.1, **fields)
    optimizer = make_optimizer(recipe, model)
    make_schedule(recipe, optimizer, 10).step_update(0)
    assert rate_of(optimizer) == pytest.approx(1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_backbone_head_and_attention_have_rates_of_their_own(network):
    found = rates(network, lr_backbone=0.1, lr_attention=3.0)
    attention = attention_parameters(network)
    assert len(attention) == 5 * sum("gate" in name for name in attention)
    for name, (rate, _) in found.items():
        assert rate == pytest.approx(3.0 if name in attention else 1.0 if name.startswith("fc.") else 0.1), name


def test_the_rate_decays_layer_by_layer_towards_the_input(network):
    found = {name: rate for name, (rate, _) in rates(network, layer_decay=0.5, lr_attention=2.0).items()}
    assert found["fc.weight"] == 1.0
    assert found["conv1.0.weight"] < found["layer1.0.conv1.weight"] < found["layer4.0.conv1.conv.weight"] < 1
    assert found["layer4.0.conv1.gate"] == 2.0
    with pytest.raises(ValueError, match="layer_decay needs a network that knows its layers"):
        make_optimizer(tiny(layer_decay=0.5), nn.Sequential(nn.Linear(2, 2)))


def test_only_matrices_decay_where_that_is_asked_for(network):
    found = rates(network, decay="matrices")
    for name, parameter in network.named_parameters():
        expected = 0.1 if parameter.dim() > 1 and not name.endswith(("rel_h", "rel_w")) else 0.0
        assert found[name][1] == expected, name


def test_the_backbone_stays_as_it_is_while_it_is_frozen(weights):
    start = Start(str(weights), "layer4.*.conv1", {key: value for key, value in FEW.items() if key != "combine"})
    recipe = tiny(
        model=start_from(Model(SMALL), start),
        freeze_epochs=1,
        head="zero",
        normalize="model",
        batch=8,
        train_limit=16,
        eval_limit=8,
        optimizer="adamw",
        lr=1e-2,
        weight_decay=0.1,
        warmup=0.0,
    )
    task = create_task(recipe)
    learner = Learner(recipe, task, World(torch.device("cpu")), 2)
    head = learner.model.get_classifier()
    assert not head.weight.any()
    train, _ = task.loaders(8, learner.world)
    trained = attention_parameters(learner.model) | {"fc.weight", "fc.bias"}
    for epoch in range(2):
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        learner.begin_epoch(epoch)
        batches = train.batches(epoch)
        for step, batch in enumerate(batches):
            learner.take_step(2 * epoch + step, batch, batches, RunningSums(task.running, torch.device("cpu")))
        changed = {name for name, value in learner.model.state_dict().items() if not torch.equal(value, before[name])}
        if epoch == 0:
            assert changed <= trained
            assert "fc.weight" in changed
        else:
            assert {"conv1.0.weight", "bn1.running_mean", "layer4.0.conv1.gate"} <= changed


def test_one_class_is_nothing_to_learn(weights, photos, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dark").symlink_to(photos / "dark")
    with pytest.raises(ValueError, match=r"has one class, dark: at least two"):
        finetune_recipe(str(weights), str(tmp_path), Start(where=LAST_STAGE))


def test_weights_of_a_file_are_what_training_starts_from(weights, photos):
    recipe = finetune_recipe(str(weights), str(photos), Start(where=LAST_STAGE), {"size": 64})
    assert recipe.model.options["pretrained_cfg_overlay"] == {"file": str(weights), "sha256": short_sha256(weights)}
    task = create_task(recipe)
    model, original = task.build(task.data_info(), start=True), safetensors.torch.load_file(weights)
    own = {name.replace(".conv.weight", ".weight"): value for name, value in model.state_dict().items()}
    kept = [name for name in original if not name.startswith("fc.")]
    assert all(torch.equal(own[name], original[name]) for name in kept)
    assert model.get_classifier().out_features == 2
    assert "state_dict" not in model.pretrained_cfg
    assert task.data_info().mean == tuple(timm.get_pretrained_cfg(SMALL).mean)
    # What was trained is built again without the file.
    assert list(task.build(task.data_info()).state_dict()) == list(model.state_dict())


def test_attention_goes_into_the_last_stage_unless_told():
    model = timm.create_model("tf_efficientnet_lite0")
    assert last_stage(model, 224) == [f"blocks.5.{i}.conv_dw" for i in range(4)] + ["blocks.6.0.conv_dw"]
    assert last_stage(timm.create_model("resnet18"), 64)[0].startswith("layer4.0.conv1")
    with pytest.raises(ValueError, match="no convolution with a window"):
        last_stage(nn.Sequential(nn.Conv2d(3, 4, 1)), 8)


def test_a_run_stops_when_nothing_gets_better(tmp_path, monkeypatch):
    recipe = tiny(epochs=9, patience=2)
    values = iter([10.0, 30.0, 20.0, 30.0, 50.0])
    monkeypatch.setattr(Trainer, "_evaluate", lambda self: {"loss": 1.0, "top1": next(values), "top5": 100.0})
    summary = train_recipe(recipe, tmp_path / "run", device="cpu")
    assert summary["epochs"] == 4
    assert summary["best"]["epoch"] == 2
    assert summary["finished"]
    assert [row["top1"] for row in read_metrics(tmp_path / "run")] == [10.0, 30.0, 20.0, 30.0]
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_command_writes_network_report_page_and_onnx(weights, photos, tmp_path, capsys):
    run = tmp_path / "run"
    words = [*("finetune", str(weights), str(photos), "--run", str(run), "--epochs", "2", "--size", "64")]
    words += ["--device", "cpu", "--workers", "0", "--augment.num-heads", "2", "--augment.qk-norm", "true"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    for name in ("report.html", "explore.html", "model-best.safetensors", "summary.json"):
        assert (run / name).is_file(), name
    assert (run / "model.onnx").is_file() or "no model.onnx: it needs" in printed
    assert "there are no test images" in printed
    loaded = load_model(run, weights="best")
    assert loaded.classes == ("dark", "light")
    assert all(module.temperature is not None for module in loaded.model.modules() if hasattr(module, "temperature"))
    assert str(weights.parent) not in card_text(loaded, "owner/name")
    again = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(x), load_model(run, weights="last").model(x))
    assert torch.equal(load_model(run).model(x), loaded.model(x))  # what was evaluated and exported


def test_a_run_that_may_stop_early_hands_out_its_best_epoch(tmp_path, monkeypatch):
    values = {"patience": iter([10.0, 30.0, 20.0]), "none": iter([10.0, 30.0, 20.0])}
    for name, patience in (("patience", 1), ("none", None)):
        monkeypatch.setattr(
            Trainer, "_evaluate", lambda self, name=name: {"loss": 1.0, "top1": next(values[name]), "top5": 100.0}
        )
        train_recipe(tiny(epochs=3, patience=patience, ema=0.5), tmp_path / name, device="cpu")

    def same(run, which):
        one, other = load_model(run).model.state_dict(), load_model(run, weights=which).model.state_dict()
        return all(torch.equal(one[key], other[key]) for key in one)

    assert same(tmp_path / "patience", "best")
    assert not same(tmp_path / "patience", "ema")
    assert load_model(tmp_path / "patience").metrics["top1"] == 30.0
    assert same(tmp_path / "none", "ema")
    assert load_model(tmp_path / "none").metrics["top1"] == 20.0


def test_train_takes_a_network_and_data_without_a_recipe(weights, photos, capsys):
    words = ["train", "--model", SMALL, "--data", str(photos), "--pretrained", str(weights), "--dry-run"]
    assert cli.main([*words, "--augment", "layer4.*.conv2", "--epochs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "where: layer4.*.conv2" in printed
    assert f"file: {weights}" in printed
    assert "epochs: 3" in printed
    assert cli.main(["train", "demo-plain", "--model", SMALL, "--augment", "layer4.*.conv1", "--dry-run"]) == 0
    assert f"base: {SMALL}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet1", "DATA"], "unknown model 'resnet1'; did you mean"),
        (["nowhere/resnet18.safetensors", "DATA"], "there is no file nowhere/resnet18.safetensors with weights"),
        (["FILE", "nowhere"], "unknown data set or folder 'nowhere'"),
        ([SMALL, "DATA", "--pretrained", "gone.safetensors"], "there is no file gone.safetensors with weights"),
        ([SMALL, "DATA", "--scratch", "--pretrained"], "leave out one"),
        (["FILE", "DATA", "--augment", "layer9.*"], "matches none of the"),
        (["FILE", "DATA", "--augment", "none", "--augment.num-heads", "4"], "need --augment WHERE"),
        (["FILE", "DATA", "--augment.heads", "4"], "augment takes no option 'heads'; nearest: num_heads"),
        (["FILE", "DATA", "--auto-augment", "randaugmet"], "did you mean 'randaugment'?"),
        (["FILE", "DATA", "--track", "mlflow"], "unknown tracker 'mlflow'"),
    ],
)
def test_mistakes_are_one_line(words, message, weights, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [{"FILE": str(weights), "DATA": str(photos)}.get(word, word) for word in words]
    try:
        code = cli.main(["finetune", *words, "--size", "64", "--device", "cpu", "--workers", "0"])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_network_and_weights_the_message_says_where_to_put_them(photos, tmp_path, monkeypatch, capsys, weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AACONV_WEIGHTS", str(tmp_path / "weights"))
    words = ["finetune", "resnet18", str(photos), "--device", "cpu", "--size", "64", "--workers", "0"]
    assert cli.main(words) == 2
    place = tmp_path / "weights" / "resnet18.safetensors"
    assert (
        f"put a file of them at {place} and start again, or name one with --pretrained FILE" in capsys.readouterr().err
    )
    place.parent.mkdir()
    place.write_bytes(b"")
    recipe = finetune_recipe("resnet18", str(photos), Start(pretrained=True), {"size": 64})
    assert recipe.model.options["pretrained_cfg_overlay"] == {"file": str(place), "sha256": short_sha256(place)}


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(weights, photos, tmp_path, monkeypatch):
    """With every kind of augmentation, stopped in the middle of an epoch."""
    changes = {"size": 64, "epochs": 2, "batch": 8, "auto_augment": "rand-m9-mstd0.5", "random_erasing": 0.5}
    changes |= {"mixup": 0.5, "cutmix": 1.0, "repeats": 2, "workers": 0, "checkpoint_every": 1, "keep": 10}
    recipe = finetune_recipe(str(weights), str(photos), Start(where=LAST_STAGE), changes, device="cpu")
    recipe = replace(recipe, model=replace(recipe.model, options=recipe.model.options | {"drop_path_rate": 0.2}))
    whole = train_recipe(recipe, tmp_path / "whole", device="cpu")

    class Enough(Exception):
        pass

    taken, take = [], Learner.take_step

    def stopping(self, *arguments):
        if len(taken) == 5:
            raise Enough
        taken.append(1)
        take(self, *arguments)

    monkeypatch.setattr(Learner, "take_step", stopping)
    with pytest.raises(Enough):
        train_recipe(recipe, tmp_path / "stopped", device="cpu")
    monkeypatch.setattr(Learner, "take_step", take)
    again = resume(tmp_path / "stopped", device="cpu")
    assert again["loss"] == whole["loss"]
    for name in ("model", "model-ema"):
        first, second = (
            safetensors.torch.load_file(tmp_path / run / f"{name}.safetensors") for run in ("whole", "stopped")
        )
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_stopped_run_says_how_to_get_its_pages(weights, photos, tmp_path, capsys, monkeypatch):
    def stop(run, recipe, **how):
        raise Stopped(2, "stopped")

    monkeypatch.setattr("aaconv.training.launch.start", stop)
    words = ["finetune", str(weights), str(photos), "--run", str(tmp_path / "run"), "--device", "cpu"]
    with pytest.raises(Stopped):
        cli.main(words)
    assert f"aaconv finetune --resume {tmp_path / 'run'}" in capsys.readouterr().err
    with pytest.raises(Stopped):
        cli.main([*words, "--no-pages"])
    assert "--resume" not in capsys.readouterr().err
