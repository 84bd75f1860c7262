"""combine="add": a network that is augmented so computes what it computed, to the bit, until its gates are trained."""

import re

import pytest
import timm
import torch
import torchvision
from torch import nn

from aaconv import AAConv1d, AAConv2d, augment
from support.random_network import randomize

FEW = {"num_heads": 2, "key_channels": 8, "value_channels": 4, "combine": "add"}

# Of each family a small network of timm's and of torchvision's: the convolutions to take, and the input.
FAMILIES = {
    "timm resnet": (lambda: timm.create_model("resnet10t"), "layer[34].*.conv[12]", 64),
    "timm resnext": (lambda: timm.create_model("resnext26ts"), "stages.[23].*.conv2_kxk.conv", 64),
    "timm regnet": (lambda: timm.create_model("regnety_002"), "s[34].*.conv[123].conv", 64),
    "timm efficientnet": (lambda: timm.create_model("tf_efficientnet_lite0"), "blocks.[345].*.conv_*", 64),
    "timm mobilenet": (lambda: timm.create_model("mobilenetv3_small_050"), re.compile(r"blocks.*\.conv_(dw|pw)"), 64),
    "timm convnext": (lambda: timm.create_model("convnext_atto"), "stages.[23].*.conv_dw", 64),
    "timm densenet": (lambda: timm.create_model("densenet121"), "features.denseblock4.*.conv[12]", 64),
    "timm vgg": (lambda: timm.create_model("vgg11_bn", num_classes=5), "features.2*", 64),
    "torchvision resnet": (lambda: torchvision.models.resnet18(), "layer[34].*.conv1", 64),
    "torchvision resnext": (lambda: torchvision.models.resnext50_32x4d(), "layer4.*.conv2", 64),
    "torchvision regnet": (lambda: torchvision.models.regnet_y_400mf(), "trunk_output.block4.*.b.0", 64),
    "torchvision efficientnet": (lambda: torchvision.models.efficientnet_b0(), "features.[67].*.block.1.0", 64),
    "torchvision mobilenet": (lambda: torchvision.models.mobilenet_v3_small(), "features.*.block.?.0", 64),
    "torchvision convnext": (lambda: torchvision.models.convnext_tiny(), "features.7.*.block.0", 64),
    "torchvision densenet": (lambda: torchvision.models.densenet121(), "features.denseblock4.*.conv2", 64),
    "torchvision vgg": (lambda: torchvision.models.vgg11(num_classes=5), "features.1[68]", 64),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def bits(x):
    """The numbers as they lie in memory: -0.0 is not 0.0, and a NaN equals itself."""
    return x.contiguous().view(torch.int32)


@pytest.mark.slow
@each_family
def test_an_augmented_network_computes_what_it_computed(family):
    build, where, size = FAMILIES[family]
    model, x = randomize(build()).eval(), torch.randn(2, 3, size, size)
    with torch.no_grad():
        before = model(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, report = augment(model, size, where=where, **FEW)
    with torch.no_grad():
        assert torch.equal(bits(model(x)), bits(before))
        wide = torch.randn(1, 3, size, size + 32)
        assert model(wide).isfinite().all()
    recorded = model(x)
    assert torch.equal(bits(recorded), bits(before))
    recorded.square().mean().backward()
    for row in report.replacements:
        assert model.get_submodule(row.name).gate.grad.any(), row.name

    result = model.load_state_dict(state, strict=False)
    own = {"qkv.weight", "project.weight", "rel_h", "rel_w", "gate"}
    assert result.unexpected_keys == []
    assert set(result.missing_keys) == {f"{row.name}.{key}" for row in report.replacements for key in own}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["timm efficientnet", "torchvision resnet"])
def test_a_state_dict_from_before_brings_its_numbers_back(family):
    build, where, size = FAMILIES[family]
    model, x = randomize(build()).eval(), torch.randn(2, 3, size, size)
    fresh, _ = augment(build().eval(), size, where=where, **FEW)
    fresh.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(fresh(x), model(x))


LAYERS = {
    "plain": (nn.Conv2d(6, 16, 3, padding=1), {}),
    "strided": (nn.Conv2d(6, 16, 3, 2, 1), {}),
    "grouped": (nn.Conv2d(6, 12, 3, padding=1, groups=3), {"downsample": True}),
    "depthwise": (nn.Conv2d(6, 6, 5, padding=2, groups=6), {"qk_norm": True}),
    "depthwise, more out than in": (nn.Conv2d(6, 12, 3, padding=1, groups=6, bias=False), {"share_heads": False}),
    "dilated": (nn.Conv2d(6, 7, 3, padding=2, dilation=2, padding_mode="reflect"), {"position": "sinusoidal"}),
    "more values than channels": (nn.Conv2d(6, 3, 1), {"value_channels": 8, "position": "none"}),
    "biased attention": (nn.Conv2d(6, 16, 3, padding=1), {"init": "paper", "position": "coordconv"}),
}
each_layer = pytest.mark.parametrize(("conv", "options"), LAYERS.values(), ids=LAYERS)


@each_layer
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_kind_of_convolution_is_kept(conv, options, backend):
    layer = AAConv2d.from_conv(conv.eval(), size=5, backend=backend, **(FEW | options))
    assert layer.conv is conv
    for size in ((5, 5), (9, 8)):
        x = torch.randn(2, 6, *size)
        out, expected = layer(x), conv(x)
        assert torch.equal(bits(out), bits(expected))
        assert out.stride() == expected.stride()
        assert out.requires_grad


def test_no_zero_and_no_overflow_gets_through_a_closed_gate():
    class Negative(nn.Conv2d):
        def forward(self, input):
            return torch.full_like(super().forward(input), -0.0)

    conv = Negative(4, 8, 1).eval()
    layer = AAConv2d.from_conv(conv, size=3, **FEW).eval()
    nn.init.constant_(layer.project.weight, torch.inf)
    x = torch.ones(1, 4, 3, 3)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            out = layer(x)
        assert torch.equal(bits(out), bits(conv(x)))
        assert out.signbit().all()
    assert not layer.train()(x).isfinite().any()  # a gradient scaler has to see it


@each_layer
def test_an_open_gate_adds_the_projected_attention(conv, options):
    layer = AAConv2d.from_conv(conv, size=5, **(FEW | options)).double()
    nn.init.normal_(layer.gate)
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    values = layer.attention_inputs(x)[0][..., 16:]
    values = values.flatten(1, 2).unflatten(-1, (2, -1))
    attended = torch.einsum("bhij,bjhc->bihc", layer.attention_maps(x), values).flatten(2)
    height, width = layer.attention_size(5, 5)
    attended = layer.project(attended.transpose(1, 2).unflatten(-1, (height, width)))
    if layer.downsample:
        attended = nn.functional.interpolate(attended, layer.output_size(5, 5), mode="bilinear")
    for training in (False, True):
        torch.testing.assert_close(layer.train(training)(x), conv(x) + layer.gate[:, None, None] * attended)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_gradients_are_right_whether_the_gate_is_open(training, gate):
    layer = AAConv2d(2, 4, 3, size=3, num_heads=2, key_channels=4, value_channels=2, combine="add", qk_norm=True)
    layer = layer.double().train(training)
    nn.init.constant_(layer.gate[1:], gate)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, layer.gate, layer.conv.weight, *layer.project.parameters())
    # Numbers on both sides of a gate of zero: the function is linear in it.
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), inputs, atol=1e-4)


