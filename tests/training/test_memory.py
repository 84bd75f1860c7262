"""Training goes on for days: whatever a step leaves behind adds up."""

import gc
import resource

import pytest
import torch

from aaconv.training.trainer import Trainer
from aaconv.utils.distributed import World
from support.training_runs import tiny

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")


def tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.slow
def test_two_hundred_steps_leave_nothing_behind(tmp_path):
    recipe = tiny(epochs=1000, ema=0.9, eval_every=10)
    trainer, seen = Trainer(recipe, tmp_path / "run", World(torch.device("cpu"))), {}
    while trainer.steps < 200:
        trainer.train_epoch()
        trainer.finish_epoch()
        if trainer.steps in (50, 200):
            seen[trainer.steps] = tensors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (before, memory), (after, more) = seen[50], seen[200]
    assert after == before
    assert more - memory < 16, "MiB of the whole process"
