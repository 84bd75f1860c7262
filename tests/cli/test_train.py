"""recipes, train, eval, predict, record and plot on the command line, and an epoch of every kind on real images."""

import json
import os
import re
import subprocess
import sys
import tarfile

import pytest
import yaml
from PIL import Image

from aaconv import cli, recipes
from aaconv.runs import run_folder
from aaconv.training import launch, progress
from support.command_line import error_of, run
from support.places import SHARED_DATA
from support.tiny_runs import train_tiny, write_epochs

DATA = SHARED_DATA
TINY = ("--epochs", "1", "--batch", "16", "--train-limit", "32", "--eval-limit", "32", "--device", "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("width", [80, 120])
def test_recipes_fit_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    for words in ((), ("show", "imagenet-mnasnet-100-aa")):
        assert run("recipes", *words) == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width


def test_recipes_are_listed_and_shown(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run("recipes", "cifar100-wrn*") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split() == [
        "cifar100-wrn28-10-plain",
        "plain_wrn28_10",
        "cifar100",
        "500",
        "1",
        "Wide-ResNet",
        "80.3",
    ]
    assert run("recipes", "show", "cifar100-wrn28-10-aa") == 0
    printed = capsys.readouterr().out
    assert "table 1, AA-Wide-ResNet: Params 36.2M, GFlops 10.9, top-1 81.6, top-5 95.2" in printed
    assert "aaconv train cifar100-wrn28-10-aa\n" in printed
    assert all(words in printed for words in ("weight_decay", "0.0005", "our choice"))
    assert run("recipes", "demo", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)][:3] == ["demo-plain", "demo-se", "demo-aa"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["recipes", "sho", "demo-aa"], "one pattern at a time"),
        (["recipes", "show"], "which recipe"),
        (["recipes", "show", "demo-a"], "did you mean demo-aa"),
        (["recipes", "nothing-like-it"], "no recipe fits"),
        (["train"], "name a recipe"),
        (["train", "demo-aa", "--from", "x.yaml"], "name a recipe"),
        (["train", "demo-aaa"], "did you mean demo-aa"),
        (["train", "demo-aa", "--epoch", "3"], "'--epochs'"),
        (["train", "demo-aa", "--weigth-decay", "3"], "'--weight-decay'"),
        (["train", "demo-aa", "--train_limit", "3"], "'--train-limit'"),
        (["train", "demo-aa", "--epochs", "three"], "expected a whole number, got 'three'"),
        (["train", "demo-aa", "--epochs", "0"], "epochs must be at least 1"),
        (["train", "demo-aa", "--lr", "fast"], "expected a number or none"),
        (["train", "demo-aa", "--schedule", "cosin"], "'cosine'"),
        (["train", "demo-aa", "--model.num-head", "3"], "nearest: num_heads"),
        (["train", "demo-aa", "--model.num-heads"], "needs a value"),
        (["train", "demo-plain", "--model.num-heads", "2"], "only the aa_ models have attention"),
        (["train", "demo-plain", "--model", "aa_smal"], "did you mean aa_small"),
        (["train", "--from", "none.yaml"], "none.yaml"),
        (["train", "--resume", "none"], "none is not a run folder"),
        (["train", "--resume", "none", "--epochs", "3"], "leave out --epochs"),
        (["train", "demo-aa", "--resume", "none"], "leave out a recipe"),
        (["train", "demo-aa", "--device", "gpu"], "unknown device 'gpu'"),
        (["eval", "plain_small"], "--data NAME"),
        (["eval", "none/at/all", "--data", "shapes"], "is not a run folder"),
        (["predict", "plain_small", "none.png"], "no image or folder none.png"),
        (["record", "none"], "is not a run folder"),
        (["plot", "parms"], "'params'"),
        (["plot", "params", "flops"], "one figure at a time"),
        (["plot", "runs/none", "flops"], "one figure at a time, and without runs"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(arguments, told, here, capsys):
    assert told in error_of(capsys, *arguments)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "shape"], "'shapes'"),
        (["--train-limit", "10"], "10 images do not fill one batch"),
        (
            ["--train-limit", "64", "--holdout", "50"],
            "the recipe's eval_limit must be 1 to 50, the number of images, got 2000; aaconv train --eval-limit none",
        ),
    ],
)
def test_data_that_do_not_do_make_no_folder(words, told, here, capsys):
    assert run("train", "demo-aa", "--device", "cpu", *words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("file/run", "file/run cannot be made: file is a file, not a folder; name another folder"),
        ("file/a/run", "file/a/run cannot be made: file is a file, not a folder; name another folder"),
        ("/proc/run", "/proc/run cannot be begun: no folder can be made there; name another folder with --run-dir DIR"),
    ],
)
def test_places_that_take_no_run_are_named(folder, told, here, capsys):
    (here / "file").touch()
    few = ("--device", "cpu", "--batch", "8", "--train-limit", "8", "--eval-limit", "8")
    assert run("train", "demo-aa", *few, "--run-dir", folder) == 2
    assert capsys.readouterr().err == f"aaconv: error: {told}\n"


