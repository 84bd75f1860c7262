"""Image files of every kind that people have, and those that must not be waited for or decoded."""

import gc
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset
from torchvision.transforms import v2

from aaconv.data import UnreadableImage, eval_transform, open_dataset
from aaconv.data.image_folder import ImageFolder, class_names, natural_key
from aaconv.data.images import IMAGE_ENDINGS, MAX_PIXELS, find_images, read_photograph, read_stored, walk_images
from aaconv.data.transforms import LONGEST, cut_ends

READERS = (read_photograph, read_stored)


def save(path, pixels=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 5, 3), 90, np.uint8) if pixels is None else pixels).save(path)
    return path


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_floats_from_0_to_1_are_those_from_0_to_255(read, scale, tmp_path):
    grey = np.linspace(0, 1, 30, dtype=np.float32).reshape(5, 6)
    path = save(tmp_path / "float.tiff", grey * scale)
    expected = torch.from_numpy((grey * 255).round().astype(np.uint8)).expand(3, -1, -1)
    assert torch.equal(read(path), expected)


@pytest.mark.parametrize("read", READERS)
def test_sixteen_bits_are_scaled_not_clipped(read, tmp_path):
    path = save(tmp_path / "a.png", np.array([[0, 257 * 100, 65535]], np.uint16))
    assert read(path)[0].tolist() == [[0, 100, 255]]


def test_pixels_that_are_not_numbers_are_the_darkest(tmp_path):
    path = save(tmp_path / "a.tiff", np.array([[np.nan, 0.5, 1.0, np.inf]], np.float32))
    assert read_photograph(path)[0].tolist() == [[128, 128, 255, 128]]
    with pytest.raises(UnreadableImage, match="finite"):
        read_photograph(save(tmp_path / "b.tiff", np.full((2, 2), np.nan, np.float32)))


