"""The loop: what it counts, what it leaves behind, and that every way to compute a step computes the same."""

import copy
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from aaconv.recipes import Model
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import read_metrics, read_speed
from aaconv.tasks import data
from aaconv.tasks.classify import Classify, count
from aaconv.training import checkpoint
from aaconv.training.learner import Learner
from aaconv.training.running_sums import RunningSums
from aaconv.training.trainer import WORKSPACE, Trainer, settings, train
from aaconv.utils.distributed import World
from support.training_runs import tiny

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

CPU = World(torch.device("cpu"))
WITHOUT_DROPOUT = Model("test_efficientnet_gn")


def first_steps(recipe, steps=3):
    """The weights after a few steps, and the sums."""
    trainer_task = Classify(recipe)
    loader, _ = trainer_task.loaders(recipe.batch // recipe.accumulate, CPU)
    learner = Learner(recipe, trainer_task, CPU, len(loader) // recipe.accumulate)
    sums = RunningSums(trainer_task.running, CPU.device)
    learner.net.train()
    batches = loader.batches()
    for step in range(steps):
        learner.take_step(step, next(batches), batches, sums)
    return learner, sums


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def momenta(learner):
    return torch.cat([state["momentum_buffer"].flatten() for state in learner.optimizer.state.values()])


# What a run leaves behind


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    recipe = tiny(epochs=3, eval_every=2, ema=0.9, keep=2)
    return run, recipe, train(recipe, run, device="cpu")


def test_a_row_an_epoch(finished):
    rows = read_metrics(finished[0])
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 5), (2, 10), (3, 15)]
    assert list(rows[0]) == ["epoch", "step", "lr", "train_loss", "train_top1", "loss", "top1", "top5"]
    assert all(0 <= row["train_top1"] <= 100 for row in rows)
    assert [row["epoch"] for row in read_speed(finished[0])] == [1, 2, 3]
    assert all(row["seconds"] > 0 and row["peak_memory_bytes"] > 0 for row in read_speed(finished[0]))


def test_evaluation_every_few_epochs_and_at_the_end(finished):
    assert [row["loss"] is None for row in read_metrics(finished[0])] == [True, False, False]


def test_the_summary_says_what_was_done(finished):
    run, recipe, summary = finished
    last = read_metrics(run)[-1]
    assert {name: summary[name] for name in ("loss", "top1", "top5")} == {
        name: last[name] for name in ("loss", "top1", "top5")
    }
    assert (summary["model"], summary["options"], summary["data"]) == (
        recipe.model.name,
        recipe.model.options,
        "shapes",
    )
    assert (summary["seed"], summary["epochs"], summary["steps"], summary["finished"]) == (0, 3, 15, True)
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["best"]["value"] == max(row["top1"] for row in read_metrics(run) if row["top1"] is not None)


