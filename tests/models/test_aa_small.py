"""The small networks of the demo: timm's interface, one parameter budget, and windows that hold one object only."""

import pytest
import timm
import torch

from aaconv.data import shapes
from aaconv.layers.aaconv import AAConv2d
from aaconv.models import list_models

NAMES = ("plain_small", "se_small", "aa_small")


def count(name):
    return sum(parameter.numel() for parameter in timm.create_model(name).parameters())


def test_names():
    assert sorted(list_models("*_small")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_timm_user_expects(name):
    model = timm.create_model(name, num_classes=7, in_chans=4, img_size=(20, 36), drop_path_rate=0.1, drop_rate=0.1)
    features = model.forward_features(torch.randn(2, 4, 20, 36))
    assert features.shape == (2, model.num_features, 5, 9)
    out = model.forward_head(features)
    assert out.shape == (2, 7)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.get_submodule(model.pretrained_cfg["first_conv"]).in_channels == 4
    grouped = timm.models.group_parameters(model, model.group_matcher())
    assert sum(map(len, grouped.values())) == len(list(model.parameters()))
    model.reset_classifier(0)
    assert model.forward_head(features).shape == (2, model.num_features)
    parts = timm.create_model(name, features_only=True, out_indices=(0, 2)).eval()(torch.randn(1, 3, 24, 32))
    assert [part.shape for part in parts] == [(1, 32, 12, 16), (1, 32, 6, 8)]
    assert len(timm.create_model(name, features_only=True)(torch.randn(1, 3, 24, 32))) == 3


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing(name):
    model, x = timm.create_model(name).train(), torch.randn(4, 3, 24, 24)
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*results)


def test_attention_and_se_cost_next_to_nothing():
    plain, se, aa = map(count, NAMES)
    assert plain == 19_554
    assert abs(se / plain - 1) < 0.03
    assert abs(aa / plain - 1) < 0.03


def test_all_convolutions_but_the_first_attend():
    model = timm.create_model("aa_small", num_heads=2)
    assert [type(block.conv) is AAConv2d for block in model.blocks] == [False, True, True]
    assert all(block.conv.num_heads == 2 for block in model.blocks[1:])


def test_no_window_of_the_convolutions_holds_both_objects():
    """What a pixel of the last map depends on, without the gates and the attention."""
    model = timm.create_model("plain_small").double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    model.forward_features(x)[0, :, 8, 8].sum().backward()
    columns = x.grad.abs().sum((0, 1, 2)).nonzero()
    window = int(columns.max() - columns.min() + 1)
    assert window == 15
    assert window < shapes.gap(32) + 2  # a column of either object and the gap between them


def test_settings_are_checked():
    with pytest.raises(ValueError, match="strides"):
        timm.create_model("plain_small", strides=(2,))
    with pytest.raises(TypeError, match="num_heads"):
        timm.create_model("plain_small", num_heads=2)
