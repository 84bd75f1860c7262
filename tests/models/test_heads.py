"""Heads that differ from stage to stage of a ResNet."""

import re

import pytest
import timm
import torch

from aaconv.layers.aaconv import AAConv2d


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def augmented(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, AAConv2d)}


@pytest.mark.parametrize(
    "heads", [[1, 2, 4, 16], (1, 2, 4, 16), {f"layer{n}.*": 2**n // 2 for n in (1, 2, 3)} | {"layer4.*": 16}]
)
def test_heads_are_given_for_each_stage(heads):
    model = on_meta("aa_resnet18", where="layer*.*.conv1", num_heads=heads)
    assert [layer.num_heads for layer in augmented(model).values()] == [1, 1, 2, 2, 4, 4, 16, 16]


def test_stages_without_attention_and_layers_before_them_do_not_ask_for_heads():
    assert {layer.num_heads for layer in augmented(on_meta("aa_resnet18", num_heads=[1, 2, 2, 2])).values()} == {2}
    layers = augmented(on_meta("aa_resnet50", where=["conv1", "layer1.0.conv2"], num_heads=[2, 4, 8, 8]))
    assert {name: layer.num_heads for name, layer in layers.items()} == {"conv1": 8, "layer1.0.conv2": 2}
    backbone = augmented(on_meta("aa_retinanet_resnet18", num_heads=[1, 1, 2, 4]))
    assert [layer.num_heads for layer in backbone.values()] == [1, 2, 4]


@pytest.mark.parametrize("heads", [[2, 4, 8], [], [2, 4, 8, 8, 8], [2, 4, 8, 0], [2, 4, 8, 8.0], [2, 4, 8, None]])
def test_wrong_heads_of_stages_are_named(heads):
    told = "must be an int, at least 1, or one for each of the 4 stages, such as [2, 4, 8, 8]"
    with pytest.raises(ValueError, match=rf"^num_heads {re.escape(told)}.*got num_heads={re.escape(str(heads))}$"):
        on_meta("aa_resnet18", num_heads=heads)