def test_the_newest_checkpoints_are_kept(finished):
    assert [path.name for path in checkpoint.paths(finished[0] / "checkpoints")] == ["step-00000010", "step-00000015"]


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10]), (2, [2, 4, 6, 8, 10]), (4, [4, 8, 10]), (None, [5, 10])])
def test_no_step_is_saved_twice(every, steps, tmp_path, monkeypatch):
    saved, save = [], checkpoint.save

    def record(folder, step, *args, **kwargs):
        saved.append(step)
        return save(folder, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", record)
    train(tiny(checkpoint_every=every), tmp_path / "run", device="cpu")
    assert saved == steps


@pytest.mark.parametrize("which", ["ema", "best"])
def test_what_is_evaluated_are_the_weights_in_the_folder(finished, which):
    run, recipe, summary = finished
    loaded = load_model(run, weights=which)
    _, test = Classify(recipe).loaders(7, CPU)
    found = count(loaded.model, test.batches(), 2).metrics()
    expected = (
        summary if which == "ema" else next(row for row in read_metrics(run) if row["top1"] == summary["best"]["value"])
    )
    assert found["top1"] == expected["top1"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_curves_are_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("aaconv.runs.curves.draw", lambda runs, path: drawn.append((runs, path)))
    train(tiny(epochs=1), tmp_path / "run", device="cpu")
    assert drawn == [([tmp_path / "run"], tmp_path / "run/curves.png")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nothing"}, "nothing"),
        ({"model": Model("aa_wrn16_4", {"heads": 3})}, "heads"),
        ({"batch": 100}, "80 images do not fill one batch of 100"),
    ],
)
def test_nothing_is_made_when_the_recipe_cannot_run(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tiny(**changes), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


# Steps


def test_accumulated_parts_are_the_whole_batch():
    whole, sums = first_steps(tiny(model=WITHOUT_DROPOUT))
    parts, parts_sums = first_steps(tiny(model=WITHOUT_DROPOUT, accumulate=4))
    torch.testing.assert_close(weights(parts.model), weights(whole.model), rtol=1e-4, atol=1e-6)
    assert parts_sums.means() == pytest.approx(sums.means(), rel=1e-5)
    assert not torch.equal(weights(whole.model), weights(first_steps(tiny(model=WITHOUT_DROPOUT), steps=2)[0].model))


def test_accumulated_parts_outlive_the_memory_of_a_cuda_graph(monkeypatch):
    """The graph of a part writes where that of the part before has left its gradients: here, what is not finite."""
    recipe = tiny(model=WITHOUT_DROPOUT, accumulate=2, warmup=0.0)
    expected = weights(first_steps(recipe)[0].model)
    left = []

    def prepare(model, **options):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: left.append(parameter.grad.detach()))
        model.register_forward_pre_hook(overwrite)

    def overwrite(*_):
        while left:
            left.pop().fill_(torch.nan)

    monkeypatch.setattr(torch.nn.Module, "compile", prepare)
    learner, _ = first_steps(replace(recipe, compile="reduce-overhead"))
    assert left
    assert torch.equal(weights(learner.model), expected)


def test_a_step_is_the_one_of_plain_torch():
    """Momentum SGD with weight decay on everything, label smoothing, the schedule's rate, clipped gradients."""
    recipe = tiny(model=WITHOUT_DROPOUT, label_smoothing=0.1, weight_decay=0.01, clip_grad=0.5, warmup=0.0)
    task = Classify(recipe)
    loader, _ = task.loaders(recipe.batch, CPU)
    learner = Learner(recipe, task, CPU, len(loader))
    model = copy.deepcopy(learner.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=0.01)
    learner.net.train()
    for step, (images, labels) in zip(range(3), loader.batches(), strict=False):
        optimizer.param_groups[0]["lr"] = recipe.lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 10)).item())
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        learner.take_step(step, (images, labels), iter(()), RunningSums(task.running, CPU.device))
    torch.testing.assert_close(weights(learner.model), weights(model), rtol=1e-5, atol=1e-7)


def test_the_average_of_the_weights_follows_them():
    learner, _ = first_steps(tiny(ema=0.75), steps=1)
    assert torch.equal(weights(learner.ema.module), weights(learner.model))  # the first step is taken over
    before = weights(learner.ema.module)
    loader, _ = learner.task.loaders(16, CPU)
    learner.take_step(2, next(loader.batches()), iter(()), RunningSums(("top1",), CPU.device))
    expected = 0.75 * before + 0.25 * weights(learner.model)
    torch.testing.assert_close(weights(learner.ema.module), expected)
    assert learner.eval_model is learner.ema.module


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp16"}, {"channels_last": False}])
def test_precision_and_layout_change_little(changes):
    plain, sums = first_steps(tiny(model=WITHOUT_DROPOUT, lr=0.005))
    changed, others = first_steps(tiny(model=WITHOUT_DROPOUT, lr=0.005, **changes))
    assert others.means()[0] == pytest.approx(sums.means()[0], rel=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in changed.model.parameters())
    if "precision" in changes:
        assert not torch.equal(weights(changed.model), weights(plain.model))


