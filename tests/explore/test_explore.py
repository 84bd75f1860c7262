"""The explorer without a browser: images in, packed attention, the page's text, the figure, and errors of one line."""

import copy
import json
import re
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from aaconv import AAConv2d, cli
from aaconv.explore import write_figure, write_page
from aaconv.explore.alignment import cell_shifts
from aaconv.explore.capture import Layer, attention_layers, capture
from aaconv.explore.factors import TOLERANCE
from aaconv.explore.figure import overlay
from aaconv.explore.grid import Grid
from aaconv.explore.images import fit, load_image, normalise
from aaconv.explore.page import render
from aaconv.explore.study import study
from aaconv.runs.load import load_model
from support.explored import LAYERS, NAME, maps_of, small_network

MODEL = "aa_small"


@pytest.fixture(scope="module")
def loaded():
    return small_network()


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def error_of(capsys, *arguments):
    assert cli.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    return printed.err


# Attention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_heads": False},
        {"position": "none"},
        {"position": "sinusoidal"},
        {"position": "coordconv"},
        {"stride": 2},
        {"downsample": True},
        {"size": (4, 4)},  # tables stretched to the larger map
        {"window": (5, 3)},
        {"window": 4, "window_stride": 2, "window_dilation": 2, "share_heads": False},
        {"window": 3, "position": "none"},
    ],
)
def test_packed_attention_is_the_layers_own(options):
    torch.manual_seed(0)
    layer = AAConv2d(3, 16, 3, num_heads=4, key_channels=16, value_channels=8, **options)
    nn.init.normal_(layer.qkv.weight)
    x = torch.randn(3, 9, 12)
    _, [facts], packed = capture(nn.Sequential(layer), x, {"0": layer})
    with torch.no_grad():
        exact = layer.attention_maps(x[None])[0].numpy()
    maps = maps_of(packed["0"], facts)
    assert maps.shape == exact.shape == (4, facts.height * facts.width, facts.height * facts.width)
    off = np.abs(maps - exact) / exact.max(-1, keepdims=True)
    assert off.max() <= TOLERANCE
    assert off.max() == pytest.approx(packed["0"].error, rel=1e-3)
    assert (facts.height, facts.width) == layer.attention_size(9, 12)
    assert packed["0"].kind == "int16"
    assert (exact > 0).sum(-1).max() == facts.keys_seen


def test_extreme_logits_take_more_bits():
    torch.manual_seed(0)
    layer = AAConv2d(3, 16, 3, num_heads=2, key_channels=8, value_channels=8, position="none")
    nn.init.normal_(layer.qkv.weight, std=8)
    _, _, packed = capture(nn.Sequential(layer), torch.randn(3, 16, 16), {"0": layer})
    assert packed["0"].kind == "float32"
    assert packed["0"].error <= TOLERANCE


def test_damaged_weights_are_named(image):
    broken = small_network()
    nn.init.constant_(broken.model.second.qkv.weight, float("nan"))
    with pytest.raises(ValueError, match="attention of second is not finite"):
        study(broken, [image])


def test_the_sharpest_position_is_found(loaded, image):
    looked_at = study(loaded, [image])
    for layer in looked_at.layers:
        packed = looked_at.pictures[0].attention[layer.name]
        peaks = maps_of(packed, layer).max(-1).mean(0)
        row, column = packed.focus
        assert peaks[row * layer.width + column] == pytest.approx(peaks.max(), rel=0.01)
        assert packed.peak == pytest.approx(peaks.max() * len(peaks), rel=0.01)


def test_layers_are_chosen_by_patterns(loaded):
    assert list(attention_layers(loaded.model, NAME)) == list(LAYERS)
    assert list(attention_layers(loaded.model, NAME, ["*s*"])) == ["first", "second", "coarse"]
    assert list(attention_layers(loaded.model, NAME, ["coarse", "f*"])) == ["first", "coarse"]
    inside = nn.Sequential(loaded.model)
    assert list(attention_layers(inside, NAME, ["0"])) == ["0.first", "0.second", "0.coarse"]
    with pytest.raises(ValueError, match="fits 'third'; it has first, second, coarse"):
        attention_layers(loaded.model, NAME, ["third"])


