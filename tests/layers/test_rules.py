"""Options of augment that differ from layer to layer: mappings from names and globs, and callables."""

import json
import re

import pytest
import timm
import torch
from torch import nn

from aaconv import AAConv2d, attention_channels, augment, load_model, save_model
from aaconv.models import create_model


def three():
    return nn.Sequential(*(nn.Conv2d(channels, 2 * channels, 3, padding=1) for channels in (16, 32, 64)))


def heads(model):
    return [module.num_heads for module in model.modules() if isinstance(module, AAConv2d)]


RULES = {
    "globs": {"0": 1, "[12]": 4},
    "a name before a glob": {"*": 4, "0": 1},
    "the glob first": {"0": 1, "*": 4},
    "a callable": lambda name, conv, size: 1 if conv.in_channels == 16 else 4,
    "numbers as names": {0: 1, 1: 4, 2: 4},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_layer_has_its_own_heads_and_the_channels_that_follow(rule):
    model, report = augment(three(), 8, where="*", num_heads=rule)
    assert heads(model) == [row.num_heads for row in report.replacements] == [1, 4, 4]
    channels = [attention_channels(layer.out_channels, layer.num_heads) for layer in model]
    assert [(layer.key_channels, layer.value_channels) for layer in model] == channels
    assert model(torch.randn(1, 16, 8, 8)).shape == (1, 128, 8, 8)


def test_a_layer_that_the_mapping_leaves_out_has_the_default():
    assert heads(augment(three(), 8, where="*", num_heads={"1": 2})[0]) == [8, 2, 8]
    assert heads(augment(three(), 8, where="*")[0]) == [8, 8, 8]


@pytest.mark.parametrize("rule", [{"*": 4, "0": 1}, lambda name, conv, size: 1 if name == "0" else 4])
def test_what_was_done_builds_the_network_again_from_json(rule):
    done = json.loads(json.dumps(augment(three(), 8, where="*", num_heads=rule)[0].augmentations[0]))
    again, _ = augment(three(), **done | {"example": 8})
    assert heads(again) == [1, 4, 4]


def test_globs_do_for_windows_and_halving_too():
    model, _ = augment(three(), 8, where="*", window={"[01]": 3}, downsample={"2": 1})
    assert [layer.window and layer.window.size for layer in model] == [(3, 3), (3, 3), None]
    assert [layer.downsample for layer in model] == [0, 0, 1]


BAD = {
    "layer": ({"7": 2}, "num_heads names '7', which is not augmented; such are 0, 1, 2"),
    "glob": ({"stage*": 2}, "num_heads names 'stage*', which is not augmented; such are 0, 1, 2"),
    "twice": ({"*": 2, "[0]": 4}, "num_heads has '*' and '[0]' for 0; leave it to one, or give its name"),
    "none": ({"*": 0}, "0: num_heads must be at least 1, got num_heads=0"),
    "half": ({"1": 2.5}, "1: num_heads must be an int, got num_heads=2.5"),
    "float": (2.0, "0: num_heads must be an int, got num_heads=2.0"),
    "text": ("4", "0: num_heads must be an int, got num_heads='4'"),
    "truth": (True, "0: num_heads must be an int, got num_heads=True"),
    "list": ([2, 4, 8], "num_heads of several layers is a mapping such as {'0': 4}, got [2, 4, 8]"),
}


@pytest.mark.parametrize(("rule", "told"), BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_rule_is_told_in_a_line_and_nothing_is_changed(rule, told):
    model = three()
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        augment(model, 8, where="*", num_heads=rule)
    assert heads(model) == []


def test_a_saved_network_has_its_heads_back(tmp_path):
    rule = {"layer3.*": 2, "layer4.*": 4}
    model, _ = augment(timm.create_model("test_resnet"), 32, where="layer[34].*.conv1", num_heads=rule)
    save_model(model, tmp_path / "network")
    assert heads(load_model(tmp_path / "network").model) == heads(model)
    assert set(heads(model)) == {2, 4}


def test_by_name_with_augmentations_of_json():
    augmentations = [{"where": "layer[34].*.conv1", "num_heads": {"layer3.*": 2, "layer4.*": 4}}]
    model = create_model("augmented", base="test_resnet", augmentations=json.loads(json.dumps(augmentations)))
    assert set(heads(model)) == {2, 4}
