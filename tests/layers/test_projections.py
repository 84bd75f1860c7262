"""How the projections begin, queries and keys of one length, and what weight decay leaves alone."""

import copy
import pickle

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from aaconv import AAConv2d, augment
from aaconv.layers import no_weight_decay

FEW = {"num_heads": 4, "key_channels": 32, "value_channels": 16}


@torch.no_grad()
def test_the_paper_begins_with_glorots_weights_zero_biases_and_tables_of_deviation_one():
    layer = AAConv2d(64, 64, 3, size=40, init="paper", **FEW)
    for conv, fans in ((layer.qkv, 64 + 80), (layer.project, 16 + 16)):
        bound = (6 / fans) ** 0.5
        assert bound * 0.98 < conv.weight.abs().max() <= bound
        assert conv.weight.std() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert conv.bias is not None
        assert not conv.bias.any()
    for table in (layer.rel_h, layer.rel_w):
        assert table.std() == pytest.approx(1, rel=0.1)
        assert table.mean() == pytest.approx(8**-0.5, abs=0.15)
    assert AAConv2d(64, 64, 3, size=4, init="paper", attention_bias=False, **FEW).qkv.bias is None
    weight = layer.qkv.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.qkv.weight, weight)
    assert layer.qkv.weight.abs().max() <= (6 / 144) ** 0.5


@pytest.mark.parametrize("combine", ["concat", "add"])
def test_normalised_queries_make_the_size_of_the_input_irrelevant(combine):
    layer = AAConv2d(6, 32, 1, size=5, qk_norm=True, combine=combine, **FEW).double()
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(layer.attention_maps(1e6 * x), layer.attention_maps(1e3 * x))
    qkv = layer.attention_inputs(x)[0]
    parts = qkv[..., :64].unflatten(-1, (8, 8))
    torch.testing.assert_close(parts.square().mean(-1), torch.ones_like(parts[..., 0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(qkv[..., 64:], layer.qkv(x).movedim(1, -1)[..., 64:])


def test_the_temperature_of_a_head_multiplies_its_logits():
    layer = AAConv2d(6, 32, 1, size=5, qk_norm=True, **FEW).double()
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    before = layer.attention_maps(x)
    with torch.no_grad():
        layer.temperature.copy_(torch.tensor([1.0, 2.0, 0.0, 1.0]))
    after = layer.attention_maps(x)
    torch.testing.assert_close(after[:, [0, 3]], before[:, [0, 3]])
    torch.testing.assert_close(after[:, 1], (2 * before[:, 1].log()).softmax(-1))
    torch.testing.assert_close(after[:, 2], torch.full_like(after[:, 2], 1 / 25))
    layer(x).square().sum().backward()
    assert layer.temperature.grad.all()


def test_without_qk_norm_nothing_is_new_in_the_state_dict():
    assert set(AAConv2d(6, 32, 1, size=5, **FEW).state_dict()) == {
        *("conv.weight", "conv.bias", "qkv.weight", "project.weight", "rel_h", "rel_w")
    }


@pytest.fixture
def augmented():
    options = {"where": "layer4.*.conv1", "combine": "add", "qk_norm": True}
    return augment(timm.create_model("resnet10t"), 64, **options, **FEW)[0]


OWN = {f"layer4.0.conv1.{name}" for name in ("rel_h", "rel_w", "gate", "temperature")}


def test_timms_optimizers_leave_tables_and_gates_out_of_weight_decay(augmented):
    assert augmented.no_weight_decay() == no_weight_decay(augmented) == OWN
    optimizer = create_optimizer_v2(augmented, "adamw", weight_decay=0.05)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(augmented.named_parameters())
    assert {decays[id(named[name])] for name in OWN} == {0.0}
    assert decays[id(named["layer4.0.conv1.qkv.weight"])] == 0.05


def test_copies_and_pickles_name_them_too(augmented):
    for copied in (copy.deepcopy(augmented), pickle.loads(pickle.dumps(augmented))):
        assert copied.no_weight_decay() == OWN


def test_what_the_network_names_itself_stays_named():
    class Network(nn.Sequential):
        def no_weight_decay(self):
            return {"1.weight"}

    model, _ = augment(Network(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)), 9, where="0", combine="add", **FEW)
    assert model.no_weight_decay() == {"1.weight", "0.rel_h", "0.rel_w", "0.gate"}
    concatenated, _ = augment(Network(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)), 9, where="0", **FEW)
    assert concatenated.no_weight_decay() == {"1.weight"}
    assert not hasattr(augment(nn.Sequential(nn.Conv2d(3, 32, 3)), 9, where="0", **FEW)[0], "no_weight_decay")
