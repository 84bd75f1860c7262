"""The command line: every command is reachable, and an error is one line that helps."""

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from matplotlib.figure import Figure

from aaconv import cli, demo
from aaconv.attention import BACKENDS
from aaconv.version import __version__
from support.command_line import error_of, run
from support.fresh import SOURCE, run_fresh

COMMANDS = (
    *(
        "demo",
        "recipes",
        "train",
        "record",
        "finetune",
        "eval",
        "predict",
        "detect",
        "explore",
        "report",
        "models",
        "cost",
        "table",
    ),
    *("plot", "data", "export", "push", "convert", "bench", "doctor", "completion"),
)
BELOW = {"bench": ("layer", "attention", "model", "accelerate", "table2", "train", "all"), "data": ("preview",)}
PATHS = [(command,) for command in COMMANDS] + [(first, word) for first, words in BELOW.items() for word in words]
WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    *([*path, "--help"] for path in PATHS),
    ["recipes"],
    ["recipes", "show", "cifar100-small-aa"],
    ["recipes", "--json"],
    ["models"],
    ["cost", "aa_resnet50"],
    ["table"],
    ["completion", "bash"],
    [],
    ["cots"],
    ["bench", "atention"],
    ["train", "demo-aa", "--epoch", "3"],
    ["train", "no-such-recipe"],
    ["data", "preview", "shapes", "--split", "tset"],
    ["recipes", "nothing-like-it"],
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {command} " in printed.replace("\n", " \n") for command in COMMANDS)
    assert {*cli.command_line().commands} == {*COMMANDS}


@pytest.mark.parametrize("path", [(), *((group,) for group in BELOW)], ids=" ".join)
def test_every_command_is_described_in_a_line(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*path, "--help") == 0
    names = COMMANDS if not path else BELOW[path[0]]
    *_, described = capsys.readouterr().out.rpartition(" ...\n")
    assert [line.split()[0] for line in described.splitlines()] == list(names)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_explains_itself_in_80_columns(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*path, "--help") == 0
    printed = capsys.readouterr().out
    assert f"usage: aaconv {' '.join(path)}" in printed
    assert ("example: " in printed) == (path[-1] not in BELOW)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert path[-1] in BELOW or lines[-1].startswith("example: ")  # whole, to be copied


def test_what_needs_no_torch_does_not_import_it():
    program = f"""
import io, sys
from aaconv.cli import main
out = sys.stdout
for words in {WITHOUT_TORCH}:
    sys.stdout = sys.stderr = io.StringIO()
    try:
        main(words)
    except SystemExit:
        pass
    found = [name for name in ("torch", "timm", "torchvision", "matplotlib", "numpy") if name in sys.modules]
    print(*words, "imports", *found, file=out) if found else None
"""
    assert run_fresh(program) == ""


def test_help_takes_no_time():
    run_fresh("import aaconv.__main__, aaconv.cli")  # compiled
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_fresh("from aaconv.__main__ import main; main()", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # seconds of CPU


def test_a_parser_remembers_what_it_prints():
    """Suggestions and completions are made from what the parsers remember."""

    def parsers(parser):
        return [parser, *(one for below in parser.commands.values() for one in parsers(below))]

    for parser in parsers(cli.command_line()):
        printed = parser.format_help()
        shown = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w.-]*(?=[ ,\n])", printed.partition("options:")[2]))
        assert set(parser.option_strings()) <= shown, parser.prog
        assert all(f"\n    {name}" in printed for name in parser.commands)


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"aaconv {__version__}\n"


