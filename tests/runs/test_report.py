"""`aaconv report`: one page with what runs were, how they went and what they cost."""

import base64
import json
import re
import shutil
from dataclasses import replace
from urllib.parse import unquote, urlsplit

import pytest

from aaconv import cli, recipes
from aaconv.cost.counting import count
from aaconv.recipes.recipe import Evidence
from aaconv.runs import report
from aaconv.runs.load import load_model
from aaconv.runs.report import write_report
from aaconv.runs.run_folder import METRICS, RECIPE, SUMMARY
from support.tiny_runs import TINY, train_tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [train_tiny(folder / "with-attention", "demo-aa", epochs=2), train_tiny(folder / "without", "demo-plain")]


def cells(text, title):
    """The rows of the table below a heading: name -> values."""
    section = re.search(rf"<section><h2>{title}</h2>(.*?)</section>", text, re.DOTALL)[1]
    table = re.search(r"<table .*?>(.*?)</table>", section, re.DOTALL)[1]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', table)
    return {name: re.findall(r"<td>(.*?)</td>", rest) for name, rest in rows}


def test_the_report_has_the_runs_numbers(runs, tmp_path):
    text = write_report(runs, tmp_path / "report.html").read_text()
    loaded = [load_model(run) for run in runs]
    results = cells(text, "Results")
    assert results["top-1 (%)"] == [f"{one.metrics['top1']:.2f}" for one in loaded]
    assert results["loss"] == [f"{one.metrics['loss']:.4f}" for one in loaded]
    assert results["epochs"] == ["2 of 2", "1 of 1"]
    assert "top-1 in the paper" not in results
    costs = [count(one.model, (32, 32)) for one in loaded]
    assert cells(text, "Cost")["parameters"] == [f"{cost.params:,}" for cost in costs]
    assert cells(text, "Cost")["attention maps, bfloat16"][1] == "\N{EN DASH}"
    assert costs[0].attention[0].name in text
    named = cells(text, "Recipes")["model"]
    assert [cell.partition(",")[0] for cell in named] == ["aa_small", "plain_small"]
    assert cells(text, "Recipes")["train_limit"] == [str(TINY["train_limit"])] * 2
    assert (runs[0] / RECIPE).read_text().splitlines()[0] in text
    assert cells(text, "Environment")["torch"][0] == loaded[0].metrics["versions"]["torch"]


