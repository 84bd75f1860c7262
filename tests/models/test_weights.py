"""Weights inside the package: made of a run by export, and used by a copy of the package without a network."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import aaconv
from aaconv import recipes
from aaconv.cli import main
from aaconv.data import open_dataset
from aaconv.export.model_card import shipped_card
from aaconv.export.weights import in_half
from aaconv.inference.evaluate import evaluate
from aaconv.models import create_model, weights
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import RECIPE, write_json, write_weights
from support.places import SHARED_DATA
from support.project import read_project
from support.tiny_runs import train_tiny

PACKAGE = Path(aaconv.__file__).parent
DATA = SHARED_DATA / "cifar100"
THINGS = [f"thing_{number}" for number in range(100)]

# Run by the copy: what each command prints, and what timm makes of the weights.
SCRIPT = """
import contextlib, io, json, socket, sys
from pathlib import Path

def no_network(*arguments):
    raise OSError("there is no network")
socket.socket.connect = no_network

import timm, torch
import aaconv
from aaconv.cli import main
from safetensors.torch import load_file

def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return [code, out.getvalue(), err.getvalue()]

file = load_file(Path(aaconv.__file__).parent / "weights" / "aa_wrn16_4.cifar100.safetensors")
def differences(model):
    state = model.state_dict()
    return sorted(name for name, one in state.items() if name not in file or not torch.equal(one, file[name].to(one)))