def test_a_command_is_needed(capsys):
    assert "a command is missing: one of demo, recipes, train, " in error_of(capsys)
    missing = "a benchmark is missing: one of layer, attention, model, accelerate, table2, train, all; see"
    assert missing in error_of(capsys, "bench")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["cots", "aa_resnet50"], "'cost'"),
        (["bench", "atention"], "'attention'"),
        (["bench", "layer", "--bacth", "3"], "'--batch'"),
        (["cost", "aa_resnet50", "--layer"], "'--layers'"),
        (["plot", "param"], "'params'"),
        (["bench", "attention", "--variants", "tritn"], "'triton'"),
        (["cost", "aa_resnet5"], "aa_resnet50"),
        (["bench", "model", "--device", "cpu", "--models", "aa_resnet5"], "aa_resnet50"),
    ],
)
def test_a_misspelt_word_suggests_the_nearest(arguments, suggestion, capsys):
    assert suggestion in error_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["table", "12"], "tables 1 to 9"),
        (
            ["table", "two"],
            "no results on 'two'; a table is 1 to 9 or 'all', and our runs are on cifar100, tiny-imagenet, "
            "imagenette160, shapes-distance-N, coco-small",
        ),
        (["models", "nothing_like_this"], "no model fits"),
        (["cost", "aa_resnet50", "--size", "0"], "at least 1"),
        (["cost", "aa_resnet50", "--size", "9" * 30], "1 to 100,000"),
        (["cost", "levit_128s", "--size", "30"], "does not run on 3 x 30 x 30 images"),
        (["cost", "aa_resnet50.in1k"], "no weights called 'in1k'"),
        (["cost", "aa_resnet50", "--size", "1", "2", "3"], "got 3 numbers"),
        (["plot", "params", "-o", "figure.gif"], "'figure.gif'"),
        (["plot", "params", "-o", "mistyped/figure.png"], "there is no folder mistyped"),
        (
            ["plot", "params", "-o", "/proc/figure.png"],
            "/proc/figure.png cannot be written: /proc is not writable; ",
        ),
        (["bench", "layer", "--json", "mistyped/layer.json"], "there is no folder mistyped"),
        (["bench", "layer", "--json", "/"], "/ is a folder"),
        (["bench", "attention", "--device", "cpu", "--shapes", "14"], "128:14x14:20/3"),
        (["bench", "layer", "--batch", "0"], "at least 1"),
        (["bench", "model", "--rounds", "two"], "at least 1"),
        (["bench", "layer", "--json", "/dev/null/result.json"], "/dev/null"),
        (["explore", "aa_small", "image.jpg", "--model.window", "7"], "--model.window is an option of train; here a"),
        (
            ["train", "demo-aa", "--model.window", "null"],
            "timm leaves out what is null, so aa_small would take its own",
        ),
        (["train", "demo-aa", "--model.window", "none"], "'none'; on a command line 7 or [7, 5]"),
    ],
)
def test_wrong_values_are_explained(arguments, hint, capsys):
    assert hint in error_of(capsys, *arguments)


@without_gpu
@pytest.mark.parametrize("benchmark", ["attention", "model", "accelerate", "table2", "all"])
def test_gpu_benchmarks_say_that_they_need_one(benchmark, capsys):
    assert f"bench {benchmark} needs a GPU" in error_of(capsys, "bench", benchmark)


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("AACONV_DEBUG", "1")
    with pytest.raises(ValueError, match="tables 1 to 9"):
        cli.main(["table", "12"])


def _compile_with(error):
    def backend(graph, inputs):
        raise error

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(1))


def test_a_full_disk_while_compiling_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", lambda: _compile_with(OSError(errno.ENOSPC, "No space left on device")))
    told = "torch.compile cannot write its files: [Errno 28] No space left on device; set TORCHINDUCTOR_CACHE_DIR to"
    assert told in error_of(capsys, "demo")


@pytest.mark.parametrize("error", [KeyError("stride"), FileNotFoundError(errno.ENOENT, "No such file", "gcc")])
def test_another_failure_of_the_compiler_is_a_traceback(error, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda: _compile_with(error))
    with pytest.raises(RuntimeError, match=str(error.args[-1])):
        cli.main(["demo"])


