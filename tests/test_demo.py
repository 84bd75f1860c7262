"""The demo: it trains through the real loop, tells what came out and no more, and leaves runs and pictures."""

import io
import sys

import pytest
import timm
import torch
from PIL import Image

from aaconv import demo, recipes
from aaconv.data import open_dataset
from aaconv.layers.aaconv import AAConv2d
from aaconv.runs import run_folder
from support.tiny_runs import TINY

KINDS = ("plain", "se", "aa")


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """The demo's folder, what it printed at 80 columns and what it returned."""
    runs = tmp_path_factory.mktemp("demo") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdout", io.StringIO())
        accuracies = demo.run(runs, changes=TINY)
        return runs, sys.stdout.getvalue(), accuracies


@pytest.mark.slow
def test_three_runs_stand_side_by_side(demonstrated):
    runs, printed, accuracies = demonstrated
    for kind, (title, accuracy) in zip(KINDS, accuracies.items(), strict=True):
        summary = run_folder.read_summary(runs / f"demo-{kind}")
        assert summary["top1"] == accuracy
        (row,) = [line for line in printed.splitlines() if line.startswith(title)]
        assert f"{accuracy:.1f} %" in row
        assert f"{summary['parameters']:,}" in row


def test_it_prints_plain_lines_of_80_columns(demonstrated):
    runs, printed, _ = demonstrated
    lines = printed.replace(str(runs), "runs").splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in printed
    assert "\r" not in printed


def test_it_leaves_pictures_a_page_and_runs_that_can_be_used(demonstrated):
    runs, printed, _ = demonstrated
    for name in (demo.CURVES, demo.ATTENTION):
        with Image.open(runs / name) as picture:
            assert min(picture.size) > 300
        assert str(runs / name) in printed
    assert "<html" in (runs / demo.PAGE).read_text()
    model = timm.create_model(f"local-dir:{runs / 'demo-aa'}", pretrained=True)
    assert any(isinstance(module, AAConv2d) for module in model.modules())


def test_a_second_demo_replaces_its_own_runs_only(tmp_path):
    recipe = recipes.get("demo-aa")
    assert demo.own_folder(tmp_path, recipe) == tmp_path / "demo-aa"
    (tmp_path / "demo-aa").mkdir()
    recipes.save(recipe, tmp_path / "demo-aa" / "recipe.yaml")
    assert demo.own_folder(tmp_path, recipe) == tmp_path / "demo-aa"
    assert not (tmp_path / "demo-aa").exists()
    (tmp_path / "demo-aa").mkdir()
    (tmp_path / "demo-aa" / "diary.txt").write_text("mine")
    assert demo.own_folder(tmp_path, recipe) == tmp_path / "demo-aa-2"
    assert (tmp_path / "demo-aa" / "diary.txt").exists()


@pytest.mark.parametrize(
    ("accuracies", "told"),
    [
        ((51.0, 91.2, 100.0), ("stay at chance, below the 75 %", "right in 100.0 %", "8.8 points below")),
        ((70.0, 99.8, 100.0), ("stay below the 75 %", "within a point of that")),
        ((80.0, 99.0, 90.0), ("pass the 75 %", "right in 90.0 %", "9.0 points above")),
        ((51.0, 50.0, 50.5), ("changes that to 50.5 % only",)),
    ],
)
def test_the_conclusion_follows_from_the_figures(accuracies, told):
    text = demo.conclusion(dict(zip(KINDS, accuracies, strict=True)))
    assert all(words in text for words in told)
    assert text.count(". ") == 1  # two sentences


def test_the_attention_is_that_of_the_pixel_asked_for():
    torch.manual_seed(0)
    model = timm.create_model("aa_small").eval()
    layer, image = model.blocks[2].conv, torch.randn(1, 3, 32, 32)
    maps, guess = demo.attention_from(model, layer, image, point=(29.0, 6.0))
    with torch.no_grad():
        before = model.blocks[:2](image)
        expected = layer.attention_maps(before)[0, :, 1 * 8 + 7]
        assert guess == int(model(image).argmax())
    torch.testing.assert_close(maps.flatten(1), expected)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(4))


def test_the_figure_shows_the_examples_that_look_across_most():
    dataset = open_dataset("shapes", split="test", number=4)
    maps = torch.full((2, 8, 8), 1 / 64)
    first = ((0, 0, (0.1, 0.2)), (1, 1, (0.7, 0.8)), (1, 0, (0.9, 0.1)))
    found = [
        [demo.Look(index, which, maps, 1, shares) for index, which, shares in first],
        [demo.Look(index, 0, maps, 0, shares) for index, shares in ((2, (0.3, 0.6)), (3, (0.0, 0.0)))],
    ]
    figure = demo._panels("layer", found, dataset)
    labels = [axes.get_xlabel() for axes in figure.axes if "other" in axes.get_xlabel()]
    assert labels == ["70 % on the other", "80 % on the other", "30 % on the other", "60 % on the other"]
    caption = figure.get_supxlabel()
    assert "37 % of a head's weight is on the other object" in caption  # the mean of all five
    assert "and 50 % of the weight of the head that has most there" in caption


def test_the_share_on_an_object_counts_its_cells():
    weights = torch.arange(64.0).reshape(8, 8)
    box = torch.tensor([26.0, 5.0, 31.0, 9.0])  # columns 6, 7 and rows 1, 2 of cells of 4 pixels
    assert demo.share(weights, box, 32) == pytest.approx(float(weights[1:3, 6:8].sum() / weights.sum()))
    assert demo.share(weights, torch.tensor([0.0, 0.0, 32.0, 32.0]), 32) == 1


def test_examples_are_test_images():
    images, names = demo.examples(3)
    dataset = open_dataset("shapes", split="test", number=3)
    assert [image.tolist() for image in images] == [dataset[index][0].tolist() for index in range(3)]
    assert set(names) <= set(dataset.classes)
