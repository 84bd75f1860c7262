"""Run folders: what is read from them again, by us and by timm, and what is refused."""

import pickle
import shutil
from pathlib import Path

import pytest
import timm
import torch

from aaconv.models import create_model
from aaconv.recipes import Model
from aaconv.runs.load import load_model
from aaconv.runs.run_folder import check_free, is_run, read_metrics, read_speed, write_rows
from aaconv.training.trainer import train
from support.training_runs import tiny

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

RECIPE = tiny(ema=0.5, model=Model("aa_small", {"num_heads": 2}), epochs=1, batch=4, train_limit=8, eval_limit=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(RECIPE, folder, device="cpu")
    return folder


def logits(model, size=32):
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size))


def test_a_run_is_loaded_with_all_it_takes_to_use_it(run):
    loaded = load_model(run)
    assert loaded.recipe == RECIPE
    assert loaded.classes == ("different colours", "same colour")
    assert (loaded.size, loaded.task, loaded.source) == (32, "classify", str(run))
    assert loaded.mean == (0.3, 0.3, 0.3)
    assert loaded.metrics["finished"] is True
    assert not loaded.model.training
    assert loaded.model.num_classes == 2


def test_weights_are_chosen_by_name_and_the_average_comes_first(run):
    found = {name: logits(load_model(run, weights=name).model) for name in (None, "ema", "last", "best")}
    assert torch.equal(found[None], found["ema"])
    assert torch.equal(found["best"], found["ema"])  # one epoch: its average is the best there is
    assert not torch.equal(found["last"], found["ema"])
    own = load_model(run, weights=run / "model.safetensors")
    assert torch.equal(logits(own.model), found["last"])


def test_timm_loads_the_folder_itself(run):
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    assert torch.equal(logits(model), logits(load_model(run, weights="last").model))
    assert model.pretrained_cfg["input_size"] == [3, 32, 32]
    assert model.pretrained_cfg["label_names"] == ["different colours", "same colour"]


def test_a_network_by_name():
    loaded = load_model("aa_small", options={"num_heads": 2}, num_classes=7)
    assert (loaded.recipe, loaded.classes, loaded.metrics, loaded.size) == (None, None, None, 32)
    assert logits(loaded.model).shape == (1, 7)


def test_a_network_by_name_with_a_file_of_weights(run, tmp_path):
    options = {"num_heads": 2}
    loaded = load_model("aa_small", options=options, num_classes=2, weights=run / "model.safetensors")
    assert torch.equal(logits(loaded.model), logits(load_model(run, weights="last").model))
    with pytest.raises(ValueError, match=r"does not fit the network: size mismatch for \S*: "):
        load_model("aa_small", options=options, num_classes=3, weights=run / "model.safetensors")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("aa_wrn16_5", {}, "did you mean"),
        ("runs/nothing", {}, "is not a run folder"),
        (Path("nothing"), {}, "is not a run folder"),
        ("aa_small", {"options": {"hedas": 3}}, "hedas"),
        ("aa_small", {"weights": "best"}, "belong to a run folder"),
        ("aa_small", {"weights": "nothing.safetensors"}, "there is no file"),
    ],
)
def test_what_cannot_be_loaded_is_named(source, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        load_model(source, **options)


def test_a_run_is_built_as_it_was_trained(run):
    with pytest.raises(ValueError, match="leave out model options"):
        load_model(run, num_classes=3)


def test_weights_that_are_not_there_are_named(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "model-ema.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights 'ema'; it has last, best"):
        load_model(copy, weights="ema")
    assert torch.equal(logits(load_model(copy).model), logits(load_model(run, weights="last").model))
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="has none yet"):
        load_model(copy)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "the code ran")


def test_a_run_with_code_in_its_weights_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("*.safetensors"):
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "bomb")))
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_model(copy)
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"pretrained_cfg": {}}'])
def test_a_damaged_config_is_named(content, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        load_model(copy)


def test_numbers_in_tables_come_back_as_they_were(tmp_path):
    rows = [{"epoch": 1, "loss": 0.1 + 0.2, "top1": None}, {"epoch": 2, "loss": 1e-300, "top1": float("inf")}]
    write_rows(tmp_path / "metrics.csv", rows, ["epoch", "loss", "top1"])
    assert read_metrics(tmp_path) == rows
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "1,0.30000000000000004,"


def test_a_run_is_told_from_other_folders(run, tmp_path):
    assert is_run(run)
    assert is_run(str(run))
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "nothing")
    assert len(read_speed(run)) == 1


def test_a_place_where_nobody_may_look_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(OSError, match=rf"^{tmp_path}/run cannot be written: Permission denied; choose another place"):
        check_free(tmp_path / "run")


def test_the_network_is_the_one_that_was_trained(run):
    """Options reach it: two heads, and tables for images of 32 pixels."""
    loaded = load_model(run).model.state_dict()
    fresh = create_model("aa_small", num_heads=2, num_classes=2, img_size=32).state_dict()
    assert {name: value.shape for name, value in loaded.items()} == {name: value.shape for name, value in fresh.items()}