def test_hooks_do_not_stay(loaded, image):
    study(loaded, [image])
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


# Images


def test_an_image_is_what_the_network_sees(loaded, image):
    looked_at = study(loaded, [image])
    shown = looked_at.pictures[0].pixels
    assert torch.equal(shown, torch.from_numpy(image).permute(2, 0, 1))
    with torch.no_grad():
        output = loaded.model(normalise(shown, loaded.mean, loaded.std)[None])
    assert [p for _, p in looked_at.pictures[0].top] == pytest.approx(
        output.softmax(1)[0].sort(descending=True)[0].tolist()
    )


def test_all_kinds_of_images_are_the_same_image(image, tmp_path):
    Image.fromarray(image).save(tmp_path / "image.png")
    expected = torch.from_numpy(image).permute(2, 0, 1)
    sources = (tmp_path / "image.png", str(tmp_path / "image.png"), Image.fromarray(image), image, expected)
    for source in (*sources, expected / 255, expected.permute(1, 2, 0)):
        assert torch.equal(load_image(source), expected)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(32, 32), torch.full((3, 8, 8), 1.5), torch.zeros(3, 8, 8, dtype=torch.int64)]
)
def test_odd_arrays_are_refused(wrong):
    with pytest.raises(ValueError, match="an image must be"):
        load_image(wrong)


def test_photographs_are_turned_upright(tmp_path):
    photograph = Image.new("RGB", (20, 10), (255, 0, 0))
    exif = photograph.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    photograph.save(tmp_path / "turned.jpg", exif=exif)
    assert load_image(tmp_path / "turned.jpg").shape == (3, 20, 10)


def test_larger_images_lose_their_edges():
    assert fit(torch.zeros(3, 300, 400, dtype=torch.uint8), 224, 0.875).shape == (3, 224, 224)
    assert fit(torch.zeros(3, 10, 40, dtype=torch.uint8), 32, 1.0).shape == (3, 32, 32)


# Page and figure


def test_the_page_is_one_file(loaded, image, tmp_path):
    written = write_page(loaded, [image, image], tmp_path / "page.html", names=["<b>one</b>", "</script>"])
    text = (tmp_path / "page.html").read_text()
    assert written.bytes == len(text.encode())
    assert str(written).startswith(f"wrote {tmp_path / 'page.html'}: 2 images, 3 layers, ")
    outside = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", outside.replace("picture.src = ", ""))
    assert "{{" not in outside
    data = data_of(text)
    assert [picture["name"] for picture in data["images"]] == ["<b>one</b>", "</script>"]
    assert data["trained"] is False
    assert data["error"] <= TOLERANCE
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.slow
def test_a_page_of_aa_resnet50_can_be_sent(tmp_path):
    photograph = np.random.default_rng(0).integers(0, 256, (250, 300, 3), dtype=np.uint8)
    written = write_page("aa_resnet50", [photograph], tmp_path / "page.html")
    assert written.layers == 13
    assert written.bytes < 3e6  # the goal is 15 MB


def test_trained_weights_are_not_called_untrained(image, tmp_path):
    torch.save(load_model(MODEL).model.state_dict(), tmp_path / "weights.pt")
    assert study(MODEL, [image], weights=str(tmp_path / "weights.pt")).trained


def test_classes_are_called_what_people_call_them(loaded, image):
    named = replace(loaded, classes=("n01440764", "french_horn"))
    assert {name for name, _ in study(named, [image]).pictures[0].top} == {"tench", "french horn"}


def test_a_detector_has_no_top_five(loaded, image):
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = AAConv2d(3, 16, 3, num_heads=2, key_channels=8, value_channels=8, size=32)

        def forward(self, x):
            return self.conv(x), x

    looked_at = study(replace(loaded, model=Detector()), [image])
    assert looked_at.pictures[0].top == []
    assert data_of(render(looked_at))["images"][0]["top"] == []


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_figure_is_drawn(loaded, image, tmp_path, ending):
    path = write_figure(loaded, [image], tmp_path / f"figure.{ending}", at=[(3, 4), (30, 9)], layers=["second"])
    assert path.stat().st_size > 5000
    if ending == "svg":
        text = path.read_text()
        assert all(f">{word}<" in text for word in ("head 1", "head 4", f"{NAME}, second, 16 x 16 (untrained)"))


