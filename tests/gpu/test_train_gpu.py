"""Training on a GPU: no step waits for it, and every way to compute gives the same course."""

import shutil

import pytest
import torch

from aaconv.recipes import Model
from aaconv.training import checkpoint
from aaconv.training.trainer import Trainer, resume, settings, train
from aaconv.utils.distributed import World
from support.training_runs import outcome, tiny
from support.waiting import waiting_is_an_error

pytestmark = [pytest.mark.usefixtures("no_curves"), pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

PLAIN = Model("plain_wrn16_4")
AUGMENTED = Model("aa_wrn16_4")


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "ema": 0.9, "clip_grad": 1.0, "model": AUGMENTED},
        {"precision": "fp16", "accumulate": 2, "model": PLAIN},
        {"precision": "bf16", "compile": "default", "model": PLAIN},
        {"precision": "bf16", "compile": "reduce-overhead", "model": AUGMENTED, "ema": 0.9},
    ],
    ids=lambda changes: "-".join(str(changes[name]) for name in ("precision", "compile") if name in changes),
)
def test_no_step_waits_for_the_device(changes, tmp_path):
    trainer = Trainer(tiny(**changes), tmp_path / "run", World(torch.device("cuda")))
    trainer.train_epoch()
    trainer.finish_epoch()
    batches = trainer.train_loader.batches(1)
    trainer.learner.net.train()  # the evaluation has left it otherwise: it would be compiled again
    with waiting_is_an_error():
        for step in range(3):
            trainer.learner.take_step(step, next(batches), batches, trainer.sums)
            trainer.sums.ask()
            trainer.sums.answer()


# Groups are normalised in this network, not batches: parts of a batch give the same, too. At ten times the rate ten
# steps make a third of the loss out of the rounding of bfloat16.
COURSE = {"model": Model("test_efficientnet_gn"), "lr": 0.0005}


def course(folder, **changes):
    """The rows of a run that leaves out no step."""
    recipe = tiny(**COURSE | changes)
    with settings(recipe):
        trainer = Trainer(recipe, folder, World(torch.device("cuda")))
        scaler = trainer.learner.scaler
        # Where torch begins fp16 overflows here, and the first two steps would be left out.
        scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})
        trainer.train()
    assert scaler.get_scale() == (1024 if scaler.is_enabled() else 1)
    return trainer.rows


@pytest.fixture(scope="module")
def plain_course(tmp_path_factory):
    return course(tmp_path_factory.mktemp("runs") / "plain")


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": "default"},
        {"compile": "reduce-overhead"},
        {"compile": "reduce-overhead", "accumulate": 2},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp16", "compile": "default"},
        {"channels_last": False},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_every_way_gives_the_same_course(changes, plain_course, tmp_path):
    for one, other in zip(plain_course, course(tmp_path / "changed", **changes), strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=0.03)
        assert other["loss"] == pytest.approx(one["loss"], rel=0.06)


def test_a_loss_that_is_not_finite_is_found_by_the_device(tmp_path):
    trainer = Trainer(tiny(), tmp_path / "run", World(torch.device("cuda")))
    for value in (1.0, 2.0, float("nan"), 3.0):
        trainer.sums.add(torch.tensor(value, device="cuda"), {"top1": torch.tensor(50.0, device="cuda")})
    assert trainer.sums.first_bad() == 2
    trainer.sums.ask()
    torch.cuda.synchronize()
    assert trainer.sums.answer()[1] is False


def test_deterministic_runs_and_resumed_ones_are_the_same_bytes(tmp_path):
    recipe = tiny(precision="bf16", ema=0.8, checkpoint_every=3, deterministic=True)
    for name in ("one", "two"):
        train(recipe, tmp_path / name, device="cuda")
    for path in checkpoint.paths(tmp_path / "two/checkpoints")[1:]:
        shutil.rmtree(path)
    (tmp_path / "two/summary.json").unlink()
    resume(tmp_path / "two", device="cuda")
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
