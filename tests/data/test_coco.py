"""Images with boxes in COCO's format: the real files where they lie beside the repository, and whatever is wrong."""

import json
import logging
import subprocess

import pytest
import torch

from aaconv.data import UnreadableImage, open_dataset
from aaconv.data.coco import from_arrays, open_detection
from aaconv.data.images import read_photograph, read_stored
from support.detection_data import CATEGORIES, annotation, make_coco, write_split
from support.places import SHARED_DATA

COCO_SMALL = SHARED_DATA / "coco-small"


def rewrite(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def coco(tmp_path):
    return make_coco(tmp_path / "tiny")


def test_the_real_subset(tmp_path):
    if not (COCO_SMALL / "val.tar").exists():
        pytest.skip(f"no COCO subset in {COCO_SMALL}")
    subprocess.run(["tar", "xf", COCO_SMALL / "val.tar", "-C", tmp_path], check=True)
    if not (tmp_path / "coco-small" / "annotations" / "instances_val.json").exists():
        pytest.skip("the annotations are in the other file")
    dataset = open_detection("coco/coco-small", tmp_path, "test")
    assert (dataset.name, len(dataset), len(dataset.classes)) == ("coco-small", 1_000, 71)
    assert sum(len(objects.labels) for objects in dataset.objects) == 7_371
    image, objects = dataset[0]
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, *dataset.sizes[0].tolist()))
    assert max(image.shape[1:]) == 256
    assert (objects.boxes[:, 2:] > objects.boxes[:, :2]).all()
    assert dataset.classes[0] == "person"


def test_images_boxes_and_categories(coco):
    dataset = open_detection(f"coco/{coco.name}", coco.parent)
    assert dataset.name == "tiny"
    assert dataset.classes == ("car", "train", "toothbrush")
    assert dataset.category_ids == (3, 7, 90)
    image, objects = dataset[1]
    assert image.shape == (3, 55, 47)
    assert objects.labels.tolist() == [0, 2, 1]
    assert objects.crowd.tolist() == [False, False, True]
    torch.testing.assert_close(objects.boxes[0], torch.tensor([2.0, 3.0, 25.5, 3 + 55 / 3]))
    _, nothing = dataset[2]
    assert nothing.boxes.shape == (0, 4)
    assert len(nothing.labels) == len(nothing.crowd) == 0


@pytest.mark.parametrize("name", ["coco", "coco/tiny"])
def test_where_the_data_lie(coco, name, monkeypatch):
    assert len(open_detection(name, coco if name == "coco" else coco.parent, "test")) == 6
    monkeypatch.setenv("AACONV_DATA", str(coco.parent))
    coco.rename(coco.with_name("coco")) if name == "coco" else None
    assert len(open_detection(name)) == 6


def test_published_names_of_files_and_folders(coco):
    for split in ("train", "val"):
        (coco / split).rename(coco / f"{split}2017")
        file = coco / "annotations" / f"instances_{split}.json"
        file.rename(file.with_name(f"instances_{split}2017.json"))
    assert open_detection(str(coco), split="test")[0][0].shape == (3, 60, 40)


def test_subsets_keep_ids_and_objects(coco):
    dataset = open_detection("coco", coco)
    some = dataset.subset([4, 1])
    assert [some.image_ids[some.place(i)] for i in range(2)] == [5, 2]
    assert torch.equal(some[1][0], dataset[1][0])
    assert torch.equal(some.subset([1])[0][0], dataset[1][0])
    assert len(dataset.take(3)) == 3
    assert torch.equal(dataset.take(3).chosen, dataset.take(3).chosen)
    with pytest.raises(ValueError, match=r"1 to 6.*got 7"):
        dataset.take(7)
    with pytest.raises(IndexError):
        dataset[6]


