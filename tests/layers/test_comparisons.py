"""What attention is compared with begins without effect, to the bit, and learns like it."""

import pytest
import timm
import torch
from torch import nn

import aaconv
from aaconv.layers import attention_parameters, no_weight_decay
from aaconv.layers.comparisons import COMPARISONS, Average, ZeroSE, put_instead

WHERE = ["blocks.3.2.conv_pw", "blocks.4.2.conv_pw"]


def pretend_pretrained():
    torch.manual_seed(0)
    model = timm.create_model("tf_efficientnet_lite0", num_classes=5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("kind", COMPARISONS)
def test_a_network_computes_what_it_computed_and_what_is_new_gets_a_gradient(kind):
    model, x = pretend_pretrained(), torch.randn(2, 3, 64, 64)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        before = model(x)
        assert put_instead(model, kind, where=WHERE) is model
        assert torch.equal(model(x), before)
    model(x).square().sum().backward()
    new = attention_parameters(model)
    assert new
    assert {name.rpartition(".conv_pw.")[0] for name in new} == {"blocks.3.2", "blocks.4.2"}
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert new <= with_gradient
    assert any(model.get_parameter(name).grad.any() for name in new)
    result = model.load_state_dict(state, strict=False)
    assert (set(result.missing_keys), result.unexpected_keys) == (new, [])


def test_the_average_is_attention_with_even_weights():
    torch.manual_seed(0)
    layer = Average(nn.Conv2d(6, 8, 3, stride=2, padding=1).double(), value_channels=4)
    nn.init.normal_(layer.gate)
    x = torch.randn(2, 6, 7, 5, dtype=torch.float64)
    values = torch.einsum("vi,bihw->bvhw", layer.values.weight[:, :, 0, 0], x)
    mixed = torch.einsum("ov,bv->bo", layer.project.weight[:, :, 0, 0], values.flatten(2).mean(2))
    expected = layer.conv(x) + (layer.gate * mixed)[:, :, None, None]
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert no_weight_decay(layer) == {"gate"}


def test_what_is_augmented_already_is_passed_over():
    model = timm.create_model("test_resnet")
    put_instead(model, "se", where="layer4.0.conv1", hidden=5)
    assert model.layer4[0].conv1.mlp[0].out_channels == 5
    put_instead(model, "average", where="layer4.*")
    inside = [module for module in model.layer4[0].conv1.modules() if isinstance(module, Average)]
    assert inside == []
    assert isinstance(model.layer4[0].conv2, Average)


def test_a_network_with_a_comparison_is_saved_and_loaded(tmp_path):
    augmentations = [{"where": "layer4.0.conv1", "instead": "se"}, {"where": "layer4.0.conv2", "combine": "add"}]
    model = timm.create_model("augmented", base="test_resnet", augmentations=augmentations, img_size=32).eval()
    nn.init.normal_(model.layer4[0].conv1.mlp[2].weight)
    aaconv.save_model(model, tmp_path / "saved")
    again, x = aaconv.load_model(tmp_path / "saved").model, torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), model(x))


def test_squeeze_and_excitation_scales_channels():
    torch.manual_seed(0)
    layer = ZeroSE(nn.Conv2d(6, 8, 1), hidden=2)
    assert [tuple(part.weight.shape[:2]) for part in (layer.mlp[0], layer.mlp[2])] == [(2, 8), (8, 2)]
    nn.init.normal_(layer.mlp[2].weight)
    x = torch.randn(2, 6, 7, 5)
    factors = layer(x) / layer.conv(x)
    torch.testing.assert_close(factors, factors.mean((2, 3), keepdim=True).expand_as(factors), rtol=1e-4, atol=1e-4)
    assert factors.min() > 0
    assert factors.max() < 2


def test_an_option_that_it_does_not_have_is_named():
    with pytest.raises(TypeError, match="instead='se' takes no option 'hiden'; it takes hidden"):
        put_instead(pretend_pretrained(), "se", where=WHERE, hiden=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "cbam"}, "instead must be one of se, average, got instead='cbam'"),
        ({"kind": "se", "hidden": 0}, "hidden must be 1 to 480, the output channels, got hidden=0"),
        ({"kind": "average", "value_channels": 0}, "value_channels must be at least 1, got value_channels=0"),
    ],
)
def test_what_cannot_be_compared_with_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        put_instead(pretend_pretrained(), where=WHERE, **arguments)


def test_an_error_names_the_layer_and_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 8, 1))
    with pytest.raises(ValueError, match=r"^1: hidden must be 1 to 8, the output channels, got hidden=16$"):
        put_instead(model, "se", where="*")
    assert [type(part) for part in model] == [nn.Conv2d, nn.Conv2d]


@pytest.mark.parametrize("kind", COMPARISONS)
def test_a_convolution_without_weights_is_refused(kind):
    model = nn.Sequential(nn.LazyConv2d(32, 1))
    message = "the convolution is lazy: its weights are not made yet; run a forward first"
    with pytest.raises(ValueError, match=f"^{message}$"):
        COMPARISONS[kind](model[0])
    with pytest.raises(ValueError, match=f"^0: {message}$"):
        put_instead(model, kind, where="0")


def test_a_convolution_alone_becomes_the_comparison():
    conv = nn.Conv2d(3, 32, 1)
    layer = put_instead(conv, "average", where="*")
    assert isinstance(layer, Average)
    assert layer.conv is conv
