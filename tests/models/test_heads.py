"""Heads that differ from stage to stage of a ResNet."""

import re

import pytest

from support.built_models import augmented, on_meta, parameters


def heads_by_stage(model):
    found = {}
    for name, layer in augmented(model).items():
        sizes = layer.num_heads, layer.key_channels, layer.value_channels
        found.setdefault(name.partition(".")[0], set()).add(sizes)
    return found


def test_the_heads_of_windows_grow_with_the_channels():
    assert heads_by_stage(on_meta("aa_window_resnet50")) == {
        "layer1": {(2, 40, 6)},
        "layer2": {(4, 80, 12)},
        "layer3": {(8, 160, 24)},
        "layer4": {(8, 160, 48)},
    }
    assert parameters(on_meta("aa_window_resnet50")) == 25_721_300


def test_eight_heads_everywhere_are_the_network_of_windows_that_was_measured():
    model = on_meta("aa_window_resnet50", num_heads=8)
    assert heads_by_stage(model) == {
        "layer1": {(8, 160, 8)},
        "layer2": {(8, 160, 8)},
        "layer3": {(8, 160, 24)},
        "layer4": {(8, 160, 48)},
    }
    assert parameters(model) == 25_862_376


def test_with_as_many_heads_it_differs_from_the_papers_network_in_stages_and_tables_alone():
    paper = on_meta("aa_resnet50", position="none").state_dict()
    where = "layer[234].*.conv2"
    windows = on_meta("aa_window_resnet50", position="none", where=where, num_heads=8).state_dict()
    assert {name: tensor.shape for name, tensor in windows.items()} == {name: it.shape for name, it in paper.items()}


@pytest.mark.parametrize(
    "heads", [[1, 2, 4, 16], (1, 2, 4, 16), {f"layer{n}.*": 2**n // 2 for n in (1, 2, 3)} | {"layer4.*": 16}]
)
def test_heads_are_given_for_each_stage(heads):
    model = on_meta("aa_resnet18", where="layer*.*.conv1", num_heads=heads)
    assert [layer.num_heads for layer in augmented(model).values()] == [1, 1, 2, 2, 4, 4, 16, 16]


def test_stages_without_attention_and_layers_before_them_do_not_ask_for_heads():
    assert {layer.num_heads for layer in augmented(on_meta("aa_resnet18", num_heads=[1, 2, 2, 2])).values()} == {2}
    layers = augmented(on_meta("aa_window_resnet50", where=["conv1", "layer1.0.conv2"]))
    assert {name: layer.num_heads for name, layer in layers.items()} == {"conv1": 8, "layer1.0.conv2": 2}
    backbone = augmented(on_meta("aa_retinanet_resnet18", num_heads=[1, 1, 2, 4]))
    assert [layer.num_heads for layer in backbone.values()] == [1, 2, 4]


@pytest.mark.parametrize("heads", [[2, 4, 8], [], [2, 4, 8, 8, 8], [2, 4, 8, 0], [2, 4, 8, 8.0], [2, 4, 8, None]])
def test_wrong_heads_of_stages_are_named(heads):
    told = "must be an int, at least 1, or one for each of the 4 stages, such as [2, 4, 8, 8]"
    with pytest.raises(ValueError, match=rf"^num_heads {re.escape(told)}.*got num_heads={re.escape(str(heads))}$"):
        on_meta("aa_resnet18", num_heads=heads)