def test_shapes_have_boxes():
    arrays = open_dataset("shapes", size=48, number=10)
    dataset = open_detection("shapes", size=48, number=10)
    image, objects = dataset[3]
    assert image.shape == (3, 48, 48)
    assert torch.equal(objects.boxes, arrays.boxes[3])
    assert dataset.classes == ("square", "disc", "cross", "triangle")
    assert not objects.crowd.any()
    with pytest.raises(ValueError, match="has no boxes"):
        from_arrays(type(arrays)(**{**vars(arrays), "boxes": None}))


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([[5, 5, 0, 10]], "without an area (1)"),
        ([[5, 5, 10, -3], [1, 1, 0, 0]], "without an area (2)"),
        ([[500, 5, 10, 10]], "outside of their image (1)"),
        ([[-20, 5, 15, 10]], "outside of their image (1)"),
        ([[1, 2, 3]], "that are not four numbers (1)"),
        (["abcd", None, [1, 2, "wide", 4], [1, 2, float("nan"), 4]], "that are not four numbers (4)"),
    ],
)
def test_boxes_that_cannot_be_used_are_counted(tmp_path, caplog, boxes, told):
    good = annotation(1, [1, 1, 8, 8])
    file = write_split(tmp_path, "train", {1: (40, 30)}, [*(annotation(1, box) for box in boxes), good])
    with caplog.at_level(logging.WARNING):
        dataset = open_detection(str(tmp_path))
    assert dataset.objects[0].boxes.tolist() == [[1, 1, 9, 9]]
    assert caplog.messages == [f"{file}: left out boxes {told}"]


def test_boxes_that_reach_out_of_the_image_are_cut(tmp_path):
    write_split(tmp_path, "train", {1: (40, 30)}, [annotation(1, [-5, 20, 60, 60])])
    objects = open_detection(str(tmp_path)).objects[0]
    assert objects.boxes.tolist() == [[0, 20, 40, 30]]
    assert objects.areas.tolist() == [400]


def test_unknown_images_and_categories_are_counted(tmp_path, caplog):
    wrong = [annotation(9, [1, 1, 5, 5]), annotation(1, [1, 1, 5, 5], 4), annotation(1, [1, 1, 5, 5], 4)]
    write_split(tmp_path, "train", {1: (40, 30)}, wrong)
    with caplog.at_level(logging.WARNING):
        assert len(open_detection(str(tmp_path)).objects[0].labels) == 0
    assert "of an unknown image (1), of the unknown category 4 (2)" in caplog.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "no list of 'images'"),
        ('{"images": [], "annotations": [], "categories": {}}', "no list of 'categories'"),
        ('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}', "has no images"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "'images' has no 'file_name'"),
        ('{"images": [], "annotations": [4], "categories": []}', "'annotations' has no 'image_id': 4"),
    ],
)
def test_wrong_annotation_files_are_named(coco, content, told):
    (coco / "annotations" / "instances_train.json").write_text(content)
    with pytest.raises(ValueError, match=f"instances_train.json.*{told}"):
        open_detection("coco", coco)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["images"].append(c["images"][0]), "id 1 stands twice in 'images'"),
        (lambda c: c["categories"].append(CATEGORIES[1]), "id 7 stands twice in 'categories'"),
        (lambda c: c["images"][0].update(id="one"), "whole number, got 'one'"),
        (lambda c: c["images"][0].update(width=0), "image 1 must have a height and a width, got 60 and 0"),
        (lambda c: c["categories"].clear(), "has no categories"),
    ],
)
def test_contradictions_are_named(coco, change, told):
    rewrite(coco / "annotations" / "instances_train.json", change)
    with pytest.raises(ValueError, match=told):
        open_detection("coco", coco)


