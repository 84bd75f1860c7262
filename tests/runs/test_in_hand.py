"""Networks in hand, and names with --augment: explored, reported, exported, counted and asked like any other."""

import csv
import json

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.models import resnet18

from aaconv import augment, cost, explore, load_model
from aaconv.cli import main
from aaconv.cost.show import print_cost
from aaconv.export.network import export
from aaconv.inference.predict import predict
from aaconv.runs.load import TrainedModel
from aaconv.runs.report import write_report
from aaconv.utils.html import read

WHERE = "layer4.*.conv1"
WORDS = ("--augment", WHERE, "--augment.num-heads", "2", "--augment.key-channels=40")
KEYWORDS = {"where": WHERE, "num_heads": 2, "key_channels": 40}


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.effect_noise((40, 60), 80).convert("RGB").save(path)
    return path


@pytest.fixture
def model():
    """Of torchvision, augmented, in training mode."""
    return augment(resnet18(num_classes=3), 64, **KEYWORDS)[0].train()


def printed(capsys, *words):
    capsys.readouterr()
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_a_network_in_hand_is_taken_as_a_copy(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = load_model(torch.compile(model))
    assert (loaded.source, loaded.size, loaded.task, loaded.classes, loaded.trained) == (
        "ResNet",
        224,
        "classify",
        None,
        True,
    )
    assert not loaded.model.training
    assert model.training
    with torch.no_grad():
        next(loaded.model.parameters()).zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert load_model(loaded) is loaded


def test_what_timm_knows_of_a_network_is_kept_and_what_a_caller_says_wins():
    network = timm.create_model("test_resnet", num_classes=2)
    loaded = TrainedModel.of(network)
    known = network.pretrained_cfg
    assert (loaded.size, loaded.mean, loaded.interpolation) == (160, tuple(known["mean"]), known["interpolation"])
    named = TrainedModel.of(network, classes=["cat", "dog"], size=64, mean=[0.1] * 3, std=[0.2] * 3, name="mine")
    assert (named.classes, named.size, named.mean, named.std, named.source) == (
        ("cat", "dog"), 64, (0.1,) * 3, (0.2,) * 3, "mine",
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"weights": "last"}, {"pretrained": True}, {"augment": KEYWORDS}], ids=str)
def test_what_belongs_to_names_is_refused(model, options):
    with pytest.raises(ValueError, match="a network in hand is taken as it is"):
        load_model(model, **options)


@pytest.mark.slow
def test_explore_predict_export_report_and_cost_take_it(model, photo, tmp_path, capsys):
    written = explore.write_page(TrainedModel.of(model, size=64), photo.parent, tmp_path / "page.html")
    assert (written.images, written.layers) == (1, 2)
    assert explore.write_figure(TrainedModel.of(model, size=64), str(photo), tmp_path / "figure.svg").is_file()
    loaded = TrainedModel.of(model, classes=["a", "b", "c"], size=64)
    (found,) = predict(loaded, photo, device="cpu")
    assert found.classes.keys() == {"a", "b", "c"}
    (plain,) = predict(model, str(photo), top=1, device="cpu")
    assert plain.classes.keys() <= {"class 0", "class 1", "class 2"}
    export(loaded, tmp_path / "model.pt2", fixed=True, say=lambda line: None)
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    counted = cost.count(model, (64, 64))
    print_cost(model, (64, 64))
    assert f"{counted.params:,}" in capsys.readouterr().out
    page = write_report([model, loaded], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count(f"{counted.params:,}") == 2
    assert "Recipes" not in page
    assert model.training


def test_show_gives_a_notebook_the_page_in_a_frame(model, photo):
    shown = explore.show(TrainedModel.of(model, size=64), photo, height=500, names=["a <cat>"])
    frame = shown._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count("<") == 2  # nothing of the page gets out of it
    assert "height: 500px" in frame
    assert "which a notebook shows" in repr(shown)
    assert "srcdoc" not in read("aaconv.explore", "page.html")


@pytest.mark.slow
def test_names_are_augmented_on_the_command_line(photo, tmp_path, capsys):
    whole = json.loads(printed(capsys, "cost", "resnet18", "--json", *WORDS))
    network, report = augment(timm.create_model("resnet18"), 224, **KEYWORDS)
    assert whole["params"] == sum(parameter.numel() for parameter in network.parameters())
    assert len(report.replacements) == 2
    assert "layer4.1.conv1" in printed(capsys, "cost", "resnet18", "--size", 64, *WORDS)
    page = tmp_path / "page.html"
    said = printed(capsys, "explore", "resnet18", photo, "--size", 64, "-o", page, *WORDS)
    assert said.startswith(f"wrote {page}: 1 image, 2 layers")
    assert '"trained":false' in page.read_text(encoding="utf-8")
    printed(capsys, "export", "resnet18", "-o", tmp_path / "model.pt2", "--size", 64, "--fixed", *WORDS)
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_weights_fill_the_augmented_network(model, photo, tmp_path):
    network, _ = augment(timm.create_model("resnet18"), 224, **KEYWORDS)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    loaded = load_model("resnet18", augment=KEYWORDS, weights=tmp_path / "weights.pt")
    assert loaded.trained
    assert torch.equal(loaded.model.layer4[0].conv1.rel_h, network.layer4[0].conv1.rel_h)
    assert not load_model("resnet18", augment=KEYWORDS).trained


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--augment", "layer9"), "where='layer9' matches none"),
        (("--augment", WHERE, "--augment.heads", "2"), "augment takes no option 'heads'; nearest: num_heads"),
        (("--augment.num-heads", "2"), "--augment.num_heads needs --augment WHERE beside it"),
        (("--augment", WHERE, "--augment.num-heads", "-1"), "num_heads"),
    ],
)
def test_mistakes_are_explained(words, told, photo, capsys):
    for command in (("cost", "resnet18"), ("predict", "resnet18", str(photo))):
        assert main([*command, *words]) == 2
        assert told in capsys.readouterr().err


def test_predictions_as_files(photo, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"nothing")
    for ending in ("csv", "json"):
        torch.manual_seed(0)
        assert (
            main(["predict", "test_resnet", str(tmp_path), "--top", "2", "-o", str(tmp_path / f"found.{ending}")]) == 2
        )  # an image could not be read
        assert "1 of 2 images could not be read" in capsys.readouterr().err
    with (tmp_path / "found.csv").open(newline="", encoding="utf-8") as file:
        broken, *rows = csv.DictReader(file)
    assert (broken["class"], broken["rank"]) == ("", "")
    assert broken["error"]
    (_, good) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [(row["image"], row["class"]) for row in rows] == [(str(photo), name) for name in good["classes"]]
    assert [row["rank"] for row in rows] == ["1", "2"]
    assert [float(row["probability"]) for row in rows] == pytest.approx([*good["classes"].values()], rel=1e-5)
    assert main(["predict", "test_resnet", str(photo), "-o", str(tmp_path / "found.txt")]) == 2
    assert "must end in .csv or .json" in capsys.readouterr().err


def test_a_network_without_attention_is_refused(photo):
    with pytest.raises(ValueError, match="no attention"):
        explore.show(nn.Sequential(nn.Conv2d(3, 4, 3)), photo)