@pytest.mark.parametrize("read", READERS)
def test_too_many_pixels_are_refused_until_the_limit_is_raised(read, tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", np.zeros((30, 40, 3), np.uint8))
    for limit in ("1199", "100"):  # Pillow warns of the one and refuses the other
        monkeypatch.setenv("AACONV_MAX_PIXELS", limit)
        with pytest.raises(UnreadableImage) as error:
            read(path)
        limit = f"{int(limit):,}"
        assert error.value.reason == (
            f"it has 1,200 pixels, more than the limit of {limit}; AACONV_MAX_PIXELS=N in the environment raises it"
        )
    before = Image.MAX_IMAGE_PIXELS
    monkeypatch.setenv("AACONV_MAX_PIXELS", "1200")
    assert read(path).shape == (3, 30, 40)
    assert before == Image.MAX_IMAGE_PIXELS
    monkeypatch.setenv("AACONV_MAX_PIXELS", "many")
    with pytest.raises(UnreadableImage, match="must be a whole number of pixels"):
        read(path)


def test_the_limit_takes_what_phones_make_and_not_a_bomb():
    assert 108_000_000 <= MAX_PIXELS < 13_000**2


def test_pillows_own_limit_says_nothing_below_ours(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert read_photograph(save(tmp_path / "a.png")).shape == (3, 4, 5)
    assert not recwarn.list


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_regular_file_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    for name, reason in (("fifo.png", "not a regular file"), (".", "a folder, not an image")):
        with pytest.raises(UnreadableImage) as error:
            read(tmp_path / name)
        assert error.value.reason == reason


def test_links_are_followed_but_never_round_and_round(tmp_path):
    save(tmp_path / "set" / "train" / "a" / "1.png")
    save(tmp_path / "set" / "train" / "b" / "2.png")
    save(tmp_path / "elsewhere" / "3.png")
    (tmp_path / "set" / "train" / "c").symlink_to(tmp_path / "elsewhere")
    for place in ("a", "b"):
        for name in ("up", "round", "there"):
            (tmp_path / "set" / "train" / place / name).symlink_to("..")
    (tmp_path / "set" / "train" / "b" / "self.png").symlink_to("self.png")
    start = time.monotonic()
    dataset = open_dataset(str(tmp_path / "set" / "train"))
    assert time.monotonic() - start < 5
    assert dataset.classes == ("a", "b", "c")
    assert [path.name for path in find_images([tmp_path / "set"])] == ["1.png", "2.png", "self.png", "3.png"]
    names = [dataset.reader.filename(index, basename=True) for index in range(len(dataset))]
    assert names == ["1.png", "2.png", "self.png", "3.png"]
    with pytest.raises(UnreadableImage):
        dataset[2]


def test_fifos_in_a_folder_are_left_out(tmp_path):
    save(tmp_path / "a" / "1.png")
    os.mkfifo(tmp_path / "a" / "2.png")
    assert len(open_dataset(str(tmp_path))) == 1
    assert find_images([tmp_path]) == [tmp_path / "a" / "1.png"]


def test_folders_are_read_in_timms_order(tmp_path):
    for name in ("b/10.png", "b/9.PNG", "a/x/2.jpg", "a/x/11.jpg", "A2/1.webp", "a10/1.png", "c/not.txt", "c/0.gif"):
        if name.endswith("txt"):
            (tmp_path / "c").mkdir(exist_ok=True)
            (tmp_path / name).write_text("no picture")
        else:
            save(tmp_path / name)
    ours = open_dataset(str(tmp_path))
    theirs = create_dataset("", root=str(tmp_path), search_split=False, input_key=";".join(IMAGE_ENDINGS)).reader
    assert [ours.reader.sample(index) for index in range(len(ours))] == theirs.samples
    assert ours.reader.class_to_idx == theirs.class_to_idx
    assert ours.reader.filenames() == theirs.filenames()


def test_an_image_of_a_folder_takes_little_more_than_its_path():
    """No object of its own: the data workers would each get a copy of it as soon as they look at it."""
    names = {f"/data/class{label}": [f"{index:08}.jpg" for index in range(1000)] for label in range(7)}
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        reader = ImageFolder(Path("/data"), names, [f"class{label}" for label in range(7)])
        taken, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    letters = len("/data/class0/00000000.jpg")
    assert len(reader) == 7000
    assert taken < 7000 * (letters + 24)
    assert most < 7000 * (letters + 160), "as it is sorted"
    assert len(gc.get_objects()) - before < 100
    assert reader.sample(0) == ("/data/class0/00000000.jpg", 0)
    assert reader.sample(6999) == ("/data/class6/00000999.jpg", 6)


def test_nested_folders_are_sorted_by_their_whole_paths(tmp_path):
    folders = ["a", "a/1", "a/b", "a/b2", "a 1", "A", "a10", "a9/x", "a9"]
    names = {f"{tmp_path}/{folder}": ["x1.png", "10.png", "0.png", "9.png", "X01.png"] for folder in folders}
    reader = ImageFolder(tmp_path, names, class_names(names))
    paths = [f"{place}/{name}" for place, some in names.items() for name in some]
    assert [reader.sample(index)[0] for index in range(len(reader))] == sorted(paths, key=natural_key)


def test_a_folder_that_nobody_may_enter_is_passed_over(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.png")
    save(tmp_path / "locked" / "2.png")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(walk_images(tmp_path)) == [tmp_path / "a" / "1.png"]


@pytest.mark.parametrize(("height", "width"), [(30, 40), (64, 4), (7, 112), (1, 16)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_evaluation_takes_the_middle(height, width, crop):
    image = torch.randint(256, (3, height, width), dtype=torch.uint8)
    plain = v2.Compose([v2.Resize(round(14 / crop), antialias=True), v2.CenterCrop(14)])
    assert torch.equal(eval_transform(14, crop)(image), plain(image))


@pytest.mark.parametrize("sides", [(1, 60_000), (60_000, 1), (3, 4_000)])
def test_the_ends_of_a_very_long_image_are_cut_before_it_is_enlarged(sides):
    image = torch.randint(256, (3, *sides), dtype=torch.uint8)
    short, long = min(sides), max(sides)
    middle = image[..., : LONGEST * short] if sides[0] == short else image[..., : LONGEST * short, :]
    assert cut_ends(image).shape == middle.shape
    start = (long - LONGEST * short) // 2
    kept = image.narrow(1 if sides[1] == short else 2, start, LONGEST * short)
    assert torch.equal(cut_ends(image), kept)
    assert torch.equal(eval_transform(32)(image), eval_transform(32)(kept))
