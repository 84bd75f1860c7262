"""Detection on a GPU: steps that never wait for it, compiled, with the losses of a processor and of plain torch."""

from dataclasses import replace

import pytest
import torch

from aaconv import recipes
from aaconv.runs.run_folder import read_metrics
from aaconv.tasks.detect import Detect
from aaconv.training.trainer import Trainer, train
from aaconv.utils.distributed import World
from support.waiting import waiting_is_an_error

pytestmark = [
    pytest.mark.usefixtures("no_curves"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # Torch's own, of its look at the inputs of the loss, which is compiled by itself. Torch does not show it, either.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
COMPILED = pytest.mark.parametrize("compiled", ["default", "reduce-overhead"])
ADAPTED = {
    **dict.fromkeys(("lr_backbone", "ema"), 0.5),
    "decay": "matrices",
    "normalize": "model",
    "model": recipes.Model(
        "augmented_retinanet",
        {
            "backbone": "test_efficientnet",
            "augmentations": [{"where": "blocks.4.0.conv_pw", "combine": "add", "qk_norm": True, "num_heads": 2}],
            "channels": 64,
            "head_depth": 2,
            "anchor_scale": 1.5,
        },
    ),
}
"""As a detector on a pretrained backbone is trained."""


def recipe(**changes):
    """Four steps an epoch."""
    return replace(recipes.get("detection-demo"), train_limit=64, eval_limit=32, **changes)


def test_losses_are_those_of_the_processor():
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        task = Detect(recipe())
        model = task.build(task.data_info()).to(device, memory_format=torch.channels_last)
        loader, _ = task.loaders(16, World(torch.device(device)))
        losses.append([task.loss(model, batch)[0].item() for batch in loader.batches()])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@COMPILED
@pytest.mark.parametrize("changes", [{}, ADAPTED], ids=["demo", "adapted"])
def test_no_step_waits_for_the_gpu(compiled, changes, tmp_path):
    chosen = recipe(compile=compiled, precision="bf16", **changes)
    trainer = Trainer(chosen, tmp_path / "run", World(torch.device("cuda")))
    trainer.train_epoch()
    trainer.finish_epoch()
    learner, loader = trainer.learner, trainer.train_loader
    order, random = (part.cuda() for part in loader.plan(1))
    learner.net.train()  # the evaluation has left it otherwise: it would be compiled again
    with waiting_is_an_error():
        for step in range(3):
            part = slice(16 * step, 16 * step + 16)
            learner.take_step(step, loader.load(order[part], random[:, part]), iter(()), trainer.sums)
    assert trainer.sums.parts == 3
    assert trainer.sums.first_bad() is None


@pytest.fixture(scope="module")
def exact_convolutions():
    """Not in TensorFloat32, as usual: sixty steps would make too much out of its rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield


@pytest.fixture(scope="module")
def plain_course(exact_convolutions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(recipe(epochs=15, eval_every=3), folder, device="cuda")
    return read_metrics(folder)


@COMPILED
def test_it_learns_as_it_does_without_the_compiler(compiled, plain_course, tmp_path):
    """With evaluations in between, which are not compiled: what steps leave to the next ones must outlive them."""
    train(recipe(epochs=15, eval_every=3, compile=compiled), tmp_path / "run", device="cuda")
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["train_loss"] < 0.5 * rows[0]["train_loss"]
    for one, other in zip(plain_course, rows, strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=0.05)
        assert other["loss"] == (None if one["loss"] is None else pytest.approx(one["loss"], rel=0.1))


@COMPILED
def test_it_learns_in_bfloat16(compiled, tmp_path):
    train(recipe(epochs=15, eval_every=15, compile=compiled, precision="bf16"), tmp_path / "run", device="cuda")
    first, *_, last = read_metrics(tmp_path / "run")
    assert last["train_loss"] < 0.5 * first["train_loss"]
    assert 0 < last["loss"] < first["train_loss"]