def test_missing_corrupt_and_resized_files_are_named(coco):
    (coco / "train" / "000001.png").unlink()
    (coco / "train" / "000002.png").write_bytes(b"no image")
    whole = (coco / "train" / "000003.png").read_bytes()
    (coco / "train" / "000003.png").write_bytes(whole[: len(whole) // 2])
    rewrite(coco / "annotations" / "instances_train.json", lambda c: c["images"][3].update(width=99))
    dataset = open_detection("coco", coco)
    for index, told in enumerate(("no such file", "not an image", "OSError", "is 61 x 45 pixels.*say 99 x 45")):
        with pytest.raises(UnreadableImage, match=told):
            dataset[index]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("coco/nowhere", "no folder .*nowhere"),
        ("shape", "did you mean 'shapes'"),
        ("imagenet", "choose one of shapes, coco"),
        ("", "choose one of"),
    ],
)
def test_unknown_data_sets(tmp_path, name, told):
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        open_detection(name, tmp_path)


def test_missing_parts_are_named(coco):
    with pytest.raises(FileNotFoundError, match="data folder /nowhere"):
        open_detection("coco", "/nowhere")
    with pytest.raises(ValueError, match="no option 'size'"):
        open_detection("coco", coco, size=3)
    with pytest.raises(ValueError, match="split must be"):
        open_detection("coco", coco, "val")
    (coco / "val").rename(coco / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"no folder of test images; expected .*/val"):
        open_detection("coco", coco, "test")
    (coco / "annotations" / "instances_val.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no annotations of test images; expected .*instances_val.json or"):
        open_detection("coco", coco, "test")


def test_photographs_are_turned_upright_and_annotated_images_are_not(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (12, 8)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_stored(tmp_path / "turned.jpg").shape == (3, 8, 12)
    assert read_photograph(tmp_path / "turned.jpg").shape == (3, 12, 8)


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["images"][0].update(id=HUGE), "the id of an entry of 'images' must be a whole number, got 1000"),
        (lambda c: c["images"][0].update(id=[1]), r"must be a whole number, got \[1\]"),
        (lambda c: c["images"][0].update(id=True), "must be a whole number, got True"),
        (lambda c: c["images"][0].update(height=HUGE), "image 1 must have a height and a width, got 1000"),
        (lambda c: c["images"][0].update(width={"a": 1}), "image 1 must have a height and a width, got 60 and {'a'"),
        (lambda c: c["categories"][0].update(id=None), "of 'categories' must be a whole number, got None"),
    ],
)
def test_wrong_types_and_huge_numbers_are_named(coco, change, told):
    rewrite(coco / "annotations" / "instances_train.json", change)
    with pytest.raises(ValueError, match=told) as error:
        open_detection("coco", coco)
    assert "instances_train.json" in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"image_id": [1]}, "of an unknown image"),
        ({"image_id": HUGE}, "of an unknown image"),
        ({"image_id": {"a": 1}}, "of an unknown image"),
        ({"category_id": [3]}, "without a category"),
        ({"category_id": "car"}, "of the unknown category car"),
        ({"bbox": "1234"}, "that are not four numbers"),
        ({"bbox": {"a": 1}}, "that are not four numbers"),
        ({"bbox": [1, 1, HUGE, 5]}, "that are not four numbers"),
        ({"bbox": [1, 1, float("inf"), 5]}, "that are not four numbers"),
        ({"bbox": [1, 1, None, 5]}, "that are not four numbers"),
        ({"area": HUGE}, "with an area that is none"),
        ({"area": [4]}, "with an area that is none"),
        ({"area": "big"}, "with an area that is none"),
        ({"area": -4}, "with an area that is none"),
        ({"area": float("nan")}, "with an area that is none"),
    ],
    ids=str,
)
def test_wrong_annotations_are_left_out_and_counted(tmp_path, change, told, caplog):
    good = annotation(1, [1, 1, 5, 5])
    file = write_split(tmp_path, "train", {1: (40, 30)}, [good, good | change])
    with caplog.at_level(logging.WARNING):
        assert open_detection(str(tmp_path)).objects[0].boxes.tolist() == [[1, 1, 6, 6]]
    assert caplog.messages == [f"{file}: left out boxes {told} (1)"]
