"""Loaders: what a step holds depends on seed, epoch and step alone, on every device, for any number of processes."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from aaconv.data import (
    ArrayDataset,
    CropAndFlip,
    DeviceLoader,
    WorkerLoader,
    cifar_train,
    eval_transform,
    inception_train,
    make_loader,
    open_dataset,
)
from aaconv.data.base_loader import mix
from aaconv.data.policy import Policy
from aaconv.data.transforms import fill_colour
from support.image_files import save_images

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
KINDS = ["device", "worker"]

# Python 3.12 warns of any fork beside threads, and torch has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def numbered(number=50, size=9):
    """Images of noise; the label is the number of the image, so that batches tell whom they hold."""
    images = torch.randint(
        256, (number, size, size + 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    classes = tuple(str(label) for label in range(number))
    return ArrayDataset(
        "numbered", images, torch.arange(number), classes, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), CropAndFlip(2)
    )


def build(kind, dataset, batch_size, *, workers=0, **options):
    if kind == "device":
        return DeviceLoader(dataset, batch_size, **options)
    return WorkerLoader(dataset, batch_size, transform=inception_train(8), workers=workers, **options)


def labels_of(batches):
    return [labels.tolist() for _, labels in batches]


def assert_same(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others)
    for (images, labels), (other_images, other_labels) in zip(some, others, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


# Order, resuming, shards


@pytest.mark.parametrize("kind", KINDS)
def test_training_shuffles_every_epoch_and_drops_the_rest(kind):
    loader = build(kind, numbered(50), 8, train=True)
    epochs = [labels_of(loader.batches(epoch)) for epoch in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [8] * 6
        assert len(loader) == 6
        assert len({label for batch in epoch for label in batch}) == 48
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_can_be_resumed_at_any_step_bit_for_bit(kind):
    options = {"train": True, "seed": 7}
    whole = list(build(kind, numbered(), 8, **options).batches(2))
    fresh = build(kind, numbered(), 8, **options)
    torch.rand(5)  # the loop's own random numbers do not matter
    for step in (0, 1, 5, 6):
        assert_same(whole[step:], fresh.batches(2, step))
    with pytest.raises(ValueError, match="first_step must be 0 to 6, the steps of an epoch, got 7"):
        fresh.batches(2, 7)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        fresh.batches(-1)
    assert_same(fresh.batches(), fresh.batches(0, 0))
    other = list(build(kind, numbered(), 8, train=True, seed=8).batches(2))
    assert labels_of(other) != labels_of(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_every_epoch_is_augmented_in_its_own_way(kind):
    one = replace(numbered(), images=numbered().images[:1].expand(50, -1, -1, -1), augmentation=CropAndFlip(8))
    loader = build(kind, one, 25, train=True)
    images = torch.cat([images for epoch in range(2) for images, _ in loader.batches(epoch)])
    first, second = (epoch.flatten(1) for epoch in images.split(50))
    assert len(first.unique(dim=0)) > 35
    assert sum(torch.equal(a, b) for a, b in zip(first, second, strict=True)) < 5


@pytest.mark.parametrize("kind", KINDS)
def test_every_seed_augments_in_its_own_way(kind):
    one = replace(numbered(), images=numbered().images[:1].expand(50, -1, -1, -1), augmentation=CropAndFlip(8))
    first, second = (
        torch.cat([images for images, _ in build(kind, one, 25, train=True, seed=seed).batches()]) for seed in (1, 2)
    )
    assert sum(torch.equal(a, b) for a, b in zip(first, second, strict=True)) < 5


def test_seeds_are_mixed_as_ever():
    """Runs of other versions can be resumed, and repeated, only with the same numbers."""
    assert mix(0, 1) == 2918264622725855778
    assert mix(3, 1, 2) == 5839918186241800584


@pytest.mark.parametrize("kind", KINDS)
def test_the_loops_random_numbers_are_left_alone(kind):
    state = torch.get_rng_state()
    list(build(kind, numbered(), 8, train=True).batches(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_the_global_batch_of_one(kind):
    one = list(build(kind, numbered(50), 12, train=True).batches(1))
    ranks = [list(build(kind, numbered(50), 4, train=True, rank=rank, world_size=3).batches(1)) for rank in range(3)]
    together = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert_same(one, together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "world_size", "batch_size"), [(50, 1, 8), (50, 3, 4), (7, 4, 2), (3, 4, 2)])
def test_evaluation_sees_every_image_once(kind, number, world_size, batch_size):
    seen = []
    for rank in range(world_size):
        loader = build(kind, numbered(number), batch_size, train=False, rank=rank, world_size=world_size)
        batches = labels_of(loader.batches())
        assert len(batches) == len(loader)
        mine = [label for batch in batches for label in batch]
        assert mine == list(range(rank, number, world_size))
        seen += mine
    assert sorted(seen) == list(range(number))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_the_networks_random_numbers_on_the_gpu_are_left_alone(kind):
    state = torch.cuda.get_rng_state()
    list(build(kind, numbered(), 8, train=True, device="cuda").batches(0))
    assert torch.equal(torch.cuda.get_rng_state(), state)


# Augmentation on the device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augmentation", [CropAndFlip(2), CropAndFlip(0), CropAndFlip(3, flip=False)])
def test_device_loader_does_what_a_loop_over_images_does(device, augmentation):
    dataset = numbered()
    loader = DeviceLoader(dataset, 8, train=True, seed=3, device=device, augmentation=augmentation)
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    plan = loader.plan(4).T.tolist()
    pad = augmentation.pad
    for step, (images, labels) in enumerate(loader.batches(4)):
        assert images.is_contiguous(memory_format=torch.channels_last)
        for image, label, (index, top, left, flip) in zip(
            images.cpu(), labels, plan[8 * step : 8 * step + 8], strict=True
        ):
            original, number = dataset[index]
            padded = v2.functional.pad(original, [pad], fill=fill_colour(dataset.mean))
            cut = v2.functional.crop(padded, top, left, 9, 11)
            cut = v2.functional.horizontal_flip(cut) if flip else cut
            assert label == number
            assert torch.allclose(image, (cut / 255 - mean) / std, atol=1e-6)
            assert torch.equal(((image * std + mean) * 255).round().to(torch.uint8), cut)


def test_law_of_the_device_is_torchvisions():
    """Over many draws of one image, cuts and mirrors come as often as out of torchvision's own transforms."""
    number, pad = 18_000, 1
    image = torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3) + 1
    many = ArrayDataset("one", image.expand(number, -1, -1, -1), torch.zeros(number, dtype=torch.long), ("a",),
                        (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), CropAndFlip(pad))  # fmt: skip
    loader = DeviceLoader(many, number, train=True)
    ((images, _),) = loader.batches()
    pixels = (images * 255 + 127.5).round()
    kinds, counts = pixels.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 9 * 2
    assert (counts / number - 1 / 18).abs().max() < 0.01

    transform = cifar_train(2, many.augmentation, many.mean)
    theirs = torch.stack([transform(many[0][0]) for _ in range(600)]).float().flatten(1).unique(dim=0)
    assert {tuple(row) for row in theirs.tolist()} == {tuple(row) for row in kinds.tolist()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_gives_the_images_of_the_processor():
    on = {device: DeviceLoader(numbered(), 8, train=True, device=device) for device in ("cpu", "cuda")}
    for (images, labels), (others, other_labels) in zip(on["cpu"].batches(1), on["cuda"].batches(1), strict=True):
        assert torch.allclose(images, others.cpu(), atol=1e-6)
        assert torch.equal(labels, other_labels.cpu())


def test_a_step_of_the_device_loader_compiles_as_one_graph():
    loader = DeviceLoader(numbered(), 8, train=True)
    plan = loader.plan(0)[:, :8]
    explained = torch._dynamo.explain(loader.load)(plan)
    assert explained.graph_break_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_is_the_one_asked_for(kind):
    loader = build(kind, numbered(), 8, train=True, dtype=torch.bfloat16)
    images, labels = next(iter(loader.batches()))
    assert images.dtype == torch.bfloat16
    assert labels.dtype == torch.int64


# Workers


def test_images_do_not_depend_on_who_decodes_them(tmp_path):
    dataset = open_dataset(str(save_images(tmp_path, 20)))
    alone, helped = (build("worker", dataset, 4, train=True, workers=workers) for workers in (0, 2))
    assert_same(alone.batches(0), helped.batches(0))
    abandoned = helped.batches(1)
    next(abandoned)
    assert_same(alone.batches(3, 2), helped.batches(3, 2))
    with pytest.raises(RuntimeError, match="one at a time"):
        next(abandoned)


def break_images(root, names):
    for name in names:
        (next(root.rglob(name))).write_bytes(b"broken")


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_counted_and_skipped(tmp_path, workers, caplog):
    save_images(tmp_path, 12)
    break_images(tmp_path, ["003.png", "004.png"])
    dataset = open_dataset(str(tmp_path))
    evaluation = make_loader(dataset, 4, train=False, size=16, workers=workers)
    with caplog.at_level(logging.WARNING):
        assert sum(len(labels) for _, labels in evaluation.batches()) == 10
    assert len(evaluation.skipped) == 2
    assert sum("003.png" in message and "of at most 50" in message for message in caplog.messages) == 1

    training = make_loader(dataset, 4, train=True, size=16, workers=workers)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for epoch in range(2):
            assert [len(labels) for _, labels in training.batches(epoch)] == [4, 4, 4]
    assert len(training.skipped) == len(caplog.messages) == 2, "the second epoch does not count them again"


@pytest.mark.parametrize(
    ("broken", "places"), [((1,), [0, 1, 2, 0]), ((1, 3), [0, 1, 0, 1]), ((0, 1, 3), [0, 0, 0, 0])]
)
def test_the_readable_images_of_a_batch_take_turns_to_fill_it(tmp_path, broken, places):
    save_images(tmp_path, 4)
    break_images(tmp_path, [f"{index:03}.png" for index in broken])
    training = make_loader(open_dataset(str(tmp_path)), 4, train=True, size=16, workers=0)
    ((images, labels),) = training.batches()
    readable = images[: 4 - len(broken)]
    assert len(readable.flatten(1).unique(dim=0)) == len(readable)
    assert torch.equal(images, readable[places])
    assert torch.equal(labels, labels[: len(readable)][places])


def test_too_many_unreadable_images_stop_the_run(tmp_path):
    save_images(tmp_path, 12)
    break_images(tmp_path, [f"{index:03}.png" for index in (0, 2, 5)])
    loader = make_loader(open_dataset(str(tmp_path)), 4, train=False, size=16, workers=0, max_unreadable=2)
    with pytest.raises(OSError, match=r"3 images cannot be read, the limit is 2; the first is .*000\.png: not an"):
        list(loader.batches())


def test_a_batch_without_a_readable_image(tmp_path):
    save_images(tmp_path, 8)
    break_images(tmp_path, [f"{index:03}.png" for index in (0, 2, 4, 6)])
    dataset = open_dataset(str(tmp_path))
    evaluation = make_loader(dataset, 4, train=False, size=16, workers=0)
    assert labels_of(evaluation.batches()) == [[1, 1, 1, 1]]
    training = make_loader(dataset, 1, train=True, size=16, workers=0)
    with pytest.raises(OSError, match=r"no image of epoch 0, step \d can be read"):
        list(training.batches())


# Transforms and the choice of a loader


def test_inception_transforms_give_the_size_asked_for():
    image = torch.randint(256, (3, 50, 80), dtype=torch.uint8)
    for transform in (inception_train(28), eval_transform(28)):
        assert transform(image).shape == (3, 28, 28)
        assert transform(image).dtype == torch.uint8
    assert not torch.equal(inception_train(28)(image), inception_train(28)(image))
    assert torch.equal(eval_transform(28)(image), eval_transform(28)(image))


def test_evaluation_looks_at_the_middle():
    """Of 64 x 128 pixels at 0.875 of the shorter side: the middle 56 x 56."""

    def white(margin):
        image = torch.zeros(3, 64, 128, dtype=torch.uint8)
        image[:, 4 - margin : 60 + margin, 36 - margin : 92 + margin] = 200
        return eval_transform(42)(image)

    assert white(2).eq(200).all(), "what is outside of the middle is not seen"
    assert white(-2)[:, [0, -1]].lt(150).all(), "its edges are"


def test_small_data_sets_stay_on_the_device_unless_they_shrink():
    shapes = open_dataset("shapes", number=64)
    assert isinstance(make_loader(shapes, 8, train=True), DeviceLoader)
    assert isinstance(make_loader(shapes, 8, train=True, size=32), DeviceLoader)
    smaller = make_loader(shapes, 8, train=True, size=24, workers=0)
    assert isinstance(smaller, WorkerLoader)
    assert next(iter(smaller.batches()))[0].shape == (8, 3, 24, 24)


@pytest.mark.parametrize("train", [True, False])
def test_small_data_sets_are_enlarged_after_their_own_augmentation(train):
    shapes = open_dataset("shapes", number=64)
    own, larger = (make_loader(shapes, 8, train=train, size=size, seed=3) for size in (None, 80))
    assert isinstance(larger, DeviceLoader)
    for (images, labels), (enlarged, again) in zip(own.batches(1), larger.batches(1), strict=True):
        assert torch.equal(labels, again)
        assert torch.equal(enlarged, interpolate(images, size=(80, 80), mode="bilinear"))


def test_images_that_workers_change_are_enlarged_too():
    shapes = open_dataset("shapes", number=16)
    loader = make_loader(shapes, 8, train=True, size=40, workers=0, policy=Policy(auto="rand-m9-mstd0.5"))
    assert isinstance(loader, WorkerLoader)
    assert next(iter(loader.batches()))[0].shape == (8, 3, 40, 40)


def test_images_of_files_have_224_pixels_unless_told(tmp_path):
    dataset = open_dataset(str(save_images(tmp_path, 2)))
    for train in (True, False):
        ((images, _),) = make_loader(dataset, 2, train=train, workers=0).batches()
        assert images.shape == (2, 3, 224, 224)


def test_training_augments_the_images_of_files_and_evaluation_does_not(tmp_path):
    dataset = open_dataset(str(save_images(tmp_path, 2)))
    for train in (True, False):
        loader = make_loader(dataset, 2, train=train, size=16, workers=0)
        epochs = [next(iter(loader.batches(epoch))) for epoch in range(2)]
        first, second = (images[labels.argsort()] for images, labels in epochs)
        assert torch.equal(first, second) == (not train)


def test_normalised_shapes_have_mean_zero_and_deviation_one():
    images, _ = next(iter(make_loader(open_dataset("shapes", number=1000), 1000, train=True).batches()))
    assert images.mean().abs() < 0.1
    assert images.std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be 0 to world_size - 1, got rank=2, world_size=2"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"batch_size": 26, "world_size": 2}, "50 images do not fill one batch of 52; lower --batch to at most 50"),
    ],
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        DeviceLoader(numbered(50), **{"batch_size": 8, "train": True, **wrong})


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_the_same_line_as_without_workers(tmp_path, workers):
    save_images(tmp_path, 4)
    dataset = replace(open_dataset(str(tmp_path)), classes=())
    loader = make_loader(dataset, 4, train=False, size=16, workers=workers)
    with pytest.raises(ValueError, match=r"^\S*000\.png has the label 0, expected 0 to -1: is it a labelled split\?$"):
        list(loader.batches())
