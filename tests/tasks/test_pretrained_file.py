"""A network starts from all that a file of weights should have, or not at all."""

import re
from dataclasses import replace

import pytest
import safetensors.torch
import timm
import torch

from aaconv import cli, recipes
from aaconv.models import create_model
from aaconv.recipes.pretrained import Start, start_from
from aaconv.recipes.recipe import Model
from aaconv.tasks.task import DataInfo, create_task
from support.places import SHARED_DATA

LITE0 = SHARED_DATA / "pretrained" / "tf_efficientnet_lite0.safetensors"
SMALL = "test_efficientnet"
DETECTOR = {"channels": 16, "head_depth": 1, "pretrained": True}
FEW = {"where": "blocks.4.0.conv_pw", "num_heads": 2, "key_channels": 8, "value_channels": 4}


def info(size=64, classes=7):
    return DataInfo(tuple(map(str, range(classes))), (0.5,) * 3, (0.5,) * 3, size)


def started(model, file, task="classify", **about):
    recipe = recipes.get("demo-plain" if task == "classify" else "detection-demo")
    recipe = replace(recipe, model=start_from(model, Start(str(file))))
    return create_task(recipe).build(info(**about), start=True)


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")

    def saved(tensors, name="weights"):
        file = folder / f"{name}.safetensors"
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
        return file

    return saved


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(1)
    return timm.create_model(SMALL).state_dict()


def around(kind, **augmentation):
    """Networks that are built around SMALL: plain, with attention, and detectors on either."""
    augmentations = [FEW | augmentation] if augmentation else []
    if kind == "detect":
        return Model("augmented_retinanet", DETECTOR | {"backbone": SMALL, "augmentations": augmentations})
    return Model("augmented", {"base": SMALL, "augmentations": augmentations, "pretrained": True})


KINDS = [("classify", around("classify")), ("detect", around("detect")), ("classify", Model(SMALL))]
KINDS += [(task, around(task, combine="add")) for task in ("classify", "detect")]
WRONG = {
    "another network's": (lambda whole: {"a": torch.zeros(1)}, "it has 0 of the"),
    "a prefix": (lambda whole: {f"model.{name}": value for name, value in whole.items()}, "it has 0 of the"),
    "no last stage": (lambda whole: {n: v for n, v in whole.items() if "blocks.4." not in n}, "not blocks.4."),
    "one missing": (
        lambda whole: {n: v for n, v in whole.items() if n != "blocks.4.0.conv_pw.weight"},
        "not blocks.4.0.conv_pw.weight",
    ),
    "no statistics": (lambda whole: {n: v for n, v in whole.items() if "running" not in n}, "not bn1.running_mean"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("task", "model"), KINDS)
def test_a_file_that_lacks_something_is_refused(task, model, wrong, whole, save):
    change, message = WRONG[wrong]
    file = save(change(whole), "wrong")
    with pytest.raises(ValueError, match="does not fit") as found:
        started(model, file, task)
    text = str(found.value)
    assert text.startswith(f"{file} does not fit {SMALL}: it has ")
    assert message in text
    assert "name a file of test_efficientnet's own weights with --pretrained FILE" in text
    assert "\n" not in text


@pytest.mark.parametrize("head", ["as it is", "another", "none"])
@pytest.mark.parametrize(("task", "model"), KINDS)
def test_only_the_head_may_differ(task, model, head, whole, save):
    tensors = {name: value for name, value in whole.items() if head == "as it is" or "classifier" not in name}
    if head == "another":
        tensors |= {"classifier.weight": torch.zeros(3, 256), "classifier.bias": torch.zeros(3)}
    network = started(model, save(tensors, "right"), task)
    assert torch.equal(getattr(network, "backbone", network).conv_stem.weight, whole["conv_stem.weight"])


def test_a_detector_needs_nothing_behind_its_features(whole, save):
    tensors = {name: value for name, value in whole.items() if name.startswith(("conv_stem", "bn1", "blocks"))}
    started(around("detect"), save(tensors, "features"), "detect")
    with pytest.raises(ValueError, match=r"not conv_head\.weight"):
        started(around("classify"), save(tensors, "features"))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "test_byobnet", "convnext_atto"])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_of_timm_start_from_their_files(name, channels, save):
    file = save(timm.create_model(name).state_dict(), name)
    started(Model(name, {"in_chans": channels}), file, size=160)
    if name != "test_vit":
        options = DETECTOR | {"backbone": name, "in_chans": channels, "img_size": 64}
        started(Model("augmented_retinanet", options), file, "detect")