def test_the_figure_lays_weights_where_they_belong(loaded, image):
    looked_at = study(loaded, [image])
    layer, picture = looked_at.layers[2], looked_at.pictures[0]
    weights = np.zeros(layer.height * layer.width)
    weights[3 * layer.width + 5] = 1.0
    drawn = overlay(picture, weights, layer)
    alone = overlay(picture, np.zeros_like(weights), layer)
    rows, columns = (np.flatnonzero((drawn != alone).any(axis=2).any(axis=axis)) for axis in (1, 0))
    scale = len(drawn) // 32
    # Cells of 4 pixels around pixel 4 i: 4 * 3 + 0.5 - 2 = 10.5 and 4 * 5 + 0.5 - 2 = 18.5 from the edges.
    assert (rows.min(), rows.max() + 1) == (10.5 * scale, 14.5 * scale)
    assert (columns.min(), columns.max() + 1) == (18.5 * scale, 22.5 * scale)
    assert drawn[rows][:, columns].mean() > alone[rows][:, columns].mean() + 0.2


# Alignment


def patches(side):
    """A convolution that cuts the image into patches, and attention on these."""
    return nn.Sequential(nn.Conv2d(3, 8, side, side), attentive(8))


def padded(times):
    """As many padded 3x3 convolutions of stride 2, and attention on the result."""
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, 2, padding=1) for _ in range(times)), attentive(3))


def attentive(channels, **options):
    return AAConv2d(channels, 8, 3, num_heads=2, key_channels=8, value_channels=4, **options)


@pytest.mark.parametrize(
    ("network", "shift"),
    [
        (patches(4), 0),
        (patches(8), 0),
        (padded(1), -0.5),  # cell i lies on pixel 2 i, an even cell around 2 i + 0.5
        (padded(2), -1.5),
        (padded(3), -3.5),
        (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(3), attentive(3)), -0.5),
        (nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), attentive(3)), 0),
        (nn.Sequential(attentive(3, stride=2)), -0.5),
        (nn.Sequential(attentive(3, downsample=2)), -1.5),
        (nn.Sequential(attentive(3)), 0),
    ],
)
def test_cells_lie_where_the_network_looks(network, shift):
    name = str(len(network) - 1)
    network.eval()(torch.zeros(1, 3, 64, 48))  # makes the tables
    before = copy.deepcopy(network.state_dict())
    assert cell_shifts(network, torch.zeros(1, 3, 64, 48), [name]) == {name: (shift, shift)}
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_cells_and_their_middles_belong_together():
    layer = Layer("conv", 8, 14, 7, 20, Grid.whole(14, 7), 98, 1, 0, shift=(-7.5 / 224, -15.5 / 224))
    for row in range(14):
        for column in range(7):
            assert layer.cell(*layer.centre(row, column)) == (row, column)
    assert layer.cell(0, 0) == (0, 0)
    assert layer.cell(0.9999, 0.9999) == (13, 6)
    x, y = layer.centre(3, 2)
    assert (224 * x - 0.5, 224 * y - 0.5) == pytest.approx((32 * 2, 16 * 3))  # of stride 32 and 16, padded


def test_figures_of_the_same_are_the_same(loaded, image, tmp_path):
    first, second = (write_figure(loaded, [image], tmp_path / name) for name in ("a.png", "b.png"))
    assert np.array_equal(matplotlib.image.imread(first), matplotlib.image.imread(second))


# The command