def test_every_field_can_be_overridden(capsys):
    values = {"epochs": 7, "lr": 0.5, "data_dir": "none", "ema": "none", "decay_epochs": "3 5.5", "schedule": "step"}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]
    more = ["--no-channels-last", "--deterministic", "--seed", "3", "--model.num-heads=2", "--model.position", "none"]
    assert run("train", "demo-aa", *words, *more, "--dry-run", "--device", "cpu") == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["epochs"], found["lr"], found["data_dir"], found["ema"]) == (7, 0.5, None, None)
    assert found["decay_epochs"] == [3.0, 5.5]
    assert (found["channels_last"], found["deterministic"], found["seed"]) == (False, True, 3)
    assert found["model"]["options"] == {"num_heads": 2, "position": "none"}
    assert run("train", "--help") == 0
    printed = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in printed for name in found if name not in ("evidence", "model"))


def test_a_recipe_is_taken_back_as_it_was_printed(here, capsys):
    assert run("train", "cifar100-small-aa", "--epochs", "9", "--dry-run") == 0
    (here / "mine.yaml").write_text(capsys.readouterr().out)
    assert run("train", "--from", "mine.yaml", "--dry-run", "--seed", "5") == 0
    again = yaml.safe_load(capsys.readouterr().out)
    assert again == yaml.safe_load((here / "mine.yaml").read_text()) | {"seed": 5}


def test_training_goes_into_numbered_folders(here, capsys):
    for folder, code in (("demo-plain-seed0", 0), ("demo-plain-seed0-2", 2)):
        assert run("train", "demo-plain", *TINY, "--record") == code
        assert run_folder.is_finished(here / "runs" / folder)
        printed = capsys.readouterr()
        assert f"into runs/{folder}" in printed.out
        assert "top-1 " in printed.out
        # A path is as long as it is.
        assert max(len(line) for line in printed.out.splitlines() if not line.startswith("recorded in")) <= 100
        (record,) = here.glob("results/*/*.json")
        kept = json.loads(record.read_text())
        # On another day: runs of the same second and the same speed have the same record.
        record.write_text(json.dumps(kept | {"date": "2026-01-01T00:00:00+00:00"}))
    assert "is there already, of another run" in printed.err  # the record of the first is not overwritten
    assert (kept["model"], kept["date"]) == ("plain_small", "2026-01-01T00:00:00+00:00")


def test_resume_of_a_finished_run_says_so(tiny, capsys):
    assert run("train", "--resume", str(tiny), "--device", "cpu") == 0
    assert "finished already" in capsys.readouterr().out


def test_torchrun_needs_one_folder_for_all(monkeypatch, here):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--run-dir DIR"):
        launch.free_folder(recipes.get("demo-aa"))


def test_torchrun_is_told_the_reason(here, monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "error.json"))
    error = error_of(capsys, "record", "none")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(here / "error.json"))
    assert error.rstrip() in str(ChildFailedError("aaconv", {0: failure}))


@pytest.mark.parametrize(("name", "slow"), [("demo-plain", False), ("cifar100-small-aa", True)])
def test_a_recipe_for_a_gpu_says_so_on_a_cpu(name, slow, here, monkeypatch, capsys):
    monkeypatch.setattr(launch.trainer, "train", lambda recipe, run, device: {})
    monkeypatch.setattr(launch, "conclusion", lambda summary, run: "")
    assert run("train", name, "--device", "cpu") == 0
    assert (launch.SLOW in capsys.readouterr().out) == slow
    assert launch.made_for_a_gpu(recipes.get(name)) == slow
    named = re.findall(r"[a-z]+-[\w*-]+", launch.SLOW)
    assert {found for pattern in named for found in recipes.names(pattern)} == {
        n for n in recipes.names() if not launch.made_for_a_gpu(recipes.get(n))
    }


def test_torchrun_leaves_our_options_alone():
    """It refuses words that could be short for several of its own, also behind the name of the script."""
    from torch.distributed.run import get_args_parser

    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    ours = cli.command_line().commands["train"].option_strings()
    assert "--run-dir" in ours
    ambiguous = [option for option in ours if len([name for name in theirs if name.startswith(option)]) > 1]
    assert [option for option in ambiguous if option not in theirs] == ["--run"]


