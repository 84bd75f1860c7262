import inspect
import re
import subprocess
import sys
from itertools import chain

import pytest
import timm
import torch
from timm.layers import DropPath

from aaconv.models import create_model, list_models
from aaconv.models.aa_wide_resnet import WideResNet
from support.built_models import augmented, on_meta, parameters

NAMES = [name for name in list_models() if not re.search("retinanet|small", name)]  # they have tests of their own
SMALLEST = ["plain_resnet18", "cbam_resnet18", "aa_resnet18", "plain_wrn16_4", "bam_wrn16_4", "aa_wrn16_4"]
SMALLEST += ["plain_mnasnet_075", "aa_mnasnet_075"]


def test_every_kind_of_every_network_is_registered():
    kinds = ("plain", "se", "ge", "bam", "cbam", "gala", "aa")
    resnets = {f"{kind}_resnet{depth}" for kind in kinds for depth in (18, 34, 50, 101, 152)}
    wide = {f"{kind}_wrn{which}" for kind in kinds for which in ("28_10", "28_2", "16_4", "40_2")}
    mnasnets = {f"{kind}_mnasnet_{width}" for kind in ("plain", "aa") for width in ("075", "100", "125", "140")}
    assert set(NAMES) == resnets | wide | mnasnets | {"aa_window_resnet50"}
    assert set(NAMES) <= set(timm.list_models())


@pytest.mark.parametrize("name", list_models())
def test_every_name_is_a_function_that_can_be_found(name):
    """Its source, not a loop over names, says what it builds: `grep "def aa_resnet50"` finds it."""
    source = inspect.getsource(timm.model_entrypoint(name))
    register = "@register_unlisted" if "retinanet" in name else "@register_model"
    assert source.startswith(f"{register}\ndef {name}(pretrained: bool = False, **options: Any) -> ")
    assert f'_create("{name}", pretrained, options' in source


@pytest.mark.slow
def test_no_name_is_timms():
    listing = "import timm; print(*timm.list_models(), *timm.models._registry._model_entrypoints, sep='\\n')"
    theirs = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True).stdout.split()
    assert len(theirs) > 1000
    assert not set(NAMES) & set(theirs)
    assert "resnet50" in theirs  # the process without us does list models


narrow_ratios = pytest.mark.filterwarnings("ignore:.*below the minimum")  # which the paper's ablation has, too


# The paper's networks, counted; se, bam, cbam and gala of table 2, the ratios of table 6.
@narrow_ratios
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("plain_resnet34", {}, 21_801_896),
        ("plain_resnet50", {}, 25_557_032),
        ("plain_resnet101", {}, 44_549_160),
        ("plain_resnet152", {}, 60_192_808),
        ("se_resnet34", {}, 21_959_080),
        ("se_resnet50", {}, 28_071_976),
        ("se_resnet101", {}, 49_292_328),
        ("se_resnet152", {}, 66_770_984),
        ("bam_resnet50", {}, 25_915_099),
        ("cbam_resnet50", {}, 28_089_624),
        ("gala_resnet50", {}, 29_360_600),
        ("aa_resnet34", {}, 20_749_296),
        ("aa_resnet50", {}, 25_809_392),
        ("aa_resnet101", {}, 45_386_728),
        ("aa_resnet152", {}, 61_613_536),
        ("aa_resnet50", {"key_ratio": 0.25, "value_ratio": 0.25}, 24_303_728),
        ("aa_resnet50", {"key_ratio": 0.5, "value_ratio": 0.5}, 22_342_680),
        ("aa_resnet50", {"key_ratio": 0.75, "value_ratio": 0.75}, 20_735_496),
        ("aa_resnet50", {"key_ratio": 1.0, "value_ratio": 1.0}, 19_383_560),
        ("plain_wrn28_10", {}, 36_278_324),
        ("ge_wrn28_10", {}, 36_278_324),
        ("se_wrn28_10", {}, 36_547_124),
        ("aa_wrn28_10", {}, 36_054_100),
        ("aa_wrn28_10", {"share_heads": False}, 36_176_180),
        ("plain_mnasnet_075", {}, 2_912_278),
        ("plain_mnasnet_100", {}, 3_887_038),
        ("plain_mnasnet_125", {}, 5_255_486),
        ("plain_mnasnet_140", {}, 6_105_992),
        ("aa_mnasnet_075", {}, 3_016_212),
        ("aa_mnasnet_100", {}, 4_063_284),
        ("aa_mnasnet_125", {}, 5_532_120),
        ("aa_mnasnet_140", {}, 6_444_034),
    ],
)
def test_the_papers_parameters(name, options, expected):
    assert parameters(on_meta(name, **options)) == expected


