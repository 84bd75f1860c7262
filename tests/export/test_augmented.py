"""Networks that augment has changed, saved and loaded: the same to the bit, with timm and without."""

import json
import re

import pytest
import timm
import torch
import torchvision
from torch import nn

import aaconv
from aaconv import augment, load_model, push_model, save_model
from aaconv.export import hub
from aaconv.layers.aaconv import AAConv2d
from support.random_network import randomize

FEW = {"num_heads": 2, "key_channels": 8, "value_channels": 4}


def trained(model):
    for module in model.modules():
        if isinstance(module, AAConv2d) and module.gate is not None:
            nn.init.normal_(module.gate)
    return randomize(model).eval()


def halvings(name, conv, size):
    return size[0] > 4


NETWORKS = {
    "timm": (lambda: timm.create_model("resnet10t", num_classes=5), {"where": re.compile(r"layer[34]\..*conv1")}, {}),
    "timm, one channel, concatenated": (
        lambda: timm.create_model("resnet10t", num_classes=4, in_chans=1),
        {"where": lambda name, conv: name == "layer4.0.conv1", "combine": "concat", "downsample": halvings},
        {},
    ),
    "timm with keywords": (
        lambda: timm.create_model("tf_efficientnet_lite0", num_classes=3, act_layer="silu"),
        {"where": "blocks.5.*.conv_dw", "qk_norm": True, "init": "paper"},
        {"options": {"act_layer": "silu"}},
    ),
    "torchvision": (
        lambda: torchvision.models.resnet18(num_classes=6),
        {"where": ["layer4.0.conv1", "layer4.1.conv2"]},
        {"base": "torchvision/resnet18", "options": {"num_classes": 6}},
    ),
    "ours, augmented further": (
        lambda: timm.create_model("aa_small", num_classes=2),
        {"where": "blocks.0.conv"},
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_folder_gives_the_network_back(name, tmp_path):
    build, how, known = NETWORKS[name]
    model = build()
    channels = 1 if "one channel" in name else 3
    model, _ = augment(model, (channels, 64, 48), **({"combine": "add"} | FEW | how))
    x = torch.randn(2, channels, 64, 48)
    expected = trained(model)(x)
    folder = save_model(model, tmp_path / "network", **known)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    for back in (
        timm.create_model(f"local-dir:{folder}", pretrained=True).eval(),
        load_model(folder).model,
        load_model(str(folder)).model,
    ):
        assert torch.equal(back(x), expected)
        assert list(back.state_dict()) == list(model.state_dict())
    config = json.loads((folder / "config.json").read_text())
    assert config["model_args"]["augmentations"][0]["example"] == [[1, channels, 64, 48]]
    assert "base" in config["model_args"]


def test_what_was_loaded_can_be_augmented_again_and_saved(tmp_path):
    model, _ = augment(timm.create_model("resnet10t", num_classes=5), 64, where="layer4.*.conv1", combine="add", **FEW)
    first = load_model(save_model(model, tmp_path / "first", classes=list("abcde"))).model
    again, _ = augment(first, 64, where="layer3.*.conv1", combine="add", **FEW)
    loaded = load_model(save_model(trained(again), tmp_path / "second", classes=list("abcde")))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.model(x), again(x))
    assert len(loaded.model.augmentations) == 2
    assert loaded.classes == tuple("abcde")
    assert loaded.model.no_weight_decay() == again.no_weight_decay()


def test_another_head_for_what_was_saved(tmp_path):
    model, _ = augment(timm.create_model("resnet10t", num_classes=5), 64, where="layer4.*.conv1", combine="add", **FEW)
    folder = save_model(trained(model), tmp_path / "network")
    other = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=7).eval()
    x = torch.randn(1, 3, 64, 64)
    assert other(x).shape == (1, 7)
    assert torch.equal(other.forward_features(x), model.forward_features(x))


def test_mistakes_are_one_line_and_leave_nothing(tmp_path):
    plain = timm.create_model("resnet10t", num_classes=5)
    with pytest.raises(ValueError, match=r"not changed by aaconv.augment"):
        save_model(plain, tmp_path / "network")
    model, _ = augment(timm.create_model("resnet10t", act_layer="silu"), 64, where="layer4.*.conv1", **FEW)
    with pytest.raises(ValueError, match=r"something else; if the network is resnet10t with other keywords, pass"):
        save_model(model, tmp_path / "network")
    with pytest.raises(ValueError, match="2 names of classes, but the network tells 1000 apart"):
        save_model(model, tmp_path / "network", classes=["a", "b"])
    theirs, _ = augment(torchvision.models.resnet18(), 64, where="layer4.0.conv1", **FEW)
    with pytest.raises(ValueError, match="pass base='NAME'"):
        save_model(theirs, tmp_path / "network")
    with pytest.raises(ValueError, match=r"timm cannot load what was written.*pass them as options="):
        save_model(theirs, tmp_path / "network", base="torchvision/resnet34")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is there already"):
        save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_push_uploads_what_a_folder_holds(tmp_path, monkeypatch):
    uploaded = {}

    def keep(folder, repository, message, private):
        uploaded.update({path.name: path.read_bytes() for path in folder.iterdir()}, repository=repository)
        return "https://hub/owner/network"

    monkeypatch.setattr(hub, "_upload", keep)
    model, _ = augment(timm.create_model("resnet10t", num_classes=5), 64, where="layer4.*.conv1", combine="add", **FEW)
    assert push_model(model, "owner/network") == "uploaded the network to https://hub/owner/network"
    folder = save_model(model, tmp_path / "network")
    assert uploaded.pop("repository") == "owner/network"
    assert b"hf-hub:owner/network" in uploaded.pop("README.md")
    assert uploaded == {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    monkeypatch.setattr(hub, "_upload", lambda *_: 1 / 0)
    with pytest.raises(OSError, match=r"was not uploaded to owner/network: division by zero; aaconv.save_model writes"):
        push_model(model, "owner/network")
    with pytest.raises(ValueError, match="must be owner/name"):
        push_model(model, "network")


def test_the_entry_point_names_what_is_missing():
    with pytest.raises(ValueError, match="augmented needs base=NAME"):
        aaconv.create_model("augmented")
    with pytest.raises(ValueError, match="unknown model 'resnet1'"):
        aaconv.create_model("augmented", base="resnet1")
    with pytest.raises(ValueError, match="must be mappings with `where`"):
        aaconv.create_model("augmented", base="resnet10t", augmentations=[{"combine": "add"}])


def test_a_detector_is_saved_with_its_run(tmp_path):
    options = {"channels": 16, "head_depth": 1, "augmentations": [{"where": "layer4.0.conv2", "combine": "add", **FEW}]}
    model = aaconv.create_model("augmented_retinanet", backbone="test_resnet", img_size=64, **options)
    with pytest.raises(ValueError, match="is a detector, which is saved with its run: aaconv push RUN --to FOLDER"):
        save_model(model, tmp_path / "network")
    assert not list(tmp_path.iterdir())