def test_fp16_scales_the_loss_and_keeps_the_scale(tmp_path):
    learner, _ = first_steps(tiny(precision="fp16"))
    assert learner.scaler.is_enabled()
    _, rest = learner.state([learner.random_state()])
    assert rest["scaler"]["scale"] == learner.scaler.get_scale()
    assert not first_steps(tiny(precision="bf16"))[0].scaler.is_enabled()


def test_fp16_leaves_out_a_step_that_overflows():
    """Its batch and its place in the schedule are used up; the weights and the momentum stay."""
    learner, sums = first_steps(tiny(precision="fp16", warmup=0.0), steps=0)
    batches = learner.task.loaders(16, CPU)[0].batches()
    learner.take_step(0, next(batches), batches, sums)
    for step, scale, overflows in ((1, 2.0**40, True), (2, 2.0**8, False)):
        learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": scale})
        before, momentum, rate = weights(learner.model), momenta(learner), learner.rate
        learner.take_step(step, next(batches), batches, sums)
        assert learner.scaler.get_scale() == (scale / 2 if overflows else scale)
        assert torch.equal(weights(learner.model), before) is overflows
        assert torch.equal(momenta(learner), momentum) is overflows
        assert learner.rate < rate
    assert learner.is_finite()


def test_the_seed_decides():
    once, again, other = (first_steps(tiny(seed=seed))[0].model for seed in (1, 1, 2))
    assert torch.equal(weights(once), weights(again))
    assert not torch.equal(weights(once), weights(other))


def test_sums_find_the_first_loss_that_is_not_finite():
    sums = RunningSums(("top1",), CPU.device)
    for loss in (1.0, 2.0, float("inf"), 3.0, float("nan")):
        sums.add(torch.tensor(loss), {"top1": torch.tensor(50.0)})
    assert sums.first_bad() == 2
    assert sums.answer()[1:] == (False, 5)


def test_sums_go_there_and_back():
    sums, other = RunningSums(("top1",), CPU.device), RunningSums(("top1",), CPU.device)
    for loss in (0.1, 0.2, 0.3):
        sums.add(torch.tensor(loss), {"top1": torch.tensor(30.0)})
    other.load([sums.state()], CPU)
    assert other.means() == sums.means() == pytest.approx([0.2, 30.0])
    assert other.first_bad() is None


def test_each_process_gets_its_own_sums_back():
    states = [{"parts": 2, "sums": [2.0, loss]} for loss in (1.0, 3.0)]
    for world, mean in ((World(CPU.device, 0, 2), 0.5), (World(CPU.device, 1, 2), 1.5), (CPU, 1.0)):
        sums = RunningSums((), CPU.device)
        sums.load(states, world)
        assert sums.means() == [mean]


@pytest.mark.parametrize("model", ["test_resnet", "test_vit"])
def test_other_networks_of_timm_train_as_well(model, tmp_path):
    """With batch norm; and one that is made for a size of image."""
    summary = train(tiny(model=Model(model), epochs=1), tmp_path / "run", device="cpu")
    assert load_model(tmp_path / "run").model.num_classes == 2
    assert summary["parameters"] > 0


def test_the_batch_must_divide():
    with pytest.raises(ValueError, match=r"batch must be divisible .* 3 x 1; try 15"):
        Trainer(tiny(), Path("none"), World(torch.device("cpu"), 0, 3))


# Evaluation


def test_every_image_is_counted_once():
    """Batches of 7 leave 2 of 30 for the last one, which is filled up for the network."""
    recipe = tiny()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(48, 2)).eval()
    _, test = Classify(recipe).loaders(7, CPU)
    found = count(model, test.batches(), 2)
    images, labels = (torch.cat(parts) for parts in zip(*test.batches(), strict=True))
    guesses = model(images).argmax(1)
    assert found.sums[0] == len(labels) == 30
    assert found.metrics() == {
        "loss": pytest.approx(F.cross_entropy(model(images), labels).item(), rel=1e-6),
        "top1": pytest.approx(100 * (guesses == labels).double().mean().item()),
        "top5": 100.0,
    }
    assert torch.equal(found.guesses, torch.stack([labels, guesses], dim=1))
    assert found.guesses.shape == (30, 2)


