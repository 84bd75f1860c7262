"""Sheets of examples: every kind of data set, what is drawn, and files that are there whole or not at all."""

import pytest
import torch
from matplotlib.patches import Rectangle
from PIL import Image

from aaconv.cli import main
from aaconv.data import class_names, open_dataset, preview
from aaconv.data.coco import open_detection
from support.detection_data import make_coco


def make_folder(root, broken=()):
    for index in range(6):
        path = root / "train" / ("n01440764", "n01443537")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + index, 30), (40 * index, 90, 90)).save(path)
        if index in broken:
            path.write_bytes(b"broken")
    return root


def captions(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_sheet_of_shapes_shows_images_classes_and_boxes():
    dataset = open_dataset("shapes", number=40)
    figure = preview.sheet(dataset, "train", count=12, seed=1)
    assert len(figure.axes) == 12
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:12].tolist()
    for index, axes in zip(order, figure.axes, strict=True):
        assert torch.equal(torch.as_tensor(axes.images[0].get_array()), dataset.images[index])
        kinds = [dataset.kind_names[kind] for kind in dataset.kinds[index]]
        assert [text.get_text() for text in axes.texts] == [dataset.classes[dataset.labels[index]], *kinds]
        boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        for (x0, y0, x1, y1), box in zip(dataset.boxes[index].tolist(), boxes, strict=True):
            middle = ((x0 + x1 - 1) / 2, (y0 + y1 - 1) / 2)
            assert box.get_center() == pytest.approx(middle, abs=0.6)
            assert box.get_width() == pytest.approx(x1 - x0 + 0.5, abs=0.6)
    assert "40 training images in 2 classes, 32 x 32 pixels" in [text.get_text() for text in figure.texts]


def test_sheet_of_a_folder_names_classes_and_skips_what_is_broken(tmp_path):
    dataset = open_dataset(str(make_folder(tmp_path, broken=[0, 2])))
    figure = preview.sheet(dataset, "train", count=6, seed=0)
    assert sorted(captions(figure)) == ["goldfish"] * 3 + ["tench"]
    make_folder(tmp_path, broken=range(6))
    with pytest.raises(OSError, match="none of the 6 images"):
        preview.sheet(dataset, "train", count=6, seed=0)


def test_sheet_of_coco_shows_the_boxes_and_names_their_classes(tmp_path):
    dataset = open_detection("coco", make_coco(tmp_path), "train")
    figure = preview.sheet(dataset, "train", count=6, seed=0)
    assert sorted(captions(figure)) == ["car, toothbrush"] * 2 + ["car, toothbrush,…"] * 2 + ["nothing"] * 2
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    for index, axes in zip(order, figure.axes, strict=True):
        drawn = [[*box.get_xy(), box.get_width(), box.get_height()] for box in axes.patches]
        boxes = dataset.objects[index].boxes
        wanted = torch.cat([boxes[:, :2] - 0.5, boxes[:, 2:] - boxes[:, :2]], dim=1)
        torch.testing.assert_close(torch.tensor(drawn).reshape(-1, 4).float(), wanted)


def test_command_reads_coco_and_names_wrong_annotations(tmp_path, capsys):
    make_coco(tmp_path / "set")
    arguments = ["data", "preview", "coco/set", "--data-dir", str(tmp_path), "-o", str(tmp_path / "sheet.png")]
    assert main(arguments) == 0
    (tmp_path / "sheet.png").unlink()
    for content, message in (('{"images": [', "is not JSON"), ('{"images": 3}', "has no list of 'images'")):
        (tmp_path / "set/annotations/instances_train.json").write_text(content)
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.parametrize(
    ("name", "title"),
    [("n01440764", "tench"), ("n99999999", "n99999999"), ("maple_tree", "maple tree"), ("north", "north")],
)
def test_class_titles(name, title):
    assert class_names.class_title(name) == title


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_command_writes_the_same_file_for_the_same_seed(ending, tmp_path, capsys):
    sheets = [tmp_path / f"{number}.{ending}" for number in range(3)]
    for path, seed in zip(sheets, "001", strict=True):
        assert main(["data", "preview", "shapes", "-o", str(path), "--seed", seed, "--count", "6"]) == 0
    assert f"drew {sheets[0]}" in capsys.readouterr().out
    files = [path.read_bytes() for path in sheets]
    assert files[0] == files[1] != files[2]
    assert len(list(sheets[0].parent.iterdir())) == 3, "no drafts are left"


def test_a_missing_folder_is_named_and_not_made(tmp_path, capsys):
    assert main(["data", "preview", "shapes", "-o", str(tmp_path / "typo" / "sheet.png")]) == 2
    assert f"there is no folder {tmp_path / 'typo'}" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_command_reads_folders(tmp_path):
    make_folder(tmp_path / "set")
    arguments = ["folder/set", "--data-dir", str(tmp_path), "-o", str(tmp_path / "sheet.webp"), "--count", "2"]
    assert main(["data", "preview", *arguments]) == 0
    with Image.open(tmp_path / "sheet.webp") as picture:
        assert min(picture.size) > 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shaps", "-o", "x.png"], "did you mean 'shapes'?"),
        (["shapes", "-o", "x.doc"], "the file must end in .png"),
        (["shapes", "-o", "x.png", "--count", "401"], "count must be 1 to 400, got 401"),
        (["shapes", "-o", "x.png", "--data-dir", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "preview", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--augmented"],
        ["--auto-augment", "trivialaugment", "--repeats", "3"],
        ["--mixup", "0.8", "--cutmix", "1", "--random-erasing", "0.5", "--count", "5"],
        ["--auto-augment", "rand-m9", "--size", "48"],
    ],
    ids=" ".join,
)
def test_augmented_images_are_drawn(words, tmp_path):
    plain, sheet = tmp_path / "plain.png", tmp_path / "sheet.png"
    assert main(["data", "preview", "shapes", "-o", str(plain)]) == 0
    assert main(["data", "preview", "shapes", "-o", str(sheet), *words]) == 0
    assert sheet.read_bytes() != plain.read_bytes()
