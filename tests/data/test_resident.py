"""Files kept on the device: the pixels are those of the files, and what a step holds follows from seed, epoch, step."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import adjust_brightness, adjust_contrast, adjust_saturation

from aaconv.data import eval_transform, make_loader, open_dataset, resident
from aaconv.data.resident import InceptionLoader
from aaconv.recipes import Model
from aaconv.training.trainer import train
from support.training_runs import cut, end_like, tiny

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Photographs of noise, in all sizes and of two classes; one of them cannot be read."""
    root, pixels = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for number in range(12):
                size = (24 + 3 * number, 40 - number, 3)
                small = pixels.integers(256, size=(6, 6, 3), dtype=np.uint8)
                Image.fromarray(small).resize(size[:2]).save(root / split / name / f"{number}.png")
    (root / "val" / "bee" / "3.png").write_bytes(b"not an image")
    return root


def kept(root, *, split="train", batch=8, size=20, **options):
    return make_loader(
        open_dataset(f"folder/{root}", None, split), batch, train=split == "train", size=size, in_memory=True, **options
    )


def no_light(loader, monkeypatch):
    """The loader without its changes of light."""
    monkeypatch.setattr(loader, "_in_other_light", lambda images, *factors: images)
    return loader


def test_evaluation_sees_the_pixels_that_are_read_one_by_one(root, caplog):
    dataset = open_dataset(f"folder/{root}", None, "test")
    with caplog.at_level(logging.WARNING):
        loader = kept(root, split="test", workers=1)
    assert "skipped an unreadable image" in caplog.text
    read = make_loader(dataset, 8, train=False, size=20, workers=0)
    some, others = ([torch.cat(parts) for parts in zip(*one.batches(), strict=True)] for one in (loader, read))
    assert len(some[0]) == 23
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_follows_from_seed_epoch_and_step(root, device):
    loader, again = (kept(root, seed=3, device=device) for _ in range(2))
    assert isinstance(loader, InceptionLoader)
    every = list(loader.batches(epoch=2))
    assert len(every) == len(loader) == 3
    for (images, labels), (same, same_labels) in zip(every[1:], again.batches(epoch=2, first_step=1), strict=True):
        assert torch.equal(images, same)
        assert torch.equal(labels, same_labels)
        assert images.shape == (8, 3, 20, 20)
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(every[0][0], next(loader.batches(epoch=3))[0])
    assert not torch.equal(every[0][0], next(kept(root, seed=4, device=device).batches(epoch=2))[0])


def test_two_processes_share_the_batches_of_one(root):
    whole = [images for images, _ in kept(root, batch=8).batches(1)]
    parts = [[images for images, _ in kept(root, batch=4, rank=rank, world_size=2).batches(1)] for rank in range(2)]
    for step, images in enumerate(whole):
        torch.testing.assert_close(images, torch.cat([part[step] for part in parts]))


def test_the_whole_of_an_image_is_the_image_and_mirrored_it_is_mirrored(root, monkeypatch):
    loader = no_light(kept(root), monkeypatch)
    order = torch.arange(8)
    whole = torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1, 0])[:, None].expand(9, 8).clone()
    photographs, square = open_dataset(f"folder/{root}"), eval_transform(20, crop=1.0)
    expected = torch.stack([square(photographs[index][0]) for index in order])
    torch.testing.assert_close(loader.load(order, whole)[0], loader.normalize(expected), atol=1e-4, rtol=0)
    whole[4] = -1
    torch.testing.assert_close(loader.load(order, whole)[0], loader.normalize(expected.flip(3)), atol=1e-4, rtol=0)