def test_no_image_to_evaluate_on_is_an_error():
    with pytest.raises(ValueError, match="no image"):
        count(torch.nn.Linear(1, 1), [], 2).metrics()


# Data


@pytest.fixture
def folder(tmp_path):
    for split, number in (("train", 12), ("val", 5)):
        for label, name in enumerate(("dark", "light")):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (40, 30), (80 + 100 * label, index, 0)).save(place / f"{index}.png")
    return tmp_path / "images"


def test_a_folder_of_images_with_held_out_ones(folder, tmp_path):
    recipe = tiny(data=f"folder/{folder}", size=32, batch=4, holdout=8, train_limit=None, eval_limit=6, epochs=1)
    train_set, held = data.open_data(recipe)
    names = [{images._file_name(int(index)) for index in images.chosen} for images in (train_set, held)]
    assert (len(train_set), len(held)) == (16, 6)
    assert not names[0] & names[1]
    summary = train(recipe, tmp_path / "run", device="cpu")
    assert summary["steps"] == 4
    assert load_model(tmp_path / "run").classes == ("dark", "light")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"holdout": 20_000, "train_limit": None}, "holdout must be 0 to 19999"),
        ({"holdout": 6000, "fold": 3, "train_limit": None}, "20000 images have folds 0 to 2 of 6000, got fold=3"),
        ({"fold": 1}, "fold is for holdout"),
        ({"data": "folder", "data_dir": "/nowhere"}, "does not exist"),
    ],
)
def test_limits_that_cannot_be_are_named(changes, message):
    with pytest.raises((ValueError, OSError), match=message):
        data.open_data(tiny(**changes))


def test_a_limit_beyond_the_images_is_named(folder):
    with pytest.raises(ValueError, match="train_limit must be 1 to 24, the number of images, got 25"):
        data.open_data(tiny(data=f"folder/{folder}", train_limit=25))


@pytest.mark.parametrize("deterministic", [True, False])
def test_switches_of_torch_are_as_before(deterministic, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = torch.backends.cudnn.benchmark
    with settings(tiny(deterministic=deterministic)):
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
        assert (WORKSPACE in os.environ) is deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark is before
    assert WORKSPACE not in os.environ


def test_labels_of_the_test_that_training_does_not_have_are_named_before(tmp_path):
    for split, labels in (("train", (0, 1)), ("val", (0, 5))):
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for label in labels:
                for ending, content in (("cls", str(label).encode()), ("png", png_bytes())):
                    member = tarfile.TarInfo(f"{label}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    recipe = tiny(data=f"wds/{tmp_path}", size=32, train_limit=None, eval_limit=None, batch=2)
    with pytest.raises(ValueError, match=r"labels up to 5, the training images up to 1; a classes\.txt"):
        train(recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    (tmp_path / "classes.txt").write_text("abcdef".replace("", "\n"))
    train(recipe, tmp_path / "run", device="cpu")
    assert load_model(tmp_path / "run").classes == tuple("abcdef")


def png_bytes():
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (40, 90, 10)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 55.9 TiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 11796480000 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_line_with_the_way_out(error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(Classify, "loss", fail)
    with pytest.raises(
        ValueError, match=r"memory does not suffice for batch=16 in 1 accumulation step; raise --accumul"
    ):
        train(tiny(), tmp_path / "run", device="cpu")


def test_a_run_that_diverged_says_how_to_start_again(tmp_path):
    run = tmp_path / "a good name"
    with pytest.raises(ValueError, match="not finite") as error:
        train(tiny(lr=1e30, checkpoint_every=1), run, device="cpu")
    assert str(error.value).endswith(
        f"start again with a lower lr, or clip_grad: aaconv train --from {run}/recipe.yaml --lr 1e+29"
    )
    assert f"; the last finite checkpoint is {run}/checkpoints/" in str(error.value)
