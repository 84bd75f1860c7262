import re
import subprocess
import sys

import pytest
import timm
import torch
import torchvision
from torch import nn

from aaconv import AAConv2d
from aaconv.layers import augment
from aaconv.layers.augment_report import Replacement, Report
from aaconv.models import create_without_memory

# One network a family, the convolutions to take, and the input it sees.
FAMILIES = {
    "timm resnet": (lambda: timm.create_model("resnet18"), "layer[34].*.conv1", 64),
    "timm regnet": (lambda: timm.create_model("regnetx_002"), re.compile(r"s[34]\..*conv3\.conv"), 64),
    "timm efficientnet with tf padding": (
        lambda: timm.create_model("tf_efficientnet_b0"),
        lambda name, conv: name.endswith("conv_pw") and conv.out_channels >= 240,
        96,
    ),
    "timm mobilenet": (lambda: timm.create_model("mobilenetv3_small_050"), ["conv_head"], 64),
    "timm convnext downsampling": (lambda: timm.create_model("convnext_atto"), "stages.*.downsample.1", 64),
    "timm weight standardised resnet": (lambda: timm.create_model("resnetv2_50d_gn"), "stages.3.blocks.*.conv2", 64),
    "torchvision vgg": (lambda: torchvision.models.vgg11(num_classes=10), "features.1[68]", 64),
    "torchvision densenet": (lambda: torchvision.models.densenet121(), "features.denseblock4.*.conv1", 64),
    "torchvision resnext": (lambda: torchvision.models.resnext50_32x4d(), "layer4.*.conv1", 64),
    "torchvision shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(), "conv5.0", 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_timm_and_torchvision(family):
    build, where, size = FAMILIES[family]
    model = build()
    total = sum(p.numel() for p in model.parameters())
    augmented, report = augment(model, size, where=where, num_heads=4, value_ratio=0.125)
    assert augmented is model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, AAConv2d)}
    assert [row.name for row in report.replacements] == list(layers)
    assert len(layers) >= 1
    after = sum(p.numel() for p in model.parameters())
    assert after - total == report.parameters_after - report.parameters_before
    for shape in [(2, 3, size, size), (2, 3, size + 32, size)]:
        model(torch.randn(shape)).square().mean().backward()
    for name, layer in layers.items():
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()), name


def test_the_remaining_channels_keep_their_weights():
    model = timm.create_model("resnet18").eval()
    x = torch.randn(1, 64, 8, 8)
    before = model.layer1[0].conv1(x)
    augment(model, 64, where="layer1.0.conv1", value_ratio=0.25)
    layer = model.layer1[0].conv1
    assert torch.equal(layer(x)[:, :48], before[:, :48])
    assert not layer.training


def test_tables_are_made_for_the_maps_of_the_dry_run():
    model = timm.create_model("resnet50")
    _, report = augment(model, (224, 160), where="layer[234].*.conv2", downsample=lambda name, conv, size: size[0] > 14)
    assert [row.attention_size for row in report.replacements] == [(14, 10)] * 10 + [(7, 5)] * 3
    assert model.layer2[0].conv2.size == (14, 10)
    assert model.layer2[0].conv2.downsample
    assert not model.layer3[0].conv2.downsample


def test_the_dry_run_leaves_no_trace():
    model = timm.create_model("resnet18").train()
    model.layer1.eval()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    augment(model, 64, where="layer4.*.conv2")
    assert model.training
    assert not model.layer1[0].conv1.training
    assert model.layer4[0].conv2.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
        assert not buffer.is_meta


def test_large_examples_cost_nothing():
    """A dry run at 16384 x 16384 would need 64 GB for the first map alone."""
    model = timm.create_model("resnet18")
    _, report = augment(model, 16384, where="layer4.1.conv2", value_ratio=0.25)
    assert report.replacements[0].size == (512, 512)


def test_meta_models_stay_on_meta():
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    augment(model, 64, where="layer4.*.conv1")
    assert all(p.is_meta for p in model.parameters())