@pytest.mark.parametrize(
    "name", ["aa_resnet34", "aa_resnet50", "ge_resnet50", "aa_wrn28_2", "ge_wrn40_2", "aa_mnasnet_125"]
)
def test_augmented_and_parameter_free_networks_keep_the_rest_of_their_base(name):
    kind, _, network = name.partition("_")
    base, model = on_meta(f"plain_{network}").state_dict(), on_meta(name).state_dict()
    if kind == "ge":
        assert base.keys() == model.keys()
    swapped = re.compile(r"\.(conv|qkv|project)\.(weight|bias)$|\.rel_[hw]$")
    rest = {key for key in model if key in base}
    assert all(model[key].shape == base[key].shape for key in rest)
    assert all(swapped.search(key) for key in model.keys() - rest)


# Map sizes, and (key, value) channels, of the first and the last augmented layer of each stage.
@pytest.mark.parametrize(
    ("name", "count", "heads", "sizes", "channels"),
    [
        ("aa_resnet18", 6, 8, [14, 14, 7], [(160, 32), (160, 64), (160, 128)]),
        ("aa_resnet34", 13, 8, [14, 14, 7], [(160, 32), (160, 64), (160, 128)]),
        ("aa_resnet50", 13, 8, [14, 14, 7], [(160, 8), (160, 24), (160, 48)]),
        ("aa_resnet152", 47, 8, [14, 14, 7], [(160, 8), (160, 24), (160, 48)]),
        ("aa_wrn28_10", 12, 8, [32, 16, 8], [(160, 16), (160, 32), (160, 64)]),
        ("aa_wrn28_2", 12, 8, [32, 16, 8], [(160, 8), (160, 8), (160, 16)]),
    ],
)
def test_the_papers_settings(name, count, heads, sizes, channels):
    layers = augmented(on_meta(name))
    assert len(layers) == count
    by_stage = {}
    for path, layer in layers.items():
        assert layer.num_heads == heads
        assert layer.size[0] == layer.size[1]
        by_stage.setdefault(re.search(r"\d", path)[0], set()).add(
            (layer.size[0], layer.key_channels, layer.value_channels)
        )
    expected = [{(size, *pair)} for size, pair in zip(sizes, channels, strict=True)]
    assert [by_stage[stage] for stage in sorted(by_stage)] == expected


def test_aa_mnasnet_attends_where_the_paper_does():
    layers = augmented(on_meta("aa_mnasnet_100"))
    assert [layer.size[0] for layer in layers.values()] == [14, 14, 14, 28, *[14] * 6, 7, 7, 7]
    assert all(path.endswith("conv_pw") and layer.num_heads == 4 for path, layer in layers.items())
    assert (layers["blocks.2.0.conv_pw"].key_channels, layers["blocks.2.0.conv_pw"].value_channels) == (4, 4)
    assert (layers["blocks.6.0.conv_pw"].key_channels, layers["blocks.6.0.conv_pw"].value_channels) == (96, 48)


