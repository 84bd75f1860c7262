"""Canvases and their boxes: one law on the device and in workers; the same batches whoever makes them."""

import pytest
import torch
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes

from aaconv.data.coco import Objects, open_detection
from aaconv.data.detection_loader import (
    KeptDetectionLoader,
    WorkerDetectionLoader,
    make_detection_loader,
    pad_objects,
)
from aaconv.data.detection_transforms import (
    PlaceForEvaluation,
    PlaceForTraining,
    Placement,
    draw_placement,
    move_boxes,
    move_images,
)
from support.detection_data import make_coco

MEAN = (0.4, 0.5, 0.6)
LOADERS = (KeptDetectionLoader, WorkerDetectionLoader)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return open_detection("coco", make_coco(tmp_path_factory.mktemp("data") / "tiny", number=10))


def objects(boxes, labels=None, crowd=None):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = torch.arange(len(boxes)) if labels is None else torch.tensor(labels)
    crowd = torch.zeros(len(boxes), dtype=torch.bool) if crowd is None else torch.tensor(crowd)
    return Objects(boxes, labels, torch.ones(len(boxes)), crowd)


def placement(scale, left, top, flip):
    return Placement(*(torch.tensor([value]) for value in (scale, left, top)), torch.tensor([flip]))


def by_torchvision(image, boxes, scaled, left, top, size, flip):
    """The image [3, h, w] resized to `scaled` (h, w), at (left, top) of a canvas, mirrored or not, with its boxes."""
    boxes = BoundingBoxes(boxes, format="XYXY", canvas_size=tuple(image.shape[-2:]))
    resized = [functional.resize(one, list(scaled), antialias=False) for one in (image, boxes)]
    # pad where the image ends before the canvas, cut where it reaches beyond
    right, bottom = size - left - scaled[1], size - top - scaled[0]
    padded = [functional.pad(one, [max(0, side) for side in (left, top, right, bottom)]) for one in resized]
    cut = [functional.crop(one, max(0, -top), max(0, -left), size, size) for one in padded]
    image, boxes = [functional.horizontal_flip(one) for one in cut] if flip else cut
    return image, functional.clamp_bounding_boxes(boxes).as_subclass(torch.Tensor)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("scale", "left", "top"), [(1.0, 0, 0), (0.75, 5, 9), (0.75, 16, 3), (1.25, -7, 0), (1.25, -16, -16), (1.0, 0, 12)]
)
def test_the_batched_way_follows_torchvisions_law(scale, left, top, flip):
    size, height, width = 64, 48, 64
    image = torch.rand(3, height, width)
    boxes = torch.tensor([[3.0, 4.0, 20.0, 30.0], [40.0, 10.0, 64.0, 48.0], [0.0, 0.0, 5.0, 5.0]])
    scaled = int(scale * height), int(scale * width)
    wanted, wanted_boxes = by_torchvision(image, boxes, scaled, left, top, size, flip)

    canvas = torch.zeros(1, 3, size, size)
    canvas[0, :, :height, :width] = image
    where = placement(scale, float(left), float(top), flip)
    moved_boxes, labels = move_boxes(boxes[None], torch.arange(3)[None], size, where)
    torch.testing.assert_close(moved_boxes[0], wanted_boxes)
    sides = wanted_boxes[:, 2:] - wanted_boxes[:, :2]
    assert (labels[0] >= 0).tolist() == (sides.amin(1) >= 1).tolist()

    moved = move_images(canvas, where)[0]
    inside = torch.ones(height, width, dtype=torch.bool)
    inside, _ = by_torchvision(inside[None].float(), boxes, scaled, left, top, size, flip)
    # At the edge of the image the batched way blends with the ground, where torchvision repeats the last pixel.
    core = torch.nn.functional.avg_pool2d(inside[None], 5, 1, 2)[0, 0] == 1
    assert core.float().mean() > 0.2
    torch.testing.assert_close(moved[:, core], wanted[:, core], atol=1e-4, rtol=0)
    if scale == 1.0:
        torch.testing.assert_close(moved, wanted, atol=1e-5, rtol=0)


def test_objects_that_are_cut_off_are_dropped():
    boxes, labels = move_boxes(
        torch.tensor([[[0.0, 0.0, 10.0, 10.0], [30.0, 30.0, 60.0, 60.0]]]),
        torch.tensor([[4, 5]]),
        64,
        placement(1.0, -9.5, 0.0, False),
    )
    assert labels.tolist() == [[-1, 5]]
    assert boxes[0, 0].tolist() == [0, 0, 0.5, 10]


