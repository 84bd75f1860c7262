"""Augmentation by timm and torchvision: batches depend on the seed, the epoch and the step alone."""

import random

import numpy as np
import pytest
import torch

from aaconv.data import make_loader, open_dataset
from aaconv.data.policy import Policy, policy_transform

POLICIES = {
    "timm's RandAugment": Policy(auto="rand-m9-mstd0.5-inc1"),
    "timm's AutoAugment": Policy(auto="original"),
    "timm's AugMix": Policy(auto="augmix-m5-w2"),
    "torchvision's RandAugment": Policy(auto="randaugment"),
    "torchvision's TrivialAugment": Policy(auto="trivialaugment"),
    "erasing": Policy(erasing=0.5),
    "mixup": Policy(mixup=0.8, smoothing=0.1),
    "CutMix": Policy(cutmix=1.0),
    "all": Policy("randaugment", erasing=0.5, mixup=0.8, cutmix=1.0, repeats=2, smoothing=0.1),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(scope="module")
def dataset():
    return open_dataset("shapes", number=24, size=24)


def batches(dataset, policy, size=None, first_step=0, epoch=1, **options):
    loader = make_loader(dataset, 8, train=True, size=size, workers=0, seed=3, policy=policy, **options)
    return [(images.clone(), labels) for images, labels in loader.batches(epoch, first_step)]


@each_policy
@pytest.mark.parametrize("size", [None, 28])
def test_batches_follow_from_seed_epoch_and_step(policy, size, dataset):
    whole = batches(dataset, policy, size)
    assert len(whole) == 3
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    later = batches(dataset, policy, size, first_step=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    for (ours, labels), (theirs, others) in zip(later, whole[1:], strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(labels, others)
    other_epoch = batches(dataset, policy, size, epoch=2)
    assert not torch.equal(other_epoch[0][0], whole[0][0])
    plain = batches(dataset, Policy(repeats=policy.repeats), size)
    assert not all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, plain, strict=True))


@pytest.mark.parametrize("policy", [POLICIES["torchvision's RandAugment"], POLICIES["timm's RandAugment"]])
def test_many_processes_see_the_images_of_one(policy, dataset):
    one = make_loader(dataset, 8, train=True, workers=0, policy=policy)
    two = [make_loader(dataset, 4, train=True, workers=0, policy=policy, rank=r, world_size=2) for r in (0, 1)]
    for (images, labels), *parts in zip(one.batches(1), *(loader.batches(1) for loader in two), strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_mixed_labels_are_shares_of_the_pixels(dataset):
    policy = Policy(cutmix=1.0, smoothing=0.1)
    for (images, labels), (plain, classes) in zip(batches(dataset, policy), batches(dataset, Policy()), strict=True):
        assert labels.shape == (8, len(dataset.classes))
        torch.testing.assert_close(labels.sum(1), torch.ones(8))
        share = (images == plain).all(1).float().mean((1, 2)).min()
        one_hot = torch.nn.functional.one_hot(classes, 2).float() * 0.9 + 0.05
        weight = ((labels - one_hot.flip(0)) / (one_hot - one_hot.flip(0)))[(classes != classes.flip(0))]
        assert weight.numel() == 0 or weight.min() <= share + 1e-3


def test_repeats_take_every_image_several_times_with_other_pixels(dataset):
    (images, labels), *_ = batches(dataset, Policy("randaugment", repeats=4))
    assert torch.equal(labels[:4], labels[:1].expand(4))
    assert torch.equal(labels[4:], labels[4:5].expand(4))
    assert not torch.equal(images[0], images[1])


def test_evaluation_is_never_changed(dataset):
    everything = POLICIES["all"]
    changed, plain = (make_loader(dataset, 8, train=False, policy=policy) for policy in (everything, Policy()))
    for (ours, labels), (theirs, others) in zip(changed.batches(), plain.batches(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(labels, others)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("randaugmet", "did you mean 'randaugment'"),
        ("nothing", "choose one of"),
        ("rand-q9", "is not what timm takes"),
    ],
)
def test_unknown_policies_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        policy_transform(name, (0.5, 0.5, 0.5))


def test_odd_batches_cannot_be_mixed(dataset):
    with pytest.raises(ValueError, match="need an even batch per process, got 7"):
        make_loader(dataset, 7, train=True, policy=Policy(mixup=1.0))