def test_interrupting_is_silent(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert run("demo") == 130
    assert capsys.readouterr() == ("", "")


def test_cost_and_models_print_json(capsys):
    assert run("cost", "plain_wrn16_4", "--size", "32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["size"] == [32, 32]
    assert run("models", "plain_wrn16*", "--json") == 0
    assert [model["model"] for model in json.loads(capsys.readouterr().out)] == ["plain_wrn16_4"]


def test_table_takes_one_number(capsys):
    assert run("table", "9") == 0
    printed = capsys.readouterr().out
    assert "Table 9" in printed
    assert "Table 1" not in printed


def test_plot_says_where_it_drew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("plot", "ratios") == 0
    assert capsys.readouterr().out == "drew ratios.png\n"
    assert [file.name for file in tmp_path.iterdir()] == ["ratios.png"]


def test_a_drawing_that_fails_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    def full(figure, path, **_):
        path.write_text("half")
        raise OSError(28, "No space left on device", str(path))

    (tmp_path / "old.svg").write_text("old")
    monkeypatch.setattr(Figure, "savefig", full)
    error = error_of(capsys, "plot", "params", "-o", str(tmp_path / "old.svg"))
    assert f"{tmp_path}/old.svg cannot be written: No space left on device; make room" in error
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_marks_are_plain_where_the_terminal_knows_no_others(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert run("table", "9") == 0
    assert b"43,128 =" in printed.getvalue()


def test_doctor_names_a_backend_for_every_model(monkeypatch, capsys):
    from aaconv.cli import doctor_report as doctor

    monkeypatch.setattr(doctor, "known_models", lambda: ["aa_resnet50", "aa_wrn16_4"])
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert all(name in printed for name in ("sdpa", "eager", "14x14 20/3", "32x32 20/1"))


def test_doctor_says_why_a_named_backend_cannot_run(monkeypatch):
    from aaconv.attention import default_backend, sdpa
    from aaconv.cli import doctor_report as doctor

    monkeypatch.setattr(sdpa, "why_not", lambda *_, **__: "no luck")
    with default_backend("sdpa"):
        chosen, reasons = doctor.pick(doctor.SMALL_MAP, torch.device("cpu"), torch.float32)
    assert chosen == "none"
    assert "no luck" in reasons[0]
    chosen, reasons = doctor.pick(doctor.SMALL_MAP, torch.device("cpu"), torch.float32)
    assert chosen != "sdpa"
    assert "sdpa is passed over: no luck" in reasons
    assert list(BACKENDS)[-1] == "eager"


@pytest.mark.processes
def test_an_unknown_backend_in_the_environment_is_one_line():
    """Also to `python -m`, which imports the package before anything could catch an error."""
    environment = os.environ | {"AACONV_BACKEND": "nope"}
    command = [sys.executable, "-m", "aaconv", "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "aaconv: error: AACONV_BACKEND must be one of eager, sdpa, triton, got 'nope'\n"


def test_the_backends_are_those_of_the_operator():
    assert list(cli.BACKENDS) == sorted(BACKENDS)


@pytest.mark.processes
def test_module_runs_and_a_closed_pipe_is_silent():
    shell = f"{sys.executable} -m aaconv table 9 --json | head -n 1"
    done = subprocess.run(
        shell, shell=True, capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.processes
def test_a_closed_output_is_no_error():
    shell = f"{sys.executable} -m aaconv recipes >&-"
    done = subprocess.run(shell, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:  # imports swallow exceptions here and there
    pass
"""
STARTED = {
    "the command": [sys.executable, "-c", "import sys; from aaconv.__main__ import main; sys.exit(main())"],
    "the module": [sys.executable, "-m", "aaconv"],
}


@pytest.mark.processes
@pytest.mark.parametrize("command", STARTED.values(), ids=STARTED)
@pytest.mark.parametrize("module", ["torch", "yaml"])  # what runs imports the one, the parsers the other
def test_ctrl_c_is_clean_while_a_command_is_imported(command, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE])}
    done = subprocess.run([*command, "doctor"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.processes
@pytest.mark.parametrize("after", [0.3, 1.5])
def test_ctrl_c_is_clean_at_any_time(after):
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    source = "import sys; from aaconv.__main__ import main; print('up', flush=True); sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", source, "data", "preview", "imagenet", "--data-dir", "/nowhere"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