def test_a_part_is_enlarged(root, monkeypatch):
    """The left half of a picture whose colour is the column, over its whole width."""
    loader = no_light(kept(root), monkeypatch)
    monkeypatch.setattr(
        loader, "images", torch.arange(0, 200, 10, dtype=torch.uint8)[None, None, :, None].expand(1, 20, 20, 3)
    )
    monkeypatch.setattr(loader, "normalize", lambda images: images)
    drawn = torch.tensor([0.5, 1, -0.5, 0, 1, 1, 1, 1, 0])[:, None]
    images, _ = loader.load(torch.zeros(1, dtype=torch.int64), drawn)
    expected = (10 * (torch.arange(20) / 2 + 0.25 - 0.5)).clamp(min=0)
    torch.testing.assert_close(images[0, 0, 7], expected, atol=1e-4, rtol=0)


def test_parts_lie_within_the_image_and_have_the_shares_that_inception_draws(root):
    big = InceptionLoader(
        replace(
            kept(root).dataset,
            images=torch.zeros(5000, 20, 20, 3, dtype=torch.uint8),
            labels=torch.zeros(5000, dtype=torch.int64),
        ),
        8,
    )
    _, (width, height, across, down, mirrored, *light) = big.plan(0)
    for length, middle in ((width, across), (height, down)):
        assert length.min() > 0.2
        assert length.max() <= 1
        assert (middle.abs() + length).max() <= 1 + 1e-6
    area = width * height
    assert area.min() >= 0.0799
    assert abs(float(area.mean()) - 0.53) < 0.02
    assert 0.47 < float((mirrored < 0).float().mean()) < 0.53
    for factor, (middle, width) in zip(light, ((1, 32 / 255), (1, 0.5), (1, 0.5), (0, 0.2)), strict=True):
        assert abs(float(factor.mean()) - middle) < 0.03
        assert middle + width - 0.01 < float(factor.max()) <= middle + width + 1e-6


@pytest.mark.parametrize(
    ("place", "factor", "reference"),
    [(0, 0.9, adjust_brightness), (1, 1.4, adjust_contrast), (2, 0.6, adjust_saturation)],
)
def test_changes_of_light_are_torchvisions(root, place, factor, reference):
    """But for its rounded luma: 0.2989, 0.587, 0.114."""
    loader, light = kept(root), [torch.ones(4) for _ in range(3)] + [torch.zeros(4)]
    light[place].fill_(factor)
    images = loader.images[:4].permute(0, 3, 1, 2).float()
    found = loader._in_other_light(images, *light)
    torch.testing.assert_close(found, 255 * reference(images / 255, factor), atol=0.2, rtol=0)


def test_hue_turns_colours_and_leaves_grey(root):
    loader, ones = kept(root), torch.ones(1)
    image = torch.tensor([[150.0, 90.0], [100.0, 90.0], [110.0, 90.0]]).view(1, 3, 1, 2)
    turned = loader._in_other_light(image, ones, ones, ones, torch.tensor([0.2]))
    torch.testing.assert_close(turned[..., 1], image[..., 1], atol=0.1, rtol=0)
    assert (turned[..., 0] - image[..., 0]).abs().max() > 20
    back = loader._in_other_light(turned, ones, ones, ones, torch.tensor([-0.2]))
    torch.testing.assert_close(back, image, atol=0.1, rtol=0)


def test_memory_that_does_not_suffice_is_told_in_a_line(root, monkeypatch):
    monkeypatch.setattr(resident, "free_memory", lambda device: 10_000)
    with pytest.raises(ValueError, match=r"24 images of 20 x 20 pixels take .*, cpu has .*; --no-in-memory reads them"):
        kept(root)


@pytest.mark.usefixtures("no_curves", "one_thread")
def test_a_run_on_kept_images_is_resumed_to_the_same_bytes(root, tmp_path):
    recipe = tiny(
        data=f"folder/{root}", size=24, in_memory=True, batch=8, train_limit=None, eval_limit=None,
        model=Model("plain_small"), checkpoint_every=2, keep=9,
    )  # fmt: skip
    train(recipe, tmp_path / "whole", device="cpu")
    cut(tmp_path / "whole", tmp_path / "run", newest=4)
    end_like(tmp_path / "whole", tmp_path / "run")