def test_the_papers_result_stands_below_ours(tmp_path):
    folder = write_epochs(tmp_path / "run", "cifar100-wrn28-10-aa", [70.0], epochs=60)
    summary = {"top1": 70.0, "top5": 90.0, "loss": 1.0, "epochs": 60, "seconds_per_epoch": 75.0, "parameters": 1234}
    text = launch.conclusion(summary, folder)
    assert "top-1 70.00 %, top-5 90.00 %, loss 1.0000" in text
    assert "the paper: top-1 81.6, top-5 95.2 (table 1, AA-Wide-ResNet), with 500 epochs" in text
    held_out = launch.conclusion(summary, write_epochs(tmp_path / "held", "cifar100-wrn28-10-aa", [70.0], holdout=5000))
    assert "loss 1.0000, on 5,000 training images held out" in held_out
    assert "the paper:" not in held_out


def test_tensorboard_follows(here, monkeypatch, capsys):
    told = []

    class Fake:
        def __init__(self, folder):
            told.append(str(folder))

        def step(self, step, values):
            told.append(step)

        def epoch(self, row):
            told.append(row["top1"])

        def close(self):
            told.append("closed")

    monkeypatch.setattr(launch, "TensorBoard", Fake)
    monkeypatch.setattr(progress, "ELSEWHERE", 0.0)
    assert run("train", "demo-plain", *TINY, "--run", "r", "--tensorboard") == 0
    assert told[0] == "r/tensorboard"
    assert told[-1] == "closed"
    assert any(isinstance(one, float) for one in told)


def test_eval_predict_and_plot_of_a_run(tiny, here, capsys):
    assert run("eval", str(tiny), "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["top1"] == pytest.approx(run_folder.read_summary(tiny)["top1"])
    Image.new("RGB", (20, 30)).save(here / "a.png")
    (here / "b.png").write_text("no image")
    assert run("predict", str(tiny), "a.png", "--top", "1", "--device", "cpu") == 0
    assert capsys.readouterr().out.splitlines()[0] == "a.png"
    assert run("predict", str(tiny), "*.png", "--device", "cpu") == 2
    printed = capsys.readouterr()
    assert "1 of 2 images could not be read; the first is b.png" in printed.err
    assert run("plot", str(tiny)) == 0
    assert capsys.readouterr().out == "drew curves.png\n"
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_record_keeps_a_result(tiny, here, capsys):
    assert run("record", str(tiny), "--results", "kept") == 0
    (record,) = here.glob("kept/*/*.json")
    assert str(record.relative_to(here)) in capsys.readouterr().out


# Real images


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    unpack = DATA / "cifar100" / "unpack.py"
    if not unpack.exists():
        pytest.skip(f"no CIFAR-100 in {unpack.parent}")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, unpack, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def imagenette(tmp_path_factory):
    """Four photographs of each class and split."""
    tars = sorted((DATA / "imagenette160").glob("*.tar"))
    if not tars:
        pytest.skip(f"no Imagenette in {DATA / 'imagenette160'}")
    folder, taken = tmp_path_factory.mktemp("imagenette"), {}
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                place = os.path.dirname(member.name)
                if member.isfile() and member.name.endswith(".webp") and taken.setdefault(place, 0) < 4:
                    taken[place] += 1
                    tar.extract(member, folder, filter="data")
    (split,) = folder.rglob("train")
    return split.parent


def one_epoch(name, here, *words):
    """Train the recipe on the command line for an epoch of a few images, and give its summary."""
    few = ("--epochs", "1", "--batch", "4", "--train-limit", "8", "--eval-limit", "8", "--workers", "0")
    assert run("train", name, *few, "--device", "cpu", "--run", str(here / "run"), *words) == 0
    assert len(run_folder.read_metrics(here / "run")) == 1
    return run_folder.read_summary(here / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ge", "se", "aa", "aa-no-position"])
def test_an_epoch_of_cifar100(kind, cifar, here):
    summary = one_epoch(f"cifar100-small-{kind}", here, "--data-dir", str(cifar))
    assert (summary["data"], summary["steps"]) == ("cifar100", 2)
    assert summary["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "imagenette-plain-resnet18",
        "imagenette-aa-resnet18",
        "imagenette-windows-7",
        "imagenet-resnet34-aa-sinusoidal",  # steps
        "imagenet-mnasnet-075-aa",  # RMSProp, exponential decay, averaged weights
    ],
)
def test_an_epoch_of_photographs(name, imagenette, here):
    summary = one_epoch(name, here, "--data", str(imagenette), "--size", "64")
    assert summary["steps"] == 2
    assert summary["loss"] > 0
    if "mnasnet" in name:
        assert (here / "run" / run_folder.WEIGHTS["ema"]).is_file()