def test_shared_convolutions_are_replaced_together():
    conv = nn.Conv2d(16, 16, 3, padding=1)
    model = nn.Sequential(conv, nn.AvgPool2d(2), conv)
    _, report = augment(model, (8, 6), where="0", num_heads=2, value_ratio=0.25)
    assert model[0] is model[2]
    assert isinstance(model[0], AAConv2d)
    assert model[0].size == (8, 6)
    assert len(report.replacements) == 1
    model(torch.randn(1, 16, 8, 6))


def test_a_convolution_alone_is_returned_augmented():
    layer, _ = augment(nn.Conv2d(8, 16, 3, padding=1), (5, 5), where="*", num_heads=1)
    assert isinstance(layer, AAConv2d)
    assert layer.size == (5, 5)


def test_what_is_augmented_already_stays():
    model = timm.create_model("resnet18")
    augment(model, 64, where="layer4.0.conv1")
    first = model.layer4[0].conv1
    augment(model, 64, where="layer4.*")
    assert model.layer4[0].conv1 is first
    assert isinstance(model.layer4[1].conv2, AAConv2d)


def test_depthwise_and_grouped_convolutions_are_refused_unless_asked_for():
    model = torchvision.models.resnext50_32x4d()
    with pytest.raises(ValueError, match=r"layer4.0.conv2 is a grouped convolution \(groups=32\).*grouped=True"):
        augment(model, 64, where="layer4.*.conv2")
    original = model.layer4[0].conv2
    augment(model, 64, where="layer4.*.conv2", grouped=True, value_channels=256)
    layer = model.layer4[0].conv2
    assert layer.conv.groups == 32
    # 32 groups of 32 channels, of which the first 24 stay
    assert torch.equal(layer.conv.weight, original.weight.view(32, 32, -1, 3, 3)[:, :24].flatten(0, 1))
    model(torch.randn(2, 3, 64, 64)).sum().backward()


@pytest.mark.parametrize("groups", [2, 4, 8, 16])
def test_grouped_convolutions_take_the_defaults(groups):
    """Of every group some channels attend: the default ratio is rounded up to whole groups."""
    model, report = augment(nn.Conv2d(32, 32, 3, padding=1, groups=groups), 8, where="*", grouped=True)
    assert model.value_channels == max(8, groups) == report.replacements[0].value_channels
    assert model(torch.randn(1, 32, 8, 8)).shape == (1, 32, 8, 8)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("name", "where", "instead"),
    [
        ("mobilenetv3_small_050", "*.conv_dw", "pointwise convolutions, such as blocks.0.0.conv_pw$"),
        ("tf_efficientnet_b0", "blocks.2.0.conv_dw", "such as blocks.2.0.conv_pw or blocks.2.0.conv_pwl"),
        ("convnext_atto", "stages.3.*.conv_dw", "such as stages.3.blocks.0.mlp.fc1 or stages.3.blocks.0.mlp.fc2"),
        ("convnext_tiny", "stages.3.*.conv_dw", "other convolutions, such as stages.3.downsample.1"),
    ],
)
def test_instead_of_depthwise_convolutions_others_are_named_at_once(name, where, instead, grouped):
    with pytest.raises(ValueError, match=f"is a depthwise convolution .*; augment .*{instead}"):
        augment(create_without_memory(name), 64, where=where, grouped=grouped)


def test_an_error_leaves_the_model_as_it_was():
    model = timm.create_model("resnet18")
    with pytest.raises(ValueError, match=r"layer4.1.conv2: value_channels=1000 is more than out_channels=512"):
        augment(model, 64, where=["layer4.1.conv2"], value_channels=1000)
    assert not any(isinstance(m, AAConv2d) for m in model.modules())