def test_the_command_writes_page_and_figure(image, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(image).save("cat.png")
    arguments = ["explore", MODEL, "cat.png", "--static", "figure.png", "-o", "page.html", "--layers", "blocks.2"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("drew figure.png\nwrote page.html: 1 image, 1 layer, ")
    assert {path.name for path in tmp_path.iterdir()} == {"cat.png", "figure.png", "page.html"}


@pytest.mark.parametrize("words", [["photos"], ["photos/*.png"], ["photos/a.png", "photos"]])
def test_the_command_takes_folders_and_patterns(words, image, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(image).save(tmp_path / "photos" / name)
    assert cli.main(["explore", MODEL, *words, "--layers", "blocks.2"]) == 0
    assert capsys.readouterr().out.startswith("wrote explore.html: 2 images, 1 layer, ")


def test_a_folder_is_no_image(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; name image files"):
        load_image(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["plain_small", "cat.png"], "plain_small has no AAConv2d layers, so there is no attention to show; aa_small"),
        (
            ["cbam_resnet18", "cat.png"],
            "cbam_resnet18 has no AAConv2d layers, so there is no attention to show; aa_resnet18",
        ),
        (["aa_smal", "cat.png"], "did you mean aa_small"),
        (["runs/nothing", "cat.png"], "runs/nothing is not a run folder"),
        (["aa_small", "dog.png"], "there is no image or folder dog.png"),
        (["aa_small", "*.jpg"], "no file fits the pattern *.jpg"),
        (["aa_small", "text.png"], "text.png cannot be read: not an image"),
        (["aa_small", "half.png"], "half.png cannot be read"),
        (["aa_small", "empty"], "there are no images in the folder empty"),
        (["aa_small", "cat.png", "--layers", "layer9"], "it has blocks."),
        (["aa_small", "cat.png", "-o", "nowhere/page.html"], "there is no folder nowhere"),
        (
            ["aa_small", "cat.png", "--size", "300"],
            "75 x 75, 31,640,625 weights per head, and pages take at most 16,777,216",
        ),
        (["aa_small", "cat.png", "--size", "100000"], "at most 2048 pixels, got 100000"),
        (["aa_small", "cat.png", "--at", "3,3"], "needs --static"),
        (["aa_small", "cat.png", "--static", "figure.gif"], "must end in .png, .svg or .pdf"),
        (["aa_small", "cat.png", "--static", "figure.png", "--at", "40,3"], "0 to 31 pixels"),
        (["aa_small", "cat.png", "text.png", "--static", "figure.png"], "one image, got 2"),
        (["aa_small", "cat.png", "--weights", "best"], "belong to a run folder"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, hint, image, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(image).save("cat.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "half.png").write_bytes((tmp_path / "cat.png").read_bytes()[:400])
    (tmp_path / "empty").mkdir()
    before = set(tmp_path.iterdir())
    assert hint in error_of(capsys, "explore", *arguments)
    assert set(tmp_path.iterdir()) == before


def test_a_huge_page_is_not_written(loaded, image, tmp_path):
    with pytest.raises(ValueError, match=r"the limit is 0\.01; choose fewer layers"):
        write_page(loaded, [image], tmp_path / "page.html", largest=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_huge_page_is_refused_after_the_first_image(loaded, image, tmp_path, monkeypatch):
    captured = []
    monkeypatch.setattr("aaconv.explore.study.capture", lambda *arguments: captured.append(1) or capture(*arguments))
    write_page(loaded, [image], tmp_path / "page.html")
    one = (tmp_path / "page.html").stat().st_size / 1e6
    captured.clear()
    with pytest.raises(
        ValueError, match=r"the page would have .* MB, the limit is .*images \(about \d+ images? fit\)"
    ) as told:
        write_page(loaded, [image] * 50, tmp_path / "many.html", largest=5 * one)
    assert len(captured) == 1
    assert not (tmp_path / "many.html").exists()
    fitting = int(re.search(r"about (\d+)", str(told.value))[1])
    write_page(loaded, [image] * (fitting - 1), tmp_path / "some.html", largest=5.5 * one)


def test_positions_of_the_command_are_pairs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["explore", MODEL, "cat.png", "--static", "f.png", "--at", "3"])
    assert "expected X,Y such as 112,80" in capsys.readouterr().err