def test_the_report_needs_nothing_else(runs, tmp_path):
    text = write_report(runs, tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="(.{0,40})', text)
    assert len(sources) == 1
    assert sources[0].startswith("data:image/svg+xml;base64,")
    drawing = base64.b64decode(re.search(r'svg\+xml;base64,([^"]*)', text)[1]).decode()
    assert "<svg" in drawing
    assert "with-attention" in drawing
    assert "{{" not in text


def test_the_papers_value_stands_beside_ours(runs, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in runs[0].iterdir():
        if file.is_file():
            (run / file.name).write_bytes(file.read_bytes())
    recipe = replace(recipes.load(run / RECIPE), evidence=Evidence(1, "AA-Wide-ResNet"), summary="a <b>bold</b> claim")
    recipe = replace(recipe, train_limit=None, eval_limit=None)  # a value of the paper is for all images
    recipes.save(recipe, run / RECIPE)
    (run / SUMMARY).unlink()  # not finished: the last evaluation counts
    text = write_report([run], tmp_path / "report.html").read_text()
    results = cells(text, "Results")
    assert results["top-1 in the paper"] == [f"{recipes.paper_value(recipe, 'top-1'):g}"]
    assert results["top-1 (%)"][0] != "\N{EN DASH}"
    assert cells(text, "Recipes")["stands behind"] == ["table 1, AA-Wide-ResNet"]
    assert "a &lt;b&gt;bold" in text


def test_folders_of_the_same_name_are_told_apart(runs, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(runs[0], tmp_path / name / "run")
    twice = [tmp_path / "first/run", tmp_path / "second/run", tmp_path / "first/../first/run"]
    text = write_report(twice, tmp_path / "report.html").read_text()
    assert "<th>first/run</th><th>second/run</th></tr>" in re.sub(r"<th[^>]*>", "<th>", text)


@pytest.fixture(scope="module")
def sixty(runs, tmp_path_factory):
    """Copies of two runs: fifty learning rates, ten of them with a second seed."""
    folder, made = tmp_path_factory.mktemp("sixty"), []
    for index in range(60):
        source, run = runs[index % 2], folder / f"run-{index:02}"
        shutil.copytree(source, run, ignore=shutil.ignore_patterns(RECIPE, "checkpoints", "*.safetensors"))
        changes = {"lr": 0.001 * (1 + index % 50), "seed": index // 50}
        recipes.save(recipes.override(recipes.load(source / RECIPE), changes), run / RECIPE)
        made.append(run)
    return made


def test_many_runs_stand_one_below_the_other(sixty, tmp_path, monkeypatch):
    counted, drawn = [], []
    monkeypatch.setattr(report, "count", lambda *args, **options: counted.append(1) or count(*args, **options))
    draw = report.curves.draw
    monkeypatch.setattr(report.curves, "draw", lambda paths, path: drawn.append(paths) or draw(paths, path))
    page = write_report(sixty, tmp_path / "report.html")
    text = page.read_text()
    assert page.stat().st_size < 1e6
    assert len(counted) == 2, "networks that are alike are counted once"
    for title in ("Results", "Cost", "Recipes", "Environment"):
        assert list(cells(text, title)) == [run.name for run in sixty], title
    assert len(cells(text, "Results")["run-07"]) == len(cells(text, "Results")["run-08"])
    assert text.count("<summary>The attention branches of run-00 and 29 other runs</summary>") == 1
    assert "The 40 of 50 experiments with the best results." in text
    assert len({recipes.load(path / RECIPE).lr for path in drawn[0]}) == 40


def test_the_curves_of_many_are_those_of_the_best(sixty, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_CURVES", 1)
    drawn, best = [], tmp_path / "best"
    shutil.copytree(sixty[3], best)
    summary = json.loads((best / SUMMARY).read_text())
    (best / SUMMARY).write_text(json.dumps(summary | {"top1": 99.0}))
    rows = (best / METRICS).read_text().splitlines()
    rows[-1] = ",".join("99.0" if name == "top1" else value for name, value in
                        zip(rows[0].split(","), rows[-1].split(","), strict=True))  # fmt: skip
    (best / METRICS).write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(report.curves, "draw", lambda paths, path: drawn.append(paths) or path.write_text("") or path)
    write_report([*sixty[:3], best], tmp_path / "report.html")
    assert drawn == [[best]]


def test_the_command_links_to_the_explorer(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.html").touch()
    assert cli.main(["report", str(runs[0]), "-o", "report.html", "--explorer", "pages/page.html"]) == 0
    assert capsys.readouterr().out == "wrote report.html\n"
    assert '<a href="pages/page.html">' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nothing"], "nothing is not a run folder"),
        (["RUN", "--explorer", "page.html"], "there is no page page.html"),
        (["RUN", "-o", "nowhere/report.html"], "there is no folder nowhere"),
        (["started"], "no finished epoch"),
        (["broken"], "environment.json is not JSON"),
        (["unread"], "unread/summary.json is not JSON: "),
        (["unread"], "; copy it again"),
        (["empty"], "empty/metrics.csv has no rows; copy it again"),
        (["slow"], "slow/speed.csv cannot be read: No such file or directory; copy it again"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, hint, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    missing = {
        "started": ("metrics.csv", "summary.json"),
        "broken": (),
        "unread": (),
        "empty": (),
        "slow": ("speed.csv",),
    }
    for name, files in missing.items():
        (tmp_path / name).mkdir()
        for file in runs[0].iterdir():
            if file.is_file() and file.name not in files:
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "empty" / "metrics.csv").write_text("")
    (tmp_path / "broken" / "environment.json").write_text("{")
    (tmp_path / "unread" / "summary.json").write_text("{")
    assert cli.main(["report", *(str(runs[0]) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "name", ["javascript:window.pwned=1", "a#b?c%41.html", "two words.html", "../up.html", "x.html"]
)
def test_a_page_is_linked_to_by_its_path_whatever_it_is_called(name, tmp_path):
    (tmp_path / "reports").mkdir()
    page = tmp_path / "reports" / name
    page.touch()
    href = report._relative(page, tmp_path / "reports" / "report.html")
    assert urlsplit(href).scheme == ""
    assert urlsplit(href).query == urlsplit(href).fragment == ""
    assert (tmp_path / "reports" / unquote(href)).resolve() == page.resolve()
