"""The examples run as they are, at small size."""

import ast
import json
import re
import runpy
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from aaconv.explore import Shown
from support.fresh import run_fresh
from support.places import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture
def run_example(monkeypatch, capsys, tmp_path):
    """Runs a script in this process, in an empty folder; gives what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def folder(tmp_path):
    """DIR/{train,val}/{dark,light}/*.png, told apart at a glance."""
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for brightness, name in ((0, "dark"), (128, "light")):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for index in range(4):
                pixels = noise.integers(brightness, brightness + 128, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{index}.png")
    return tmp_path / "data"


def test_fine_tuning_in_sixty_lines(run_example, folder):
    assert len((EXAMPLES / "finetune.py").read_text(encoding="utf-8").splitlines()) <= 60
    options = ("--model", "resnet18", "--from-scratch", "--where", "layer4.*.conv1", "--size", 32)
    printed = run_example("finetune.py", folder, *options, "--epochs", 1, "--batch", 4)
    assert "layer4.1.conv1" in printed
    assert re.search(r"epoch 1  loss \d\.\d+  top-1 \d+\.\d %", printed)


def test_faster_rcnn_on_our_features(run_example):
    printed = run_example("faster_rcnn.py", "--backbone", "aa_resnet18", "--size", 64)
    assert re.search(r"loss_classifier \d\.\d+, loss_box_reg \d\.\d+, loss_objectness \d\.\d+", printed)
    assert "boxes before any training" in printed


def test_the_kernel_alone_needs_torch_alone_and_learns():
    program = (EXAMPLES / "kernel_only.py").read_text(encoding="utf-8")
    absent = ("timm", "torchvision", "matplotlib", "rich", "yaml", "safetensors", "PIL", "huggingface_hub")
    printed = run_fresh(program, "--size", "6", "--steps", "8", absent=absent)
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_scripts_of_timm_know_our_models(run_example, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, timm\nprint(timm.is_model(sys.argv[2]), sys.argv[1:], __name__)")
    assert run_example("timm_script.py", script, "--model", "aa_resnet50").split("\n")[0] == (
        "True ['--model', 'aa_resnet50'] __main__"
    )
    with pytest.raises(SystemExit, match=r"python examples/timm_script\.py"):
        run_example("timm_script.py", "nothing.py")


def test_speeds_are_compared(run_example, tmp_path):
    options = ("--models", "test_resnet", "aa_small", "--batch", 1, 2, "--size", 32, "--rounds", 1)
    printed = run_example("compare_speed.py", *options, "--phases", "inference", "--json", tmp_path / "speeds.json")
    written = json.loads((tmp_path / "speeds.json").read_text())
    assert written["environment"]["torch"] == torch.__version__
    rows = written["rows"]
    assert [(row["batch"], row["model"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in ("test_resnet", "aa_small")
    ]
    for row, line in zip(rows, printed.splitlines(), strict=True):
        assert f"{row['model']} " in line
        assert line.endswith(f"{row['ms']:.2f} ms  {row['to_first']:.2f} x")
    assert rows[3]["to_first"] == rows[3]["ms"] / rows[2]["ms"]


def test_the_notebook_of_the_explorer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "explorer.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    shown, names = [], {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            *statements, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(statements, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):  # which a notebook shows
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), names)
    assert len([one for one in shown if isinstance(one, Shown)]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"attention.png", "attention.html"}