def test_names_that_timm_translates_are_taken(save):
    """As ConvNeXt's authors wrote them."""
    own = timm.create_model("convnext_atto").state_dict()
    words = {"stem.": "downsample_layers.0.", "conv_dw": "dwconv", "mlp.fc1": "pwconv1", "mlp.fc2": "pwconv2"}
    theirs = {}
    for name, value in own.items():
        for ours, other in words.items():
            name = name.replace(ours, other)
        parts = name.split(".")
        if parts[0] == "stages":
            name = (
                f"downsample_layers.{'.'.join(parts[1:2] + parts[3:])}"
                if parts[2] == "downsample"
                else f"stages.{parts[1]}.{'.'.join(parts[3:])}"
            )
        theirs[name.replace("head.norm", "norm").replace("head.fc", "head")] = value
    network = started(Model("convnext_atto"), save(theirs, "theirs"))
    assert torch.equal(network.stem[0].weight, own["stem.0.weight"])
    assert torch.equal(network.stages[3].blocks[1].mlp.fc1.weight, own["stages.3.blocks.1.mlp.fc1.weight"])


def test_a_vision_transformer_may_average_where_its_file_does_not(save):
    file = save(timm.create_model("test_vit", global_pool="token").state_dict(), "token")
    started(Model("test_vit", {"global_pool": "avg"}), file, size=160)


@pytest.mark.parametrize("name", ["aa_small", "plain_small"])
def test_our_own_networks_start_from_the_files_of_runs(name, save):
    tensors = create_model(name, img_size=32, num_classes=3).state_dict()
    network = started(Model(name), save(tensors, "run"), size=32)
    weight = next(key for key in tensors if key.endswith("weight"))
    assert torch.equal(network.state_dict()[weight], tensors[weight])


def test_a_file_with_tensors_of_another_size_is_refused(save, whole):
    name = next(name for name, tensor in whole.items() if tensor.dim() == 4)
    file = save(whole | {name: whole[name][1:]}, "other")
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} does not fit {SMALL}: .*size mismatch for {name}"):
        started(Model(SMALL), file)


def test_a_file_without_tensors_is_refused(save):
    with pytest.raises(ValueError, match="holds no tensors; name another file with --pretrained FILE"):
        started(around("classify"), save({}, "empty"))


def test_a_network_of_torchvisions_takes_no_file(whole, save):
    with pytest.raises(ValueError, match="torchvision/resnet18 takes no file of weights"):
        started(Model("augmented", {"base": "torchvision/resnet18"}), save(whole))


def test_the_command_says_it_in_one_line(save, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = save({"a": torch.zeros(1)}, "other")
    words = ["train", "demo-plain", "--model", "augmented", "--model.base", SMALL, "--pretrained", str(file)]
    assert cli.main([*words, "--device", "cpu", "--workers", "0", "--run", "run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{file} does not fit {SMALL}: it has 0 of the" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not LITE0.is_file(), reason=f"no weights in {LITE0}")
@pytest.mark.parametrize("name", ["cifar100-lite0-plain", "cifar100-lite0-aa-concat", "coco-small-lite0-aa"])
def test_the_weights_of_the_catalogues_recipes_fit(name):
    recipe = recipes.get(name)
    recipe = replace(recipe, model=start_from(recipe.model, Start(str(LITE0))))
    network = create_task(recipe).build(info(128), start=True)
    stem = safetensors.torch.load_file(LITE0)["conv_stem.weight"]
    assert torch.equal(getattr(network, "backbone", network).conv_stem.weight, stem)


@pytest.mark.skipif(not LITE0.is_file(), reason=f"no weights in {LITE0}")
def test_the_weights_of_another_architecture_do_not():
    with pytest.raises(ValueError, match="does not fit vit_tiny_patch16_224: it has 0 of the 150 tensors"):
        started(Model("augmented", {"base": "vit_tiny_patch16_224"}), LITE0)
