"""Which images a recipe trains and evaluates on: limits, images held out, folds."""

from dataclasses import replace

import torch

from aaconv.data import open_dataset
from aaconv.tasks import data
from support.training_runs import tiny


def test_limits_take_the_same_images_every_time():
    train_set, test_set = data.open_data(tiny(train_limit=40, eval_limit=20))
    again, _ = data.open_data(tiny(train_limit=40, eval_limit=20))
    assert (len(train_set), len(test_set)) == (40, 20)
    assert torch.equal(train_set.images, again.images)


def test_held_out_images_are_of_the_training_set_and_not_trained_on():
    train_set, held = data.open_data(tiny(train_limit=300, eval_limit=None, holdout=100))
    everything = open_dataset("shapes", number=400)
    assert (len(train_set), len(held)) == (300, 100)
    assert not _keys(train_set) & _keys(held)
    assert _keys(train_set) | _keys(held) == _keys(everything)
    _, again = data.open_data(tiny(train_limit=300, eval_limit=None, holdout=100, seed=5))
    assert torch.equal(held.images, again.images)


def test_folds_share_no_image_and_leave_equally_many():
    recipe = tiny(train_limit=300, eval_limit=None, holdout=100)
    folds = [data.open_data(replace(recipe, fold=fold)) for fold in range(4)]
    for train_set, held in folds:
        assert (len(train_set), len(held)) == (300, 100)
        assert not _keys(train_set) & _keys(held)
    assert set.union(*(_keys(held) for _, held in folds)) == _keys(open_dataset("shapes", number=400))


def _keys(dataset):
    return {image.numpy().tobytes() for image in dataset.images}