def test_the_first_step_opens_the_gates_and_the_second_trains_the_rest():
    model, _ = augment(randomize(timm.create_model("resnet10t", num_classes=3)), 64, where="layer4.*.conv1", **FEW)
    layer = model.layer4[0].conv1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rest = [layer.qkv.weight, layer.project.weight, layer.rel_h, layer.rel_w]
    for step in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.tensor([0, 1, 2, 0])).backward()
        assert layer.gate.grad.any()
        assert all(bool(weight.grad.any()) == (step > 0) for weight in rest)
        optimizer.step()


def test_a_sequence():
    conv = nn.Conv1d(6, 12, 3, padding=1, groups=6).eval()
    layer = AAConv1d.from_conv(conv, size=7, **FEW)
    x = torch.randn(2, 6, 9)
    assert torch.equal(bits(layer(x)), bits(conv(x)))
    nn.init.ones_(layer.gate)
    assert not torch.allclose(layer(x), conv(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision(dtype):
    conv, x = nn.Conv2d(6, 16, 3, padding=1).eval(), torch.randn(2, 6, 5, 5)
    layer = AAConv2d.from_conv(conv, size=5, qk_norm=True, **FEW)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
        assert out.dtype == dtype
        assert torch.equal(out, conv(x))
    out.float().sum().backward()
    assert layer.gate.grad.dtype == torch.float32
    layer.to(dtype)
    assert torch.equal(layer(x.to(dtype)), conv(x.to(dtype)))


def test_the_memory_format_is_the_convolutions():
    layer = AAConv2d(6, 16, 3, size=5, **FEW).to(memory_format=torch.channels_last)
    x = torch.randn(2, 6, 5, 5).to(memory_format=torch.channels_last)
    for training in (False, True):
        assert layer.train(training)(x).is_contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_compiled(training):
    layer = AAConv2d(6, 12, 3, groups=3, size=5, qk_norm=True, **FEW).train(training)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 5, 5)
    for gate in (0.0, 0.5):
        nn.init.constant_(layer.gate, gate)
        torch.testing.assert_close(compiled(x), layer(x))
        gradients = [torch.autograd.grad(one(x).square().sum(), [*layer.parameters()]) for one in (compiled, layer)]
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_traced_with_gradients(gate):
    layer, x = AAConv2d(6, 12, 3, groups=3, size=5, qk_norm=True, **FEW).eval(), torch.randn(2, 6, 5, 5)
    nn.init.constant_(layer.gate, gate)
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x), layer(x))
    gradients = [torch.autograd.grad(one(x).square().sum(), [*layer.parameters()]) for one in (traced, layer)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    layer = AAConv2d(6, 12, 3, groups=3, size=5, qk_norm=True, **FEW).eval()
    nn.init.normal_(layer.gate[:6])
    auto = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    program = torch.export.export(layer, (torch.randn(2, 6, 9, 8),), dynamic_shapes={"input": auto}, strict=strict)
    for shape in ((2, 6, 9, 8), (3, 6, 12, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), layer(x))
        assert torch.equal(program.module()(x)[:, 6:], layer.conv(x)[:, 6:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combine": "sum"}, "combine must be one of concat, add, got combine='sum'"),
        ({"init": "xavier"}, "init must be one of scaled, literal, unit, paper, got init='xavier'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AAConv2d(6, 16, 3, **options)


def test_parametrized_convolutions_are_kept():
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 16, 3, padding=1)).eval()
    state, x = conv.state_dict(), torch.randn(1, 6, 5, 5)
    layer = AAConv2d.from_conv(conv, size=5, **FEW)
    assert torch.equal(layer(x), conv(x))
    assert layer.load_state_dict(state, strict=False).unexpected_keys == []
