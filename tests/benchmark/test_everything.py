"""bench all: what is measured, what is not measured again, and what is left where it is stopped."""

import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from aaconv.benchmark import everything
from aaconv.cli import _parse
from aaconv.utils.environment import environment
from support.places import REPOSITORY

CPU = torch.device("cpu")
TINY = "attention --device cpu --shapes 1:2x2:4/2 --variants"
GPU = "attention-{gpu}"

pytestmark = pytest.mark.slow


@pytest.fixture
def started(monkeypatch):
    """The commands that were started, in their order; what only compiles has a number for a name."""
    words, start = [], everything.Job.start

    def noted(job, *more):
        words.append((job.name, "--json" in more))
        return start(job, *more)

    monkeypatch.setattr(everything.Job, "start", noted)
    return words


@pytest.fixture(autouse=True)
def _of_one_commit(monkeypatch):
    """Also where somebody edits the code as the tests run."""
    monkeypatch.setenv("AACONV_COMMIT", "abc")


def measure(folder, commands, **options):
    everything.run(folder, commands=commands, device=CPU, **options)


def test_each_command_is_compiled_and_then_measured_into_a_file_of_its_own(tmp_path, started, capsys):
    measure(tmp_path / "new", {GPU: f"{TINY} eager", "other": f"{TINY} sdpa"}, side_by_side=4)
    device = environment(CPU)["device"]
    (gpu,) = (path.stem.removeprefix("attention-") for path in (tmp_path / "new").glob("attention-*.json"))
    assert gpu
    assert all(word in device.lower() for word in gpu.split("-"))
    assert started[:2] == [("0", False), ("1", False)]
    assert started[2:] == [(f"attention-{gpu}", True), ("other", True)]
    (row,) = json.loads((tmp_path / "new" / "other.json").read_text())["rows"]
    assert row["variant"] == "sdpa"
    assert "2 measured, 0 missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "pieces"),
    [
        ("table2 --rounds 4", ["table2 --rounds 4"]),
        (
            "model --models a b:x=1 --train --rounds 4",
            ["model --models a --train --rounds 4", "model --models b:x=1 --train --rounds 4"],
        ),
        ("model --rounds 4 --models a", ["model --rounds 4 --models a --train", "model --rounds 4 --models a --infer"]),
        (
            "examples/compare_speed.py --models a b --modes graphs",
            [
                f"examples/compare_speed.py --models {model} --modes graphs --phases {phase}"
                for phase in ("training", "inference")
                for model in "ab"
            ],
        ),
        (
            "examples/compare_speed.py --models a --phases training",
            ["examples/compare_speed.py --models a --phases training"],
        ),
    ],
)
def test_networks_and_phases_compile_apart(command, pieces):
    assert [" ".join(piece) for piece in everything._pieces(tuple(command.split()))] == pieces


def test_kernels_that_were_chosen_beside_others_are_chosen_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    cache = tmp_path / "cache"
    choice, kernel, of_others, older = (
        cache / name for name in ("ab/c.best_config", "ab/c.py", "helion/c.best_config", "ab/d.best_config")
    )
    for file in (choice, kernel, of_others, older):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        os.utime(file, (time.time() + 3600,) * 2)  # as if it were made while the command runs
    os.utime(older, (0, 0))
    measure(tmp_path / "new", {"one": f"{TINY} eager"})
    assert choice.exists()
    measure(tmp_path / "new", {"two": f"{TINY} eager"}, side_by_side=1)
    assert not choice.exists()
    assert kernel.exists()
    assert of_others.exists()
    assert older.exists()


def test_what_is_there_of_this_commit_is_not_measured_again(tmp_path, started, monkeypatch):
    commands = {"one": f"{TINY} eager", "two": f"{TINY} sdpa"}
    measure(tmp_path, commands, only=["one"])
    first = (tmp_path / "one.json").read_bytes()
    measure(tmp_path, commands)
    assert started == [("one", True), ("two", True)]
    assert (tmp_path / "one.json").read_bytes() == first
    monkeypatch.setenv("AACONV_COMMIT", "def")
    measure(tmp_path, commands, only=["one"])
    assert started[2:] == [("one", True)]
    assert json.loads((tmp_path / "one.json").read_text())["environment"]["commit"] == "def"


@pytest.mark.parametrize(
    "content", ["{}", "[]", "[1]", "null", '{"environment": null}', '[{"environment": []}]', "no json"], ids=str
)
def test_a_file_of_something_else_is_measured_again(tmp_path, content):
    job = everything.Job("one", ("attention",), tmp_path)
    job.result.write_text(content)
    job.log.write_text(f"{job.command}\n")
    assert not everything._is_of(job, environment(CPU))