@narrow_ratios
def test_options_reach_the_layer():
    options = {"key_ratio": 0.5, "value_ratio": 0.5, "position": "sinusoidal", "num_heads": 4, "backend": "eager"}
    for layer in augmented(on_meta("aa_resnet50", **options)).values():
        assert (layer.num_heads, layer.position_name, layer.backend) == (4, "sinusoidal", "eager")
        assert layer.key_channels == max(80, layer.out_channels // 2)
        assert layer.value_channels == layer.out_channels // 2
    assert {layer.key_channels for layer in augmented(on_meta("aa_resnet18", key_channels=64)).values()} == {64}
    assert parameters(on_meta("se_resnet50", reduction=32)) < parameters(on_meta("se_resnet50"))
    assert parameters(on_meta("ge_wrn16_4", learned=True, extent=4)) > parameters(on_meta("ge_wrn16_4"))


@pytest.mark.parametrize("name", [name for name in list_models("aa_*") if "retinanet" not in name])
def test_only_who_asks_for_a_ratio_is_told_that_it_does_not_decide(name):
    """The networks' own settings stop at the minimum, too, without a word: warnings are errors here."""
    on_meta(name)
    with pytest.warns(UserWarning, match="key_ratio=0.01 of .* below the minimum") as told:
        on_meta(name, key_ratio=0.01)
    assert len(told) == 1


def test_where_and_downsample_can_be_overridden():
    layers = augmented(on_meta("aa_resnet18", where="layer[34].*.conv1", downsample=False))
    assert {path.partition(".")[0] for path in layers} == {"layer3", "layer4"}
    assert not any(layer.downsample for layer in layers.values())


def test_windows_are_in_all_stages_and_nothing_is_halved_for_them():
    layers = augmented(on_meta("aa_window_resnet50"))
    assert len(layers) == 16
    assert {path.partition(".")[0] for path in layers} == {"layer1", "layer2", "layer3", "layer4"}
    assert {(layer.window.size, layer.downsample) for layer in layers.values()} == {((13, 13), 0)}
    assert {layer.window.size for layer in augmented(on_meta("aa_window_resnet50", window=7)).values()} == {(7, 7)}
    assert parameters(on_meta("aa_window_resnet50", num_heads=8)) > parameters(on_meta("aa_resnet50"))


@narrow_ratios
def test_the_fully_attentional_network_has_no_convolution_left():
    layers = augmented(on_meta("aa_resnet50", key_ratio=1.0, value_ratio=1.0))
    assert len(layers) == 13
    assert all(layer.conv is None for layer in layers.values())


@pytest.mark.parametrize("img_size", [96, (64, 160)])
def test_tables_follow_img_size_and_the_downsampled_stage_does_not(img_size):
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    for path, layer in augmented(on_meta("aa_resnet50", img_size=img_size)).items():
        stride = {"2": 16, "3": 16, "4": 32}[path[5]]
        assert layer.size == (height // stride, width // stride)
        assert bool(layer.downsample) == path.startswith("layer2")


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("aa_resnet18", "key_ration", "key_ratio"),
        ("aa_wrn16_4", "num_head", "num_heads"),
        ("aa_mnasnet_100", "positon", "position"),
        ("se_resnet18", "reductoin", "reduction"),
        ("plain_wrn16_4", "drop_paths_rate", "drop_path_rate"),
        ("plain_resnet18", "key_ratio", "only the aa_ models"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name, option, told):
    with pytest.raises(TypeError, match=f"{option}.*{told}"):
        on_meta(name, **{option: 1})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("aa_resnet5", "aa_resnet50"),
        ("aa-wrn28-10", "aa_wrn28_10"),
        ("aa_mnasnet", "aa_mnasnet_"),
        ("vgg166", "vgg16"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"{name}.*{near}"):
        create_model(name)


def test_create_model_builds_any_timm_name():
    assert create_model("plain_wrn16_4", num_classes=5).fc.out_features == 5
    with torch.device("meta"):
        assert type(create_model("resnet18")) is timm.models.ResNet


@pytest.mark.parametrize("img_size", [0, (32, -1), (3, 32, 32)])
def test_an_impossible_img_size_is_named(img_size):
    with pytest.raises(ValueError, match="img_size"):
        on_meta("aa_wrn16_4", img_size=img_size)


def test_depth_and_gate_are_checked():
    with pytest.raises(ValueError, match="depth=27; try 22"):
        WideResNet(27, 2)
    with pytest.raises(ValueError, match="gate='see'"):
        on_meta("plain_resnet18", gate="see")


def size_for(name):
    """A small image, wider than high, that the strides of the network divide."""
    return (16, 24) if "wrn" in name else (32, 64)


def without_values(name, **options):
    """The model on the CPU with whatever the memory held: enough for shapes, and quick to make."""
    return on_meta(name, **options).to_empty(device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_timm_user_expects(name):
    """Every name: shapes, heads, features, gradients and what timm knows about it."""
    height, width = size_for(name)
    stride = 4 if "wrn" in name else 32
    x = torch.randn(2, 4, height, width)
    drops = {"drop_rate": 0.1, "drop_path_rate": 0.1}
    model = without_values(name, num_classes=7, in_chans=4, img_size=(height, width), **drops)

    features = model.forward_features(x)
    assert features.shape == (2, model.num_features, height // stride, width // stride)
    out = model.forward_head(features)
    assert out.shape == (2, 7)
    out.sum().backward()
    assert not [path for path, parameter in model.named_parameters() if parameter.grad is None]
    assert any(module.drop_prob > 0 for module in model.modules() if isinstance(module, DropPath))

    config = model.pretrained_cfg
    assert config["architecture"] == name
    assert config["input_size"] == ((3, 32, 32) if "wrn" in name else (3, 224, 224))
    assert config["num_classes"] == (100 if "wrn" in name else 1000)
    assert len(config["mean"]) == len(config["std"]) == 3
    assert model.get_submodule(config["first_conv"]).in_channels == 4
    assert model.get_submodule(config["classifier"]) is model.get_classifier()
    grouped = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(chain.from_iterable(grouped.values())) == sorted(path for path, _ in model.named_parameters())

    features = features.detach()
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    model.reset_classifier(5, "max")
    assert model.get_classifier().out_features == model.num_classes == 5
    assert model.forward_head(features).shape == (2, 5)
    model.reset_classifier(0)
    assert model.forward_head(features).shape == (2, model.num_features)
    model.reset_classifier(0, "")
    assert model.forward_head(features).shape == features.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_features_only(name):
    height, width = size_for(name)
    model = without_values(name, features_only=True, out_indices=(1, 3), img_size=(height, width)).eval()
    with torch.no_grad():
        features = model(torch.randn(1, 3, height, width))
    assert [f.shape[1] for f in features] == model.feature_info.channels()
    assert [height // f.shape[2] for f in features] == model.feature_info.reduction()


@pytest.mark.parametrize("name", SMALLEST)
def test_all_features(name):
    height, width = size_for(name)
    x = torch.randn(1, 3, height, width)
    features = without_values(name, features_only=True).eval()(x)
    assert len(features) == (4 if "wrn" in name else 5)
    deepest, intermediates = without_values(name).eval().forward_intermediates(x, indices=[1, -1])
    assert [f.shape for f in intermediates] == [features[1].shape, features[-1].shape]
    assert deepest.shape[-2:] == features[-1].shape[-2:]


@pytest.mark.parametrize("name", SMALLEST)
def test_other_pooling(name):
    model = on_meta(name, global_pool="max")
    assert type(model.global_pool.pool).__name__ == "AdaptiveMaxPool2d"
    assert model(torch.randn(2, 3, 32, 32, device="meta")).shape == (2, model.num_classes)


@pytest.fixture(scope="module")
def small():
    """One trained-looking model of each kind: no branch is zero, as timm's initialisation would have it."""
    models = {}

    def make(name):
        if name not in models:
            torch.manual_seed(0)
            options = {} if "mnasnet" in name or "wrn" in name else {"zero_init_last": False}
            models[name] = timm.create_model(name, num_classes=5, img_size=32, **options)
        return models[name].eval().float().to(memory_format=torch.contiguous_format)

    return make


@pytest.mark.parametrize("name", SMALLEST)
def test_checkpointing_changes_nothing(small, name):
    model, x = small(name).train(), torch.randn(4, 3, *size_for(name))
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    model.set_grad_checkpointing(False)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SMALLEST)
def test_channels_last_and_bfloat16_agree(small, name):
    model, x = small(name), torch.randn(2, 3, *size_for(name))
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(
            model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last)), expected
        )
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
    assert half.dtype == torch.bfloat16
    assert (half - expected).norm() < 0.1 * expected.norm()


@pytest.mark.slow
# aot_eager also traces the backward, which takes as long as the rest of these tests for the deeper two.
@pytest.mark.parametrize(
    ("name", "backend"), [("aa_resnet18", "eager"), ("aa_wrn16_4", "aot_eager"), ("aa_mnasnet_075", "eager")]
)
def test_compiles_as_one_graph(small, name, backend):
    model, x = small(name), torch.randn(2, 3, 16, 16)
    first = model.get_submodule(model.pretrained_cfg["first_conv"]).weight
    expected = torch.autograd.grad(model(x).square().sum(), first)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    out = compiled(x)
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
    actual = torch.autograd.grad(out.square().sum(), first)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["aa_resnet18", "aa_wrn16_4", "aa_mnasnet_075"])
@pytest.mark.parametrize("size", [(32, 32), (20, 33), (49, 36)])
def test_runs_at_sizes_its_tables_were_not_made_for(small, name, size):
    assert small(name)(torch.randn(1, 3, *size)).isfinite().all()


def test_features_of_the_wide_resnet_are_those_of_its_forward(small):
    model, x = small("aa_wrn16_4"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        deepest, intermediates = model.forward_intermediates(x, norm=True)
        torch.testing.assert_close(deepest, model.forward_features(x))
        torch.testing.assert_close(intermediates[-1], deepest)
        assert [f.shape[1] for f in intermediates] == [16, 64, 128, 256]
        stopped = model.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(stopped[0], intermediates[1])
        at_stage_1, _ = model.forward_intermediates(x, indices=[1], stop_early=True)
        torch.testing.assert_close(at_stage_1, intermediates[1])


def test_entry_points_can_be_inspected():
    entry = timm.model_entrypoint("aa_resnet50")
    assert (entry.__module__, entry.__name__) == ("aaconv.models.aa_resnet", "aa_resnet50")
    assert entry.__doc__ == "ResNet-50, attention augmented."
    assert "aa_resnet50" in sys.modules[entry.__module__].__all__
