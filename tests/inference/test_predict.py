"""Prediction: the network's own answer for a file, whatever its mode and size, and broken files named."""

import json
import os
import re

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from aaconv.cli import main
from aaconv.data import open_dataset
from aaconv.data.images import find_images, read_photograph
from aaconv.inference.predict import predict, print_predictions
from aaconv.runs.load import load_model
from support.tiny_runs import break_weights, train_tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_probabilities_are_the_networks(run, tmp_path):
    dataset, loaded = open_dataset("shapes", split="test", number=3), load_model(run)
    for index in range(3):
        Image.fromarray(dataset.images[index].numpy()).save(tmp_path / f"{index}.png")
    found = list(predict(run, [tmp_path], device="cpu", batch=2))
    mean, std = (torch.tensor(values)[:, None, None] for values in (loaded.mean, loaded.std))
    images = torch.stack([(dataset[index][0] / 255 - mean) / std for index in range(3)])
    with torch.no_grad():
        expected = loaded.model(images).softmax(1)
    for one, row in zip(found, expected, strict=True):
        assert [one.classes[name] for name in dataset.classes] == pytest.approx(row.tolist(), abs=1e-5)
        assert list(one.classes.values()) == sorted(one.classes.values(), reverse=True)
    assert len(next(predict(run, [tmp_path], top=1, device="cpu")).classes) == 1


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16", "I", "F", "YCbCr"])
def test_every_mode_is_read(mode, run, photo, tmp_path):
    grey = mode.startswith("I") or mode == "F"
    image = Image.open(photo).convert("L" if grey else mode if mode != "YCbCr" else "RGB")
    if grey:
        types = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
        image = Image.fromarray(np.asarray(image).astype(types[mode]) * 257)
    elif mode == "YCbCr":
        if int(PIL.__version__.split(".")[0]) < 13:
            pytest.skip("Pillow before 13 writes such files, and does not read them")
        image = image.convert("YCbCr")
    path = tmp_path / ("image.png" if mode in ("L", "LA", "RGBA", "P", "1", "I;16") else "image.tiff")
    image.save(path)
    assert read_photograph(path).shape == (3, 40, 50)
    (found,) = predict(run, [path], device="cpu")
    assert sum(found.classes.values()) == pytest.approx(1)


def test_grey_of_sixteen_bits_keeps_its_brightness(photo, tmp_path):
    eight = Image.open(photo).convert("L")
    eight.save(tmp_path / "eight.png")
    Image.fromarray(np.asarray(eight).astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    assert torch.equal(read_photograph(tmp_path / "eight.png"), read_photograph(tmp_path / "sixteen.png"))


def test_transparent_is_white(tmp_path):
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_photograph(tmp_path / "clear.png").unique().tolist() == [255]


def test_turned_photographs_are_turned_back(photo, tmp_path):
    image = Image.open(photo)
    exif = image.getexif()
    exif[0x0112] = 6
    image.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(read_photograph(tmp_path / "turned.png"), read_photograph(photo))


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (200, 3)])
def test_odd_sizes(size, run, tmp_path):
    Image.new("RGB", size, (10, 200, 30)).save(tmp_path / "odd.png")
    (found,) = predict(run, [tmp_path / "odd.png"], device="cpu")
    assert found.error is None


def test_files_folders_and_patterns(tmp_path, photo):
    (tmp_path / "deep").mkdir()
    for name in ("deep/a.JPG", "deep/b.webp", "deep/notes.txt"):
        (tmp_path / name).write_bytes(photo.read_bytes())
    names = [path.name for path in find_images([photo, tmp_path / "deep", f"{tmp_path}/d*/*.webp", photo])]
    assert names == ["photo.png", "a.JPG", "b.webp"]
    for place, told in ((tmp_path / "none.png", "there is no image"), (f"{tmp_path}/*.gif", "no file fits")):
        with pytest.raises(FileNotFoundError, match=told):
            find_images([place])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no images in the folder"):
        find_images([tmp_path / "empty"])


def test_broken_files_are_named_and_skipped(run, photo, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(photo.read_bytes()[:500])
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(OSError, match=r"2 of 3 images could not be read; the first is .*broken\.png"):
        print_predictions(run, [broken, photo, tmp_path / "text.jpg"], device="cpu")
    printed = capsys.readouterr().out
    assert printed.count("skipped: ") == 2
    assert "skipped: not an image, or of an unknown format" in printed
    assert printed.count(" %  ") == 2  # both classes of the one that is whole
    with pytest.raises(OSError, match="2 of 3"):
        print_predictions(run, [broken, photo, tmp_path / "text.jpg"], device="cpu", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [bool(one["error"]) for one in found] == [True, False, True]


@pytest.mark.parametrize("as_json", [False, True])
def test_weights_without_a_finite_output_are_named(as_json, run, photo, tmp_path, capsys):
    broken = break_weights(run, tmp_path / "broken.safetensors")
    told = f"the output for {photo} is not finite: the weights {broken} are damaged or diverged"
    with pytest.raises(ValueError, match=re.escape(told)):
        print_predictions(run, [photo], weights=broken, device="cpu", as_json=as_json)
    assert capsys.readouterr().out == ""


def test_a_model_without_names_of_classes_counts_them(photo):
    (found,) = predict("plain_small", [photo], device="cpu")
    assert set(found.classes) == {"class 0", "class 1"}


def test_a_fifo_is_not_waited_for(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "a.jpg")
    assert main(["predict", str(run), str(tmp_path / "a.jpg"), "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "skipped: not a regular file" in printed.out
    assert f"1 of 1 image could not be read; the first is {tmp_path}/a.jpg: not a regular file" in printed.err