create = timm.create_model
model, tagged = create("aa_wrn16_4", pretrained=True), create("aa_wrn16_4.cifar100", pretrained=True)
seven, grey = create("aa_wrn16_4", pretrained=True, num_classes=7), create("aa_wrn16_4", pretrained=True, in_chans=1)
features = create("aa_wrn16_4", pretrained=True, features_only=True, out_indices=(1, 3))
found = {
    "package": aaconv.__file__,
    "listed": timm.list_pretrained("aa_*"),
    "dtypes": sorted({str(one.dtype) for one in model.state_dict().values()}),
    "usual": differences(model), "tagged": differences(tagged), "seven": differences(seven), "grey": differences(grey),
    "classifier": list(seven.get_classifier().weight.shape),
    "grey_error": float((grey.conv1.weight - file["conv1.weight"].float().sum(1, keepdim=True)).abs().max()),
    "features": [list(one.shape) for one in features(torch.randn(2, 3, 32, 32))],
    "feature_error": float((features.model.conv1.weight - file["conv1.weight"].float()).abs().max()),
    "cfg": model.pretrained_cfg,
    "larger": list(create("aa_wrn16_4", pretrained=True, img_size=48)(torch.randn(1, 3, 48, 48)).shape),
    "commands": {" ".join(words): run(*words) for words in json.loads(sys.argv[1])},
}
print(json.dumps(found))
"""
COMMANDS = {
    "eval": "eval aa_small --pretrained --data shapes --device cpu",
    "predict": "predict aa_wrn16_4 --pretrained photo.png --top 2",
    "explore": "explore aa_wrn16_4 --pretrained photo.png -o page.html",
    "models": "models aa_wrn",
    "models json": "models aa_wrn16_4 --json",
    "none": "predict aa_wrn28_10 --pretrained photo.png",
    "other network": "predict aa_wrn40_2 --pretrained photo.png",
    "other classes": "predict aa_small.three --pretrained photo.png",
    "names amiss": "predict se_small --pretrained photo.png",
    "other data": "eval aa_wrn16_4 --pretrained --data shapes",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """As if it had been trained on all images, which takes minutes."""
    run = train_tiny(tmp_path_factory.mktemp("runs") / "tiny", "demo-aa", train_limit=320)
    recipes.save(replace(recipes.load(run / RECIPE), train_limit=None, eval_limit=None), run / RECIPE)
    return run


@pytest.fixture
def broken(run, tmp_path):
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """A copy of the package with weights in it: of a run on shapes, and random ones under the name of CIFAR-100."""
    place = tmp_path_factory.mktemp("site")
    weights = place / "aaconv" / "weights"
    shutil.copytree(PACKAGE, place / "aaconv", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    weights.mkdir()
    assert main(["export", str(run), "-o", str(weights / "aa_small.shapes.safetensors"), "--device", "cpu"]) == 0
    own = json.loads((weights / "aa_small.shapes.json").read_text())
    facts = own | {"architecture": "aa_wrn16_4", "data": "cifar100", "top1": 72.375, "top5": 91.5, "num_classes": 100}
    write_json(weights / "aa_wrn16_4.cifar100.json", facts | {"label_names": THINGS})
    write_weights(weights / "aa_wrn16_4.cifar100.safetensors", in_half(create_model("aa_wrn16_4").state_dict()))
    # What does not fit: the file of another network, and another number of classes.
    shutil.copy(weights / "aa_small.shapes.safetensors", weights / "aa_wrn40_2.cifar100.safetensors")
    shutil.copy(weights / "aa_wrn16_4.cifar100.json", weights / "aa_wrn40_2.cifar100.json")
    shutil.copy(weights / "aa_small.shapes.safetensors", weights / "aa_small.three.safetensors")
    write_json(weights / "aa_small.three.json", own | {"num_classes": 3, "label_names": THINGS[:3]})
    shutil.copy(weights / "aa_small.shapes.safetensors", weights / "se_small.six.safetensors")
    write_json(weights / "se_small.six.json", own | {"num_classes": 7, "label_names": THINGS[:6]})
    return place


@pytest.fixture(scope="module")
def used(folder):
    """What the copy says, in a process of its own."""
    from PIL import Image

    Image.new("RGB", (40, 32), (90, 160, 40)).save(folder / "photo.png")
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = json.dumps([command.split() for command in COMMANDS.values()])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout) | {"stderr": done.stderr}
    assert Path(found["package"]).is_relative_to(folder)
    return found


@pytest.fixture
def said(used):
    return lambda name: used["commands"][COMMANDS[name]]


def test_timm_creates_the_network_with_its_weights(used):
    assert used["listed"] == ["aa_small.shapes", "aa_small.three", "aa_wrn16_4.cifar100", "aa_wrn40_2.cifar100"]
    assert used["usual"] == used["tagged"] == []
    assert used["dtypes"] == ["torch.float32", "torch.int64"]


def test_another_head_other_channels_and_features_as_timm_does_them(used):
    assert used["seven"] == ["fc.bias", "fc.weight"]
    assert used["classifier"] == [7, 256]
    assert used["grey"] == ["conv1.weight"]
    assert used["grey_error"] < 1e-2
    assert used["features"] == [[2, 64, 32, 32], [2, 256, 8, 8]]
    assert used["feature_error"] == 0
    assert used["larger"] == [1, 100]


def test_the_configuration_says_what_the_weights_are(used):
    cfg = used["cfg"]
    assert (cfg["input_size"], cfg["num_classes"], cfg["tag"]) == ([3, 32, 32], 100, "cifar100")
    assert (cfg["label_names"], cfg["crop_pct"]) == (THINGS, 1.0)
    assert cfg["description"].startswith("cifar100: top-1 72.3")
    assert re.search(r"recipe demo-aa, seed 0, 1 epochs, commit \w+", " ".join(cfg["notes"]))
    assert cfg["notes"][-1] == "changed: epochs=1, batch=16, train_limit=None, eval_limit=None"


def test_eval_gives_the_accuracy_that_was_written_down(folder, said):
    facts = json.loads((folder / "aaconv/weights/aa_small.shapes.json").read_text())
    code, out, _ = said("eval")
    assert code == 0
    assert f"top-1 {facts['top1']:.2f} %" in out
    assert "aa_small on 5,000 images of shapes" in out
    assert facts["images"] == 5000


def test_predict_names_the_classes(said):
    code, out, err = said("predict")
    assert (code, err) == (0, "")
    assert len(re.findall(r"^ +[\d.]+ %  thing \d+$", out, re.MULTILINE)) == 2


def test_a_page_names_the_classes_and_the_data(folder, said):
    assert said("explore")[0] == 0
    page = (folder / "page.html").read_text()
    assert "trained on cifar100" in page
    assert "72.4 % top-1" in page
    assert re.search(r"thing \d", page)


def test_models_marks_the_names_that_have_weights(said):
    lines = [line for line in said("models")[1].splitlines() if line.startswith("pretrained: ")]
    assert lines[0] == "pretrained: aa_wrn16_4 on cifar100: top-1 72.38 %, top-5 91.50 %"
    assert not any("aa_wrn28_10" in line for line in lines)
    assert json.loads(said("models json")[1])[0]["weights"].startswith("cifar100: top-1")


def test_no_weights_and_other_classes_are_told_in_a_line(said):
    code, _, err = said("none")
    assert code == 2
    assert err == (
        "aaconv: error: aa_wrn28_10 has no pretrained weights (these have: aa_wrn16_4, aa_wrn40_2, aa_small); "
        "name a run, or a file of weights with --weights\n"
    )
    code, _, err = said("other data")
    assert code == 2
    assert "knows 100 classes, shapes has 2" in err


def test_weights_that_do_not_fit_are_told_with_file_tensor_and_way_out(folder, said):
    weights, way_out = folder / "aaconv/weights", "; reinstall the package or export the weights again\n"
    code, _, err = said("other network")
    assert code == 2
    missing = f"{weights / 'aa_wrn40_2.cifar100.safetensors'} does not fit the network aa_wrn40_2: Missing key(s)"
    assert re.fullmatch(rf'aaconv: error: {re.escape(missing)} in state_dict: "[\w.]+"{way_out}', err)
    code, _, err = said("other classes")
    assert code == 2
    assert f"{weights / 'aa_small.three.safetensors'} does not fit the network aa_small.three: size mismatch" in err
    assert re.search(r"fc\.weight: .*\[2, \d+\].*\[3, \d+\]", err)
    assert err.endswith(way_out)


def test_names_of_another_number_of_classes_are_not_used(folder, used, said):
    said_at_import = f"{folder / 'aaconv/weights/se_small.six.json'} is damaged (ValueError: 6 label_names, "
    assert said_at_import + "but num_classes is 7)" in used["stderr"]
    assert "se_small has no pretrained weights" in said("names amiss")[2]


# The file


@pytest.mark.slow
def test_the_file_is_in_half_precision_and_evaluated(run, folder):
    path = folder / "aaconv/weights/aa_small.shapes.safetensors"
    facts, file = json.loads(path.with_suffix(".json").read_text()), load_file(path)
    whole = load_model(run).model.state_dict()
    assert file.keys() == whole.keys()
    for name, one in file.items():
        matrix = one.dim() > 1
        assert one.dtype == (torch.float16 if matrix else whole[name].dtype)
        torch.testing.assert_close(one.to(whole[name]), whole[name], rtol=1e-3 if matrix else 0, atol=1e-4 * matrix)
    found = evaluate(run, weights=str(path), data="shapes", device="cpu")
    assert {name: facts[name] for name in found.metrics} == found.metrics
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts["weights"] == "last"
    assert facts["evaluated_on"] == facts["device"]
    assert (facts["recipe"], facts["epochs"], facts["label_names"]) == (
        "demo-aa",
        1,
        list(open_dataset("shapes").classes),
    )
    assert "data_dir" not in facts["overrides"]


def test_files_that_are_being_written_are_not_taken_for_weights(tmp_path):
    for name in (".aa_small.shapes.17.safetensors", "aa_small.shapes.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert weights.shipped(tmp_path) == weights.shipped(tmp_path / "none") == {}


def test_a_damaged_description_costs_only_its_weights(tmp_path, caplog):
    for name, text in {"one.tag": "{", "two.tag": '{"recipe": 1}'}.items():
        (tmp_path / f"{name}.safetensors").touch()
        (tmp_path / f"{name}.json").write_text(text)
    assert weights.shipped(tmp_path) == {}
    assert [str(tmp_path / name) in caplog.text for name in ("one.tag.json", "two.tag.json")] == [True, True]


def test_damaged_weights_are_told_in_a_line(monkeypatch):
    def damaged(*arguments, **options):
        raise SafetensorError("incomplete metadata")

    monkeypatch.setattr("aaconv.runs.load.check_pretrained", lambda name: None)
    monkeypatch.setattr("aaconv.runs.load.create_model", damaged)
    with pytest.raises(ValueError, match="the weights of aa_small are damaged: incomplete metadata"):
        load_model("aa_small", pretrained=True)


def test_numbers_that_half_precision_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="fc has values"):
        in_half({"fc": torch.full((2, 2), 1e6)})
    assert in_half({"fc": torch.full((2, 2), 1e6)}, "bfloat16")["fc"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16, got dtype='float8'"):
        in_half({}, "float8")
    assert in_half({"variance": torch.full((2,), 1e6)})["variance"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("model.safetensors", [], "must be called aa_small.TAG.safetensors"),
        ("plain_small.shapes.safetensors", [], "must be called aa_small.TAG.safetensors"),
        ("aa_small.shapes.safetensors", ["--opset", "18"], "--opset is not for .safetensors"),
        ("none/aa_small.shapes.safetensors", [], "there is no folder"),
        ("model.onnx", ["--data-dir", "data"], "--data-dir belongs to .safetensors"),
        ("model.onnx", ["--device", "cpu"], "--device belongs to .safetensors"),
        ("model.onnx", ["--dtype", "bfloat16"], "--dtype belongs to .safetensors"),
        ("aa_small.shapes.safetensors", ["--device", "abacus"], "unknown device 'abacus'"),
    ],
)
def test_what_cannot_be_shipped_is_told_in_a_line(name, options, told, run, tmp_path, capsys):
    assert main(["export", str(run), "-o", str(tmp_path / name), *options]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("environment.json", None, "environment.json"),
        ("environment.json", "{", "environment.json is not JSON"),
        ("environment.json", '{"commit": "1"}', "environment.json has no 'device'"),
        ("config.json", '"architecture"', "config.json has no 'architecture'"),
        ("config.json", '"crop_pct"', "config.json has no 'crop_pct'"),
        ("config.json", '"model_args"', "config.json has no 'model_args'"),
    ],
)
def test_a_damaged_run_is_told_before_the_evaluation(file, text, told, broken, tmp_path, monkeypatch, capsys):
    old = {name: tmp_path / f"aa_small.shapes.{name}" for name in ("safetensors", "json")}
    for name, path in old.items():
        path.write_text(f"old {name}")
    whole = (broken / file).read_text()
    if text is None:
        (broken / file).unlink()
    else:
        (broken / file).write_text(whole.replace(text, '"other"') if file == "config.json" else text)
    monkeypatch.setattr("aaconv.export.weights.evaluate_model", lambda *a, **b: pytest.fail("evaluated"))
    assert main(["export", str(broken), "-o", str(old["safetensors"])]) == 2
    err = capsys.readouterr().err
    assert str(broken) in err
    assert told in err
    assert [path.read_text() for path in old.values()] == ["old safetensors", "old json"]


@pytest.mark.slow
def test_all_files_are_written_or_none(run, tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    old = {f"aa_small.shapes.{ending}": f"old {ending}" for ending in ("json", "md")}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("aaconv.export.weights.write_json", full)
    assert main(["export", str(run), "-o", str(tmp_path / "aa_small.shapes.safetensors"), "--device", "cpu"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == old


@pytest.mark.parametrize("part", ["holdout", "train_limit", "eval_limit"])
def test_runs_on_a_part_of_the_images_are_not_shipped(part, broken, tmp_path, capsys):
    recipes.save(replace(recipes.load(broken / RECIPE), **{part: 16}), broken / RECIPE)
    assert main(["export", str(broken), "-o", str(tmp_path / "aa_small.shapes.safetensors")]) == 2
    assert f"{broken} was run with {part}=16" in capsys.readouterr().err


def test_half_a_run_cannot_be_shipped(broken, tmp_path, capsys):
    (broken / "summary.json").unlink()
    assert main(["export", str(broken), "-o", str(tmp_path / "aa_small.shapes.safetensors")]) == 2
    assert "is not finished" in capsys.readouterr().err
    assert main(["export", "aa_small", "-o", str(tmp_path / "aa_small.shapes.safetensors")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


# What is really there


def test_the_weights_are_installed_with_the_package():
    patterns = read_project()["tool"]["setuptools"]["package-data"]["aaconv"]
    for name in (f"weights/aa_wrn16_4.cifar100.{ending}" for ending in ("safetensors", "json", "md")):
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_every_file_that_is_shipped_is_what_its_facts_say():
    for key, cfg in weights.shipped().items():
        file = Path(cfg["file"])
        facts = weights.read_facts(file)
        assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest(), key
        assert file.with_suffix(".md").read_text(encoding="utf-8") == shipped_card(key, facts), key
        assert timm.is_model_pretrained(key)
        model = timm.create_model(key, pretrained=True)
        assert model.num_classes == facts["num_classes"] == len(facts["label_names"])
    assert sum(path.stat().st_size for path in weights.FOLDER.iterdir()) < 30e6


@pytest.mark.slow
def test_the_network_of_cifar100_is_as_good_as_it_says(tmp_path):
    if "aa_wrn16_4.cifar100" not in weights.shipped():
        pytest.skip("no weights of aa_wrn16_4 in the package")
    if not (DATA / "unpack.py").exists():
        pytest.skip(f"no CIFAR-100 in {DATA}")
    subprocess.run([sys.executable, DATA / "unpack.py", tmp_path], check=True, capture_output=True)
    # All 10,000 images take minutes: `aaconv eval aa_wrn16_4 --pretrained --data cifar100` gives the very digits.
    found = evaluate("aa_wrn16_4", pretrained=True, data="cifar100", data_dir=tmp_path, limit=100, device="cpu")
    wanted = weights.read_facts(Path(weights.shipped()["aa_wrn16_4.cifar100"]["file"]))["top1"]
    assert abs(found.metrics["top1"] - wanted) < 16  # 3.5 standard deviations of 100 images


def test_the_shipped_wide_resnet_has_scales_of_one():
    """It was trained when they were fixed there; what it gives is what it gave then."""
    model = create_model("aa_wrn16_4", pretrained=True).eval()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert all(norm.weight.requires_grad and bool((norm.weight == 1).all()) for norm in norms)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
        for norm in norms:
            norm.weight = None
        assert torch.equal(model(x), expected)