@pytest.mark.parametrize(
    ("changed", "known"),
    [({}, True), ({"commit": None}, False), ({"commit": "abc-modified"}, False), ({"torch": "1.0"}, False)],
    ids=str,
)
def test_results_of_other_code_or_another_command_are_measured_again(tmp_path, changed, known):
    here = environment(CPU) | changed
    job = everything.Job("one", ("attention", "--rounds", "2"), tmp_path)
    job.result.write_text(json.dumps({"environment": here if "torch" not in changed else environment(CPU)}))
    job.log.write_text(f"{job.command}\nits table\n")
    assert everything._is_of(job, here) == known
    assert not everything._is_of(everything.Job("one", ("attention",), tmp_path), here)


@pytest.mark.processes
def test_a_terminated_process_leaves_no_command_behind(tmp_path):
    script = (
        "import sys, torch\nfrom aaconv.benchmark import everything\n"
        "long = 'attention --device cpu --rounds 1000000 --variants sdpa --shapes 1:4x4:4/2'\n"
        "everything.run(sys.argv[1], commands={'long': long}, device=torch.device('cpu'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], start_new_session=True) as process:
        log, until = tmp_path / "long.unfinished.log", time.monotonic() + 60
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):  # of its session
            os.killpg(process.pid, 0)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written: .*; choose another place"):
        measure(tmp_path / path, {"one": TINY})


def test_what_fails_is_named_and_the_others_are_measured(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("older")
    with pytest.raises(SystemExit) as stopped:
        measure(tmp_path, {"bad": "attention --device cpu --shapes x", "good": f"{TINY} eager"}, side_by_side=1)
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert f"bad: failed with exit status 2; see {tmp_path / 'bad.unfinished.log'}" in said
    assert "1 measured, 1 missing" in said
    assert "a shape is" in (tmp_path / "bad.unfinished.log").read_text()
    assert (tmp_path / "bad.json").read_text() == "older"
    assert (tmp_path / "good.json").exists()


def test_a_limit_ends_the_running_command_and_begins_no_other(tmp_path, capsys):
    (tmp_path / "long.unfinished.json").write_text("of an earlier try")
    long = "attention --device cpu --rounds 1000000 --variants sdpa --shapes 1:4x4:4/2"
    with pytest.raises(SystemExit):
        measure(tmp_path, {"long": long, "next": f"{TINY} eager"}, limit=8)
    said = capsys.readouterr().err
    assert "long: ended, the time is over; it has no row so far" in said
    assert "next: not begun, the time is over" in said
    assert not list(tmp_path.glob("next*"))
    assert not (tmp_path / "long.json").exists()


def test_unknown_names_are_named(tmp_path):
    for listed in (False, True):
        with pytest.raises(ValueError, match=r"unknown benchmark 'two'; choose of attention$"):
            measure(tmp_path, {GPU: TINY}, only=["two"], listed=listed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_list_is_advised(tmp_path):
    with pytest.raises(ValueError, match="bench all needs a GPU, and torch finds none; --list prints"):
        everything.run(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def run_loop(monkeypatch):
    """Runs an example of the list in this process, on a small network."""

    def run(words):
        small = ("--models", "test_resnet", "--modes", "eager", "--batch", "2", "--size", "32", "--rounds", "1")
        monkeypatch.setattr(sys, "argv", [*words, *small])
        runpy.run_path(str(REPOSITORY / words[0]), run_name="__main__")

    return run


def test_the_list_is_of_commands_that_can_be_run(run_loop, capsys):
    everything.run("", listed=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(everything.COMMANDS)
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "aaconv":
            _parse(words)  # or it ends the process
        else:
            run_loop(words)


def test_an_example_is_measured_as_a_benchmark_is(tmp_path, started, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no examples
    tiny = "examples/compare_speed.py --models test_resnet --batch 1 --size 32 --phases inference"
    for _ in range(2):
        measure(tmp_path, {"loop": tiny}, side_by_side=1)
    assert started == [("0", False), ("loop", True)]
    (row,) = json.loads((tmp_path / "loop.json").read_text())["rows"]
    assert (row["model"], row["to_first"]) == ("test_resnet", 1.0)
    assert (tmp_path / "loop.log").read_text().startswith(f"python {tiny}\n")


def test_what_only_a_checkout_has_is_left_out_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(everything, "CHECKOUT", tmp_path)
    measure(tmp_path / "new", {"loop": "examples/compare_speed.py"})
    said = capsys.readouterr().err
    assert "1 left out: they run examples/, which is in a checkout of the repository only" in said
    assert "0 measured, 0 missing" in said
