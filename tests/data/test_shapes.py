"""shapes: the labels and boxes found again in the pixels, and the laws that make the task one for attention."""

import numpy as np
import pytest
import torch

from aaconv.data import open_dataset, shapes

PALETTE = torch.tensor(list(shapes.COLOURS.values())).float()


def colourful(images):
    """Which pixels are of an object: the ground is grey up to its noise."""
    pixels = images.int()
    return pixels.amax(-1) - pixels.amin(-1) > 2 * shapes.NOISE


@pytest.mark.parametrize("size", [24, 32, 45, 64])
def test_labels_and_boxes_are_those_of_the_pixels(size):
    drawing = shapes.draw(300, size, seed=1)
    for image, label, boxes in zip(drawing.images, drawing.labels, drawing.boxes, strict=True):
        seen, colours = colourful(image), []
        for half, box in zip((slice(0, size // 2), slice(size // 2, size)), boxes.int().tolist(), strict=True):
            mask = torch.zeros_like(seen)
            mask[:, half] = seen[:, half]
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert [int(edge) for edge in found] == box
            colour = image[mask].float().mean(0)
            colours.append(int((PALETTE - colour).norm(dim=1).argmin()))
        assert label == (colours[0] == colours[1])


@pytest.mark.parametrize("size", [24, 32, 64, 100])
def test_no_window_as_wide_as_the_gap_sees_both_objects(size):
    boxes = shapes.draw(2000, size).boxes
    empty = boxes[:, 1, 0] - boxes[:, 0, 2]
    assert empty.min() == shapes.gap(size), "the gap is the smallest distance that occurs"
    assert shapes.gap(size) >= 0.4 * size
    assert boxes.min() >= 0
    assert boxes.max() <= size


def middles(drawing):
    """int64 [number, 2, 2]: x and y of a pixel of each object; every kind covers its middle."""
    return ((drawing.boxes[..., :2] + drawing.boxes[..., 2:]) / 2).long()


def colours_of(drawing):
    """int64 [number, 2]: the nearest colour of the palette at the middle of each object."""
    x, y = middles(drawing).unbind(-1)
    pixels = drawing.images[torch.arange(len(x))[:, None], y, x].float()
    return (PALETTE - pixels[:, :, None]).norm(dim=-1).argmin(-1)


def test_one_object_alone_says_nothing_about_the_label():
    drawing = shapes.draw(20_000)
    for one in range(2):
        for features in (colours_of(drawing)[:, one], drawing.kinds[:, one], middles(drawing)[:, one, 1] // 8):
            for value in features.unique():
                assert drawing.labels[features == value].double().mean() == pytest.approx(0.5, abs=0.03)


def test_all_pairs_of_colours_are_equally_likely_under_their_label():
    drawing = shapes.draw(20_000)
    number = len(PALETTE)
    pairs = (number * colours_of(drawing)[:, 0] + colours_of(drawing)[:, 1]).bincount(minlength=number**2) / 20_000
    same = torch.eye(number)
    expected = same * 0.5 / number + (1 - same) * 0.5 / (number * (number - 1))
    assert torch.allclose(pairs.reshape(number, number), expected, atol=0.01)


def test_kinds_are_told_by_how_much_of_the_box_they_fill():
    drawing = shapes.draw(500, 64)
    filled = {kind: [] for kind in range(len(shapes.KINDS))}
    for image, boxes, kinds in zip(drawing.images, drawing.boxes.int().tolist(), drawing.kinds.tolist(), strict=True):
        for (x0, y0, x1, y1), kind in zip(boxes, kinds, strict=True):
            filled[kind].append(float(colourful(image)[y0:y1, x0:x1].double().mean()))
    square, disc, cross, triangle = (np.array(filled[kind]) for kind in range(4))
    assert square.min() == 1
    assert 0.7 < disc.min() <= disc.max() < 0.9
    assert 0.5 < triangle.min() <= triangle.max() < 0.65
    assert cross.max() < 0.5


def test_best_sum_of_two_local_scores_is_right_in_three_of_four():
    """All classifiers a(i) + b(j) > 0 with small whole scores, on the distribution of the colours."""
    colours = 3  # the bound is the same for every number; with three all classifiers can be tried
    scores = np.array(np.meshgrid(*[np.arange(-2, 3)] * colours)).reshape(colours, -1).T + 0.25
    same = np.eye(colours, dtype=bool)
    weight = np.where(same, 0.5 / colours, 0.5 / (colours * (colours - 1)))
    says_same = scores[:, None, :, None] + scores[None, :, None, :] > 0
    accuracy = (weight * (says_same == same)).sum((-1, -2))
    assert accuracy.max() == pytest.approx(0.75)


def test_an_image_depends_on_seed_and_number_alone():
    few, many = shapes.draw(10, seed=5), shapes.draw(2500, seed=5)
    assert all(torch.equal(a, b[:10]) for a, b in zip(few, many, strict=True))
    assert not torch.equal(few.images, shapes.draw(10, seed=6).images)


def test_training_and_test_images_are_different_whatever_the_seed():
    images = [
        open_dataset("shapes", split=split, seed=seed, number=64).images
        for seed in range(3)
        for split in ("train", "test")
    ]
    assert len(torch.cat(images).flatten(1).unique(dim=0)) == 6 * 64


def test_statistics_are_those_of_the_pixels():
    dataset = open_dataset("shapes", number=4000)
    pixels = dataset.images.double() / 255
    assert torch.allclose(pixels.mean((0, 1, 2)), torch.tensor(dataset.mean).double(), atol=0.01)
    assert torch.allclose(pixels.std((0, 1, 2)), torch.tensor(dataset.std).double(), atol=0.015)


@pytest.mark.parametrize("wrong", [{"number": 0}, {"number": 1, "size": 23}, {"number": 1, "seed": -1}])
def test_mistakes_are_named(wrong):
    argument = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"{argument} must be at least .*{wrong[argument]}"):
        shapes.draw(**wrong)


@pytest.mark.parametrize(("number", "size"), [(20_000, 100_000), (10**12, 32), (10**30, 10**30)])
def test_what_no_machine_could_hold_is_not_tried(number, size):
    with pytest.raises(ValueError, match=r"shapes of .* pixels take .* GiB, this machine has .* GiB; draw smaller"):
        shapes.draw(number, size)


@pytest.mark.parametrize(("size", "distance"), [(24, 0), (32, 18), (64, 24), (64, 50)])
def test_objects_at_a_distance_are_so_many_columns_apart(size, distance):
    drawing = shapes.draw(3000, size, distance=distance)
    (left, right), sides = drawing.boxes.unbind(1), drawing.boxes[..., 2:] - drawing.boxes[..., :2]
    assert torch.equal(right[:, 0] - left[:, 2], torch.full((3000,), float(distance)))
    assert (right[:, 1] - left[:, 1]).abs().max() == shapes.GRADED_SHIFT
    assert drawing.boxes.min() == 0
    assert drawing.boxes.max() == size
    assert sorted(sides.unique().tolist()) == [5, 6, 7]
    colours = colours_of(drawing)
    assert torch.equal(drawing.labels == 1, colours[:, 0] == colours[:, 1])
    for one in range(2):
        for colour in range(4):
            assert abs(float(drawing.labels[colours[:, one] == colour].float().mean()) - 0.5) < 0.08


def test_a_distance_is_part_of_the_name():
    train, test = (open_dataset("shapes:distance=20", split=split, number=50, size=48) for split in ("train", "test"))
    assert train.name == "shapes:distance=20"
    assert torch.equal(train.images, shapes.draw(50, 48, distance=20).images)
    assert not torch.equal(train.images, test.images)
    assert not torch.equal(train.images, open_dataset("shapes:distance=19", number=50, size=48).images)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("shapes:distance=19", "distance must be 0 to 18 in images of 32 pixels, got 19"),
        ("shapes:distance=-1", "write shapes, or shapes:distance=24"),
        ("shapes:gap=3", "write shapes, or shapes:distance=24"),
    ],
)
def test_a_distance_that_cannot_be_is_told(name, told):
    with pytest.raises(ValueError, match=told):
        open_dataset(name)
