"""Tiny-ImageNet as its archive unpacks, on a folder of a few images, and everything that may be missing of it."""

import os
import shutil

import pytest
import torch

from aaconv.cli import main
from aaconv.data import CropAndFlip, DeviceLoader, FileDataset, make_loader, open_dataset, tiny_imagenet
from aaconv.data.class_names import class_title
from aaconv.runs.load import load_model
from support.tiny_imagenet_data import WNIDS, expect, make_tiny_imagenet

CLASSES = tuple(sorted(WNIDS))


@pytest.fixture(autouse=True)
def small(original, monkeypatch):
    expect(original, monkeypatch)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_tiny_imagenet(tmp_path_factory.mktemp("data"))


@pytest.fixture
def root(original, tmp_path):
    """A copy, to be damaged."""
    return shutil.copytree(original, tmp_path / "data")


def test_both_parts_with_their_labels(original):
    train, test = (open_dataset("tiny-imagenet", original, split) for split in ("train", "test"))
    assert isinstance(train, FileDataset)
    assert train.classes == test.classes == CLASSES
    assert class_title(CLASSES[0]) == "goldfish"
    assert [label for _, label in train] == sorted([0, 1, 2] * 4)
    assert [label for _, label in test] == [CLASSES.index(name) for name in WNIDS for _ in range(2)]
    assert train[4][0].shape == (3, 64, 64)
    assert train.side == 64
    assert train.augmentation == CropAndFlip(pad=8)


def test_the_folder_itself_can_be_named(original):
    assert len(open_dataset("tiny-imagenet", original / "tiny-imagenet-200")) == 12


def test_an_image_is_evaluated_whole(original):
    test = open_dataset("tiny-imagenet", original, "test")
    kept = make_loader(test, 6, train=False, in_memory=True, workers=0)
    read = make_loader(test, 6, train=False, workers=0)
    assert isinstance(kept, DeviceLoader)
    assert torch.equal(kept.padded, torch.stack([image.permute(1, 2, 0) for image, _ in test]))
    for some, other in zip(next(kept.batches()), next(read.batches()), strict=True):
        assert torch.equal(some, other)


@pytest.mark.parametrize(
    ("damage", "split", "told"),
    [
        (lambda folder: shutil.rmtree(folder), "train", "unpack tiny-imagenet-200.zip into"),
        (lambda folder: (folder / "wnids.txt").write_text("n1 n2"), "train", "has 2 classes, expected 3"),
        (
            lambda folder: shutil.rmtree(folder / "train" / "n01443537"),
            "train",
            "train is not complete: n01443537 has 0 images, expected 4, and 1 of 3 classes are like it",
        ),
        (lambda folder: (folder / "val" / "images" / "val_3.JPEG").unlink(), "test", "val is not complete: n01443537 "),
        (lambda folder: (folder / "val" / "val_annotations.txt").unlink(), "test", "val_annotations.txt is missing"),
        (lambda folder: (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG"), "test", "is damaged"),
        (
            lambda folder: (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn9"),
            "test",
            "has images of 'n9', which wnids.txt does not have",
        ),
    ],
)
def test_what_is_missing_is_named(damage, split, told, root):
    damage(root / "tiny-imagenet-200")
    with pytest.raises(OSError, match=told):
        open_dataset("tiny-imagenet", root, split)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def swap_labels(file):
    first, second, *rest = file.read_text().splitlines()
    exchanged = [f"{a.partition(chr(9))[0]}\t{b.partition(chr(9))[2]}" for a, b in ((first, second), (second, first))]
    file.write_text("\n".join([*exchanged, *rest]) + "\n")


@pytest.mark.parametrize(
    ("change", "split"),
    [
        (lambda folder: flip_a_bit(folder / "train/n02124075/images/n02124075_3.JPEG"), "train"),
        (lambda folder: flip_a_bit(folder / "val/images/val_0.JPEG"), "test"),
        (
            lambda folder: swap(*(folder / f"train/{name}/images/{name}_0.JPEG" for name in CLASSES[:2])),
            "train",
        ),
        (
            lambda folder: (folder / "train/n01443537/images/n01443537_3.JPEG").rename(
                folder / "train/n01443537/images/n01443537_4.JPEG"
            ),
            "train",
        ),
        (lambda folder: swap_labels(folder / "val/val_annotations.txt"), "test"),
    ],
    ids=["bit of train", "bit of val", "images of two classes", "name", "labels"],
)
def test_what_is_not_as_published_is_refused_with_a_way_out(change, split, root):
    folder, other = root / "tiny-imagenet-200", {"train": "test", "test": "train"}[split]
    change(folder)
    place = folder / {"train": "train", "test": "val"}[split]
    with pytest.raises(OSError, match="are not those of Tiny-ImageNet") as found:
        open_dataset("tiny-imagenet", root, split)
    assert f"in {place} are" in str(found.value)
    assert f"expected {tiny_imagenet.MD5[split]}): " in str(found.value)
    assert "folder/PATH" in str(found.value)
    assert "\n" not in str(found.value)
    assert open_dataset("tiny-imagenet", root, other)  # whose files are as they were


def test_the_way_out_takes_changed_images(root):
    folder = root / "tiny-imagenet-200"
    flip_a_bit(folder / "train/n02124075/images/n02124075_3.JPEG")
    for name in CLASSES:
        shutil.copytree(folder / "train" / name / "images", root / "own" / "train" / name)
        (root / "own" / "val" / name).mkdir(parents=True)
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        file, name, *_ = line.split("\t")
        shutil.copy(folder / "val" / "images" / file, root / "own" / "val" / name)
    train, test = (open_dataset("folder/own", root, split) for split in ("train", "test"))
    assert (len(train), len(test), train.classes) == (12, 6, CLASSES)


def test_files_that_are_not_read_may_be_anything(root):
    folder = root / "tiny-imagenet-200"
    for place in ("words.txt", "val/README", "train/n02124075/n02124075_boxes.txt", "train/README"):
        (folder / place).write_text("changed")
    assert [len(open_dataset("tiny-imagenet", root, split)) for split in ("train", "test")] == [12, 6]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_what_is_not_a_file_is_named_without_waiting_for_it(root):
    file = root / "tiny-imagenet-200/train/n01443537/images/n01443537_0.JPEG"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match=r"n01443537_0\.JPEG cannot be read: not a regular file; unpack it again"):
        open_dataset("tiny-imagenet", root)


def test_a_relative_folder_has_the_same_md5(original, monkeypatch):
    for place, data_dir in ((original, "."), (original / "tiny-imagenet-200", "."), (original.parent, original.name)):
        monkeypatch.chdir(place)
        assert len(open_dataset("tiny-imagenet", data_dir)) == 12


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves", "one_thread")
def test_a_recipe_trains_on_it(original, tmp_path, capsys):
    run = tmp_path / "run"
    words = f"tiny-imagenet-resnet18-aa-se --data-dir {original} --epochs 1 --batch 4 --device cpu --workers 0"
    assert main(["train", *words.split(), "--run", str(run)]) == 0
    loaded = load_model(run)
    assert (loaded.size, loaded.crop, loaded.classes) == (64, 1.0, CLASSES)
    capsys.readouterr()
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert "6 images of tiny-imagenet" in capsys.readouterr().out
