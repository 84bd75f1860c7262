"""Checkpoints and recipes that somebody has changed: one line says what does not fit."""

import hashlib
import json
import shutil

import pytest
import torch

from aaconv.recipes import Model
from aaconv.training import checkpoint
from aaconv.training.trainer import resume
from aaconv.utils.weights import encode
from support.training_runs import cut, edit_recipe

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "adamw"}, "'dampening', that of the recipe has not: optimizer is another now"),
        ({"ema": None}, "it has averaged weights, the recipe wants none: ema is another now"),
        ({"batch": 40}, "it is of step 4, .* batch, accumulate or the number of images is another now"),
        ({"train_limit": 48}, "it is of step 4, .* batch, accumulate or the number of images is another now"),
        ({"model": Model("plain_small", {"width": 8})}, "Error|size mismatch|cannot be built"),
    ],
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_an_edited_recipe_is_named(whole, run, changes, told):
    cut(whole, run, newest=6)
    for path in checkpoint.paths(run / "checkpoints"):
        shutil.rmtree(path)
    shutil.copytree(whole / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000004")
    rewrite_state(run, lambda state: state.update(epoch=0, step=4))
    edit_recipe(run, **changes)
    with pytest.raises(ValueError, match=told):
        resume(run, device="cpu")


def rewrite_state(run, change):
    """Change state.json of the newest checkpoint, with its sum."""
    folder = checkpoint.paths(run / "checkpoints")[-1]
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epoch": "x"}, "'epoch' is 'x'"),
        ({"epoch": -1}, "'epoch' is '-1'"),
        ({"step": None}, "'step' is 'None'"),
        ({"rows": {}}, "'rows' is '{}'"),
        ({"rows": [[1]]}, "'rows' is"),
        ({"rows": [{"epoch": 1, "loss": "x"}]}, "'rows' is"),
        ({"speed": 3}, "'speed' is '3'"),
        ({"best": []}, "'best' is '\\[\\]'"),
        ({"seconds": "long"}, "'seconds' is 'long'"),
        ({"sums": []}, "'sums' is '\\[\\]'"),
        ({"sums": [{"parts": 1}]}, "does not fit .*recipe.yaml: KeyError 'sums'"),
        ({"sums": [{"parts": 1, "sums": ["x"]}]}, "does not fit"),
        ({"sums": [{"parts": 1, "sums": [1.0]}]}, "does not fit"),
        ({"optimizer": []}, "'optimizer' is"),
        ({"sums": [{"parts": 1.5, "sums": [1.0, 1.0, 1.0]}]}, "does not fit .*: its sums are not those of 1 metrics"),
        ({"optimizer": {"groups": []}}, "does not fit .*recipe.yaml: its optimizer has not 1 groups of parameters"),
        ({"optimizer": {"numbers": 3, "groups": []}}, "does not fit"),
        ({"scaler": "x"}, "'scaler' is 'x'"),
    ],
    ids=str,
)
def test_a_state_of_wrong_types_is_named(whole, run, change, told):
    cut(whole, run, newest=8)
    rewrite_state(run, lambda state: state.update(change))
    with pytest.raises(ValueError, match=told) as error:
        resume(run, device="cpu")
    assert "step-00000008" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model", {}),
        ("model", {"stem.weight": torch.zeros(3)}),
        ("ema", {}),
        ("optimizer", {"0.momentum_buffer": torch.zeros(3)}),
        ("optimizer", {"x.momentum_buffer": torch.zeros(3)}),
        ("random", {"0.cpu": torch.zeros(3)}),
        ("random", {"0.cpu": torch.zeros(3, dtype=torch.uint8)}),
    ],
)
def test_tensors_of_a_checkpoint_that_do_not_fit_are_named(whole, run, name, content):
    cut(whole, run, newest=8)
    folder = checkpoint.paths(run / "checkpoints")[-1]
    (folder / f"{name}.safetensors").write_bytes(encode(content))
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / f"{name}.safetensors").read_bytes()
    manifest["sha256"][f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"step-00000008 does not fit .*recipe\.yaml: "):
        resume(run, device="cpu")