@pytest.mark.parametrize(
    ("where", "example", "message"),
    [
        ("layer9.*", 64, r"where='layer9.\*' matches none of the 20 convolutions, such as conv1"),
        (["layer4.1.conv3"], 64, "where names 'layer4.1.conv3', which is no convolution of the model; nearest: layer4"),
        ("layer4.*", (1, 2, 3, 4, 5), "example must be"),
        ("layer4.*", 64.0, "example must be .*got 64.0"),
        (3, 64, "where must be a glob, a regular expression, names or a callable, got where=3"),
        ("layer4.*", (5, 64, 64), r"the dry run with an input of shape \[1, 5, 64, 64\] failed"),
        (r"layer4\..*conv2", 64, r"a string is a glob, and where=re.compile\('layer4.*conv2'\) matches 2$"),
        (r"layer9\..*conv2", 64, r"a string is a glob: pass re.compile\(...\) for a regular expression$"),
        ("layer9.conv2", 64, r"such as conv1, [\w., ]+$"),
    ],
)
def test_bad_arguments_are_named(where, example, message):
    with pytest.raises(ValueError, match=message):
        augment(timm.create_model("resnet18"), example, where=where)


def test_a_convolution_that_never_runs_is_named():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(ValueError, match="unused did not run in the dry run"):
        augment(Unused(), 4, where="*", num_heads=1)


def test_the_report_reads_as_a_table():
    model = timm.create_model("resnet18")
    _, report = augment(model, 64, where="layer4.*.conv1")
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "map", "attends", "at", "heads", "dk", "dv", "parameters", "augmented"]
    assert lines[1].split()[:10] == ["layer4.0.conv1", "2", "x", "2", "2", "x", "2", "8", "160", "48"]
    assert lines[-1].startswith("in all")
    assert f"{report.parameters_after:,}" in lines[-1]
    assert repr(report) == str(report)


def test_the_report_is_a_table_in_a_notebook():
    row = Replacement("a<b", (7, 5), (4, 3), 2, 40, 4, 1000, 1234)
    html = Report((row,))._repr_html_()
    assert html.startswith("<table><thead><tr><th>layer</th><th>map</th>")
    assert "<td>a&lt;b</td><td>7 x 5</td><td>4 x 3</td><td>2</td><td>40</td><td>4</td><td>1,000</td>" in html
    assert html.count("<tr>") == 3


class Stack(nn.Module):
    """Two convolutions, the second one given, called in an uncommon way."""

    def __init__(self, conv):
        super().__init__()
        self.stem, self.conv, self.shift = nn.Conv2d(3, 16, 1), conv, None

    def forward(self, x, y=None):
        if x.shape[-1] != 8:
            raise AssertionError
        if self.shift is None:
            self.shift = torch.arange(8, device=x.device).to(x.dtype)
        x = self.stem(x + self.shift)
        return self.conv(input=x if y is None else x + y)


FEW = {"where": "conv", "num_heads": 2, "value_ratio": 0.25}


def test_what_a_forward_keeps_is_not_kept_of_the_dry_run():
    model, _ = augment(Stack(nn.Conv2d(16, 16, 3)), 8, **FEW)
    assert model.shift is None
    assert model.conv.size == (6, 6)


def test_a_forward_with_several_inputs_takes_several_examples():
    inputs = torch.randn(2, 3, 6, 8), torch.randn(2, 16, 6, 8)
    model, report = augment(Stack(nn.Conv2d(16, 16, 3, padding=1)), inputs, **FEW)
    assert report.replacements[0].size == (6, 8)
    assert model(*inputs).shape == (2, 16, 6, 8)


def test_a_dry_run_that_fails_without_words_names_the_error():
    with pytest.raises(ValueError, match=r"input of shape \[1, 3, 9, 9\] failed: AssertionError"):
        augment(Stack(nn.Conv2d(16, 16, 3)), 9, **FEW)


def test_a_convolution_with_state_of_its_own_keeps_the_part_of_its_channels():
    class Quantised(nn.Conv2d):
        def __init__(self, *args):
            super().__init__(*args)
            self.temperature = nn.Parameter(torch.ones(()))
            self.register_buffer("scale", torch.rand(self.out_channels))

        def forward(self, input):
            return super().forward(input) * self.scale[:, None, None] * self.temperature

    conv, x = Quantised(16, 16, 3), torch.randn(2, 16, 8, 8)
    model, _ = augment(Stack(conv), 8, **FEW)
    torch.testing.assert_close(model.conv(x)[:, :12], conv(x)[:, :12])


