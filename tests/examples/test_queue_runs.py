"""The queue: every recipe with every seed once; what is finished is skipped, what was cut off is resumed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aaconv import recipes
from aaconv.cli import command_line
from aaconv.cli.recipe_options import given, spell_out
from aaconv.recipes.diff import experiment_key
from support.tiny_runs import train_tiny

SCRIPT = Path(__file__).parents[2] / "examples" / "queue_runs.py"
STAND_IN = """
import shutil, sys
from pathlib import Path
ready, words = Path(sys.argv[1]), sys.argv[2:]
if words[0] == "--resume":
    assert words[2:] == ["--device", "cpu"], words
    run = Path(words[1])
    shutil.copy(ready / run.name / "summary.json", run)
else:
    assert words[1:4:2] == ["--seed", "--run"] and words[5:] == ["--device", "cpu", "--epochs", "1"], words
    run = Path(words[4])
    if run.exists():
        sys.exit(f"aaconv: error: {run} is a file")
    shutil.copytree(ready / run.name, run)
"""
"""In place of `aaconv train`, which takes ten seconds to start: finished runs are copied."""


@pytest.fixture(scope="module")
def queue():
    spec = importlib.util.spec_from_file_location("queue_runs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seeds_come_one_after_the_other(queue, tmp_path):
    jobs = queue.jobs_of(["demo-*", "demo-aa"], [0, 3], tmp_path)
    assert [(job.recipe, job.seed) for job in jobs] == [
        (name, seed) for seed in (0, 3) for name in ("demo-plain", "demo-se", "demo-aa")
    ]
    assert jobs[0].command(["--epochs", "2"])[3:] == [
        *("train", "demo-plain", "--seed", "0", "--run", str(tmp_path / "demo-plain-seed0"), "--epochs", "2")
    ]


def test_a_name_means_no_longer_names_that_begin_with_it(queue, tmp_path):
    assert [job.recipe for job in queue.jobs_of(["cifar100-small-aa"], [0], tmp_path)] == ["cifar100-small-aa"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the page is written for bash")
def test_the_page_of_experiments_trains_each_once(queue):
    """Every option of every line is taken; no two lines are of one experiment, nor of one folder."""
    page = (SCRIPT.parents[1] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    stand_ins = "python() { printf '%s\\t' \"$@\"; echo; }; aaconv() { :; }\n"
    printed = subprocess.run(["bash", "-c", stand_ins + block], capture_output=True, text=True, check=True).stdout
    parser, folders, experiments = command_line(), [], []
    for line in printed.splitlines():
        script, *words = line.split("\t")[:-1]
        assert script == "examples/queue_runs.py"
        own, options = queue.split(words)
        chosen = queue.options_of_queue().parse_args(own)
        changes = given(parser.parse_args(["train", "demo-aa", *spell_out(options)]))
        for job in queue.jobs_of(chosen.patterns, chosen.seeds, chosen.runs):
            recipe = recipes.override(recipes.get(job.recipe), changes | {"seed": job.seed})
            experiments.append((experiment_key(recipe), job.seed))
            folders.append(job.folder)
    assert len(experiments) > 200
    assert len(experiments) == len(set(experiments))
    assert len(folders) == len(set(folders))


def test_the_ablations_are_there(queue, tmp_path):
    jobs = queue.jobs_of(["imagenette-ablation-*"], [0, 1, 2], tmp_path)
    assert len(jobs) == 3 * 20
    assert {recipes.get(job.recipe).in_memory for job in jobs} == {True}


@pytest.mark.usefixtures("no_curves")
def test_what_is_finished_is_skipped_what_was_cut_off_is_resumed_and_failures_are_named(
    queue, tmp_path, capsys, monkeypatch
):
    ready, runs, results = (tmp_path / name for name in ("ready", "runs", "results"))
    for kind in ("plain", "se", "aa"):
        train_tiny(ready / f"demo-{kind}-seed0", f"demo-{kind}", train_limit=16, eval_limit=8)
    finished, cut = (shutil.copytree(ready / name, runs / name) for name in ("demo-plain-seed0", "demo-se-seed0"))
    before = (finished / "summary.json").stat().st_mtime_ns
    (cut / "summary.json").unlink()
    (runs / "demo-aa-seed0").write_text("in the way")
    monkeypatch.setattr(queue, "TRAIN", (sys.executable, "-c", STAND_IN, str(ready)))
    words = ["demo-*", "--runs", str(runs), "--results", str(results), "--jobs", "2"]
    words += ["--", "--device", "cpu", "--epochs", "1"]
    assert queue.main(words) == 1
    printed = capsys.readouterr().out
    assert "3 runs, 1 of them finished" in printed
    assert "demo-se-seed0  resumes" in printed
    assert "demo-aa-seed0  failed: aaconv: error:" in printed
    assert "2 finished, 1 failed" in printed
    assert (finished / "summary.json").stat().st_mtime_ns == before
    recorded = [json.loads(path.read_text())["model"] for path in sorted(results.glob("*/*.json"))]
    assert recorded == ["plain_small", "se_small"]
    (runs / "demo-aa-seed0").unlink()
    assert queue.main(words) == 0
    assert "demo-aa-seed0  begins" in capsys.readouterr().out
    assert len(list(results.glob("*/*.json"))) == 3
    (other,) = results.glob("*/demo-aa-*.json")
    other.write_text(json.dumps(json.loads(other.read_text()) | {"loss": 1.0}))
    assert queue.main(words) == 1
    assert re.search(r"demo-aa-seed0  not recorded: .*\n2 finished, 1 failed", capsys.readouterr().out, re.DOTALL)


def test_a_wrong_name_is_told(queue, capsys):
    with pytest.raises(SystemExit):
        queue.main(["demo-xyz"])
    assert "no recipe fits 'demo-xyz'" in capsys.readouterr().err