def test_placements_keep_the_image_on_its_canvas():
    sizes = torch.tensor([[64, 48], [40, 64]]).repeat(500, 1)
    where = draw_placement(sizes, 64, torch.rand(4, 1000))
    assert where.scale.min() >= 0.8
    assert where.scale.max() <= 1.2
    for offset, side in ((where.top, sizes[:, 0]), (where.left, sizes[:, 1])):
        free = 64 - side * where.scale
        assert ((offset >= free.clamp(max=0) - 1e-4) & (offset <= free.clamp(min=0) + 1e-4)).all()
    assert 0.4 < where.flip.float().mean() < 0.6


@pytest.mark.parametrize(("height", "width"), [(30, 60), (60, 30), (64, 64), (7, 200), (200, 1)])
def test_evaluation_keeps_the_aspect_and_pads_below_and_right(height, width):
    image = torch.full((3, height, width), 255, dtype=torch.uint8)
    placed = PlaceForEvaluation(64, MEAN)(image, objects([[0, 0, width, height]]))
    ratio = 64 / max(height, width)
    assert placed.image.shape == (3, 64, 64)
    assert placed.size == (max(1, round(ratio * height)), max(1, round(ratio * width)))
    high, wide = placed.size
    assert (placed.image[:, :high, :wide] == 255).all()
    if wide < 64:
        assert placed.image[:, 0, -1].tolist() == [102, 128, 153]
    torch.testing.assert_close(placed.boxes, torch.tensor([[0.0, 0.0, wide, high]]))


def test_training_drops_crowds_and_keeps_boxes_on_the_canvas():
    image = torch.zeros(3, 40, 64, dtype=torch.uint8)
    image[:, 10:20, 30:50] = 255
    place = PlaceForTraining(64, (0.0, 0.0, 0.0))
    sides = set()
    for seed in range(20):
        torch.manual_seed(seed)
        placed = place(image, objects([[30, 10, 50, 20], [0, 0, 64, 40]], crowd=[False, True]))
        assert placed.image.shape == (3, 64, 64)
        assert placed.labels.tolist() == [0]
        x0, y0, x1, y1 = placed.boxes[0].round().int().tolist()
        bright = placed.image[0] > 127
        rows, columns = bright.any(1).nonzero().flatten(), bright.any(0).nonzero().flatten()
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert [abs(int(a) - b) <= 1 for a, b in zip(found, (x0, y0, x1, y1), strict=True)] == [True] * 4
        sides.add(x1 - x0)
    assert min(sides) < 20 < max(sides)


def test_padding_makes_one_tensor_of_uneven_lists():
    some = objects([[1, 2, 3, 4], [5, 6, 7, 8]])
    boxes, labels = pad_objects([(some.boxes, some.labels), (torch.zeros(0, 4), torch.zeros(0).long())], 3)
    assert boxes.shape == (2, 3, 4)
    assert labels.tolist() == [[0, 1, -1], [-1, -1, -1]]
    boxes, labels = pad_objects([(torch.zeros(0, 4), torch.zeros(0).long())], 0)
    assert (boxes.shape, labels.tolist()) == ((1, 1, 4), [[-1]])


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_have_one_shape(coco, kind):
    loader = kind(coco, 4, size=64, train=True, workers=0)
    assert len(loader) == 2
    for images, targets in loader.batches():
        assert images.shape == (4, 3, 64, 64)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert targets.boxes.shape == (4, 3, 4)
        assert targets.labels.shape == (4, 3)
        assert targets.labels.max() <= 2
        there = targets.boxes[targets.labels >= 0]
        assert (there[:, 2:] - there[:, :2]).min() >= 1
        assert there.min() >= 0
        assert there.max() <= 64


@pytest.mark.parametrize("kind", LOADERS)
def test_evaluation_takes_every_image_once_on_all_ranks(coco, kind):
    seen = []
    for rank in range(3):
        loader = kind(coco, 2, size=32, train=False, workers=0, rank=rank, world_size=3)
        for images, targets in loader.batches():
            assert len(images) == len(targets.index)
            assert targets.sizes.max() == 32
            seen += targets.index.tolist()
    assert sorted(seen) == list(range(10))


def test_both_loaders_evaluate_on_the_same_canvases(coco):
    kept, worker = (list(kind(coco, 4, size=32, train=False, workers=0).batches()) for kind in LOADERS)
    for (images, targets), (others, their) in zip(kept, worker, strict=True):
        torch.testing.assert_close(images, others)
        assert all(torch.equal(a, b) for a, b in zip(targets, their, strict=True))