@pytest.mark.parametrize(
    "wrap",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm],
    ids=["weight_norm", "spectral_norm", "older spectral_norm"],
)
def test_computed_weights_are_refused_with_a_way_out(wrap):
    with pytest.raises(ValueError, match="conv: the convolution computes its weight from other parameters"):
        augment(Stack(wrap(nn.Conv2d(16, 16, 3))), 8, **FEW)


def test_lazy_parameters_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"conv.weight is lazy.*run the model once before"):
        augment(Stack(nn.LazyConv2d(16, 3)), 8, **FEW)


def test_other_convolutions_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ConvTranspose2d(16, 16, 2, 2), nn.Flatten(2), nn.Conv1d(16, 16, 1))
    augment(model, 8, where="*", num_heads=2, value_ratio=0.25)
    assert [type(m) for m in model] == [AAConv2d, nn.ConvTranspose2d, nn.Flatten, nn.Conv1d]
    with pytest.raises(ValueError, match="the model has no Conv2d"):
        augment(model[1:], 8, where="*")


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda: timm.create_model("resnet50"), "layer*.conv2"),
        (lambda: timm.create_model("resnet18"), "*"),
        (torchvision.models.densenet121, "*.conv2"),
        (lambda: timm.create_model("tf_efficientnet_b0"), "*.se.conv_*"),
        (torchvision.models.resnext50_32x4d, "layer*.conv2"),
    ],
    ids=["resnet50", "all of resnet18", "densenet121", "SE of efficientnet", "resnext50"],
)
def test_the_defaults_do_for_every_width(build, where):
    """No option, no warning, and of every convolution with two channels or more a part is left."""
    with torch.device("meta"):
        model = build()
    _, report = augment(model, 64, where=where, grouped=True)
    for row in report.replacements:
        layer = model.get_submodule(row.name)
        assert layer.value_channels == row.value_channels >= layer.num_heads == row.num_heads
        assert layer.conv.out_channels >= layer.out_channels // 2


@pytest.mark.slow
def test_a_compiled_model_is_refused_in_one_line():
    """In a process of its own: a dry run of compiled code ends it."""
    code = (
        "import timm, torch, aaconv\n"
        "model = timm.create_model('resnet18')\n"
        "for compiled in (torch.compile(model), torch.nn.Sequential(torch.compile(model))):\n"
        "    try:\n"
        "        aaconv.augment(compiled, 64, where='*layer4.*.conv2')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "model.compile()\n"
        "print(len(aaconv.augment(model, 64, where='layer4.*.conv2')[1].replacements))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    refused = "the model is compiled: augment it first, then torch.compile what augment returns"
    assert done.stdout.splitlines() == [refused, refused, "2"], done.stderr


def test_of_a_detector_the_part_is_named_that_can_be_augmented():
    with torch.device("meta"):
        model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    with pytest.raises(ValueError, match=r"failed: .*; its part model\.backbone\.body runs: augment that"):
        augment(model, 128, where="backbone.body.layer4.*.conv2")
    _, report = augment(model.backbone.body, 128, where="layer4.*.conv2")
    assert [row.size for row in report.replacements] == [(4, 4)] * 3
    assert isinstance(model.backbone.body.layer4[0].conv2, AAConv2d)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("num_head", "nearest: num_heads"),
        ("keyratio", "nearest: key_ratio"),
        ("group", "nearest: grouped"),
        ("dtype", "nearest|it takes"),
        ("zzz", "it takes .*num_heads"),
    ],
)
def test_an_unknown_option_names_the_nearest(option, told):
    with pytest.raises(TypeError, match=f"augment takes no option '{option}'; ({told})"):
        augment(timm.create_model("resnet18"), 64, where="layer4.*", **{option: 4})


def test_a_ratio_that_does_not_decide_is_told_once():
    with pytest.warns(UserWarning, match="ratio") as told:
        augment(timm.create_model("resnet18"), 64, where="layer[34].*.conv1", key_ratio=0.1)
    (warning,) = told
    assert str(warning.message) == (
        "layer3.0.conv1: key_ratio=0.1 of 256 channels is 24 in 8 heads, below the minimum of 20 per head: "
        "key_channels=160; pass min_key_channels_per_head=3 or key_channels (so in 4 of 4 layers)"
    )
    assert warning.filename == __file__