@pytest.mark.parametrize("kind", LOADERS)
def test_both_loaders_move_the_images_of_training(coco, kind):
    first, second = (next(iter(kind(coco, 10, size=32, train=True, workers=0).batches(epoch))) for epoch in (0, 1))
    boxes = [targets.boxes[targets.index.argsort()] for _, targets in (first, second)]
    assert (boxes[0] != boxes[1]).flatten(1).any(1).sum() >= 6, "not those without objects"


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_can_go_on_at_any_step_on_any_number_of_processes(coco, kind):
    def equal(one, other):
        assert torch.equal(one[0], other[0])
        assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))

    loader = kind(coco, 4, size=32, train=True, workers=0, seed=5)
    whole = list(loader.batches(epoch=2))
    equal(next(iter(loader.batches(epoch=2, first_step=1))), whole[1])
    again = list(kind(coco, 4, size=32, train=True, workers=0, seed=5).batches(epoch=2))
    equal(again[0], whole[0])
    halves = [
        next(iter(kind(coco, 2, size=32, train=True, workers=0, seed=5, rank=r, world_size=2).batches(2)))
        for r in range(2)
    ]
    joined = (
        torch.cat([half[0] for half in halves]),
        tuple(torch.cat(parts) for parts in zip(*(half[1] for half in halves), strict=True)),
    )
    equal(joined, whole[0])
    other = next(iter(loader.batches(epoch=3)))
    assert not torch.equal(other[0], whole[0][0])
    seeded = next(iter(kind(coco, 4, size=32, train=True, workers=0, seed=6).batches(epoch=2)))
    assert not torch.equal(seeded[0], whole[0][0])
    equal(next(iter(loader.batches())), next(iter(loader.batches(epoch=0, first_step=0))))
    with pytest.raises(ValueError, match="first_step must be 0 to 2"):
        loader.batches(first_step=3)


def test_worker_processes_give_the_same_batches(coco):
    ones = [list(WorkerDetectionLoader(coco, 5, size=32, train=True, workers=n).batches(1)) for n in (0, 1)]
    for (images, targets), (others, their) in zip(*ones, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(targets.boxes, their.boxes)
        assert torch.equal(targets.index, their.index)


@pytest.mark.parametrize("kind", LOADERS)
def test_unreadable_images_are_skipped_by_name(tmp_path, kind):
    root = make_coco(tmp_path / "broken")
    (root / "train" / "000002.png").unlink()
    (root / "train" / "000005.png").write_bytes(b"")
    dataset = open_detection("coco", root)
    loader = kind(dataset, 2, size=32, train=False, workers=0)
    assert sum(len(images) for images, _ in loader.batches()) == 4
    assert [name[-10:] for name in loader.skipped.reasons] == ["000002.png", "000005.png"]
    for images, targets in kind(dataset, 3, size=32, train=True, workers=0).batches():
        assert len(images) == len(targets.boxes) == 3
    with pytest.raises(OSError, match=r"2 images cannot be read, the limit is 1.*000002\.png: there is no such file"):
        list(kind(dataset, 2, size=32, train=False, workers=0, max_unreadable=1).batches())


def test_none_of_the_images_there(tmp_path):
    root = make_coco(tmp_path / "empty")
    for file in (root / "train").iterdir():
        file.unlink()
    dataset = open_detection("coco", root)
    with pytest.raises(OSError, match="none of the images of empty can be read"):
        KeptDetectionLoader(dataset, 2, size=32, train=False, workers=0)
    with pytest.raises(OSError, match="no image of epoch 0, step 0"):
        list(WorkerDetectionLoader(dataset, 2, size=32, train=True, workers=0).batches())


def test_small_sets_are_kept_and_large_ones_are_not(coco):
    options = {"size": 32, "train": False, "workers": 0}
    assert isinstance(make_detection_loader(coco, 2, **options), KeptDetectionLoader)
    bytes_of_all = 10 * 3 * 32 * 32
    assert isinstance(make_detection_loader(coco, 2, **options, kept_bytes=bytes_of_all), KeptDetectionLoader)
    assert isinstance(make_detection_loader(coco, 2, **options, kept_bytes=bytes_of_all - 1), WorkerDetectionLoader)
    with pytest.raises(ValueError, match="size must be at least 1"):
        make_detection_loader(coco, 2, **(options | {"size": 0}))
    with pytest.raises(ValueError, match="workers must be at least 0"):
        make_detection_loader(coco, 2, **(options | {"workers": -1}))
    with pytest.raises(ValueError, match="do not fill one batch of 11"):
        make_detection_loader(coco, 11, **(options | {"train": True}))
