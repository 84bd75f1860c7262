import pytest
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import nn

from aaconv import AAConv1d, AAConv2d, attend_2d, attention_channels
from aaconv.layers import AAConvNd
from aaconv.layers.channels import resolve_channels
from support.reference import direct_attention
from support.small_layers import SMALL, VARIANTS, small


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request):
    return request.param


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_layer_is_convolution_beside_attention(variant, backend):
    """Every option, assembled by hand from torch functions and the loops of the reference, in float64."""
    layer = small(**variant, backend=backend, size=(4, 4)).double()
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64, requires_grad=True)

    seen = x
    if variant.get("stride"):
        seen = F.avg_pool2d(seen, 3, 2, 1, count_include_pad=False)
    out_size = seen.shape[-2:]
    for _ in range(variant.get("downsample", 0)):
        seen = F.avg_pool2d(seen, 3, 2, 1, count_include_pad=False)
    qkv = F.conv2d(layer.position.encode(seen), layer.qkv.weight, layer.qkv.bias).permute(0, 2, 3, 1)
    tables = layer.attention_inputs(x)[1:]
    attended = direct_attention(qkv, *tables, layer.num_heads, layer.key_channels).permute(0, 3, 1, 2)
    attended = F.conv2d(attended, layer.project.weight, layer.project.bias)
    if variant.get("downsample"):
        attended = F.interpolate(attended, size=out_size, mode="bilinear")
    expected = attended if layer.conv is None else torch.cat([layer.conv(x), attended], 1)

    out = layer(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *layer.parameters()]
    cotangent = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 5, "stride": 3},
        {"kernel_size": 3, "padding": 0},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 4},
        {"kernel_size": 4, "padding": 1},
        {"kernel_size": 4, "stride": 4, "padding": 0},
        {"kernel_size": 2, "stride": 2, "padding": 0},
        {"kernel_size": 6, "stride": 4, "padding": 1},
        {"kernel_size": 2, "stride": 3, "padding": 0},
        {"kernel_size": 2, "stride": 4, "padding": 1},
        {"kernel_size": (1, 7), "stride": (1, 2), "padding": (0, 3)},
        {"kernel_size": 3, "stride": (2, 1), "padding": 1},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "padding": "valid"},
        {"kernel_size": 3, "groups": 2},
        {"kernel_size": 3, "bias": False, "padding_mode": "reflect"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 7), (7, 12)])
def test_the_output_has_the_shape_of_the_convolution(conv, height, width):
    x = torch.randn(2, 6, height, width)
    layer = small(**conv)
    plain = nn.Conv2d(6, 16, **{"padding": conv["kernel_size"] // 2} if "padding" not in conv else {}, **conv)
    out = layer(x)
    assert out.shape == plain(x).shape
    assert tuple(out.shape[-2:]) == layer.output_size(height, width)
    assert layer.attention_size(height, width) == layer.size


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 6), (2, 1), (3, 5)])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_tiny_maps_and_empty_batches(variant, batch, height, width):
    layer = small(**variant)
    out = layer(torch.randn(batch, 6, height, width))
    stride = variant.get("stride", 1)
    assert out.shape == (batch, 16, -(-height // stride), -(-width // stride))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_repr_says_what_the_tables_are_made_for():
    assert "size=lazy," in repr(small())
    assert "size=(5, 4)," in repr(small(size=(5, 4)))
    assert "size=None," in repr(small(position="none"))


def test_names_of_parameters_are_part_of_the_interface():
    names = {name for name, _ in small(size=5, attention_bias=True).named_parameters()}
    assert names == {
        "rel_h",
        "rel_w",
        *(f"{part}.{kind}" for part in ("conv", "qkv", "project") for kind in ("weight", "bias")),
    }
    assert small(value_ratio=1.0).conv is None


def test_parameters_are_those_of_the_paper():
    """F_in (2 dk + dv) + dv dv + (2(H + W) - 2) dk / N_h, and what is left of the convolution."""
    layer = AAConv2d(128, 128, 3, bias=False, size=(14, 14))
    assert (layer.key_channels, layer.value_channels) == (160, 8)
    attention = sum(p.numel() for n, p in layer.named_parameters() if not n.startswith("conv"))
    assert attention == 43_128


@pytest.mark.parametrize(
    ("out_channels", "options", "expected"),
    [
        (128, {}, (160, 8)),
        (256, {}, (160, 24)),
        (512, {}, (160, 48)),
        (64, {"key_ratio": 0.25, "value_ratio": 0.25}, (160, 16)),
        (640, {}, (160, 64)),
        (100, {"key_ratio": 0.29, "value_ratio": 0.29, "num_heads": 1, "min_key_channels_per_head": 0}, (29, 29)),
        (32, {"min_value_channels_per_head": 1}, (160, 8)),
    ],
)
def test_rounding(out_channels, options, expected):
    assert attention_channels(out_channels, **{"num_heads": 8, **options}) == expected
    resolved = resolve_channels(out_channels, **{"num_heads": 8, **options})
    assert (resolved.key_channels, resolved.value_channels) == expected


def test_ratios_are_checked_by_the_function_as_well():
    with pytest.raises(ValueError, match=r"key_ratio must not be negative, got key_ratio=-0\.1"):
        attention_channels(64, 8, key_ratio=-0.1)


def test_two_groups_that_do_not_divide_are_named():
    resolved = resolve_channels(18, 1, value_ratio=1 / 6, groups=2)
    assert resolved.value_channels == 4
    assert "is 3 in 1 heads, which groups=2 do not divide: value_channels=4" in resolved.overrides[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got num_heads=0"),
        ({"key_channels": 100}, "divisible by num_heads, got key_channels=100, num_heads=8; try 104"),
        ({"value_channels": 12}, "divisible by num_heads, got value_channels=12, num_heads=8; try 16"),
        ({"value_channels": 72}, "value_channels=72 is more than out_channels=64"),
        ({"value_ratio": 1.2}, "value_channels=72 is more than out_channels=64"),
        (
            {"value_ratio": 0.1, "min_value_channels_per_head": 0},
            "would be empty: value_channels=0 .*try value_channels=8, fewer heads",
        ),
        ({"value_channels": 72, "num_heads": 72}, "is more than out_channels=64.*at most num_heads=64"),
        ({"value_channels": 0}, "would be empty"),
        ({"value_channels": 16, "value_ratio": 0.5}, "value_channels=16 contradicts value_ratio=0.5, which gives 32"),
        ({"key_channels": 8, "key_ratio": 0.5}, "key_channels=8 contradicts key_ratio=0.5, which gives 160"),
        ({"key_ratio": -0.1}, "key_ratio must not be negative"),
        ({"value_channels": 16, "groups": 32}, "divisible by groups=32; try value_channels=32"),
        (
            {"groups": 64, "value_ratio": None},
            "divisible by groups=64; no number does.*a convolution with fewer groups",
        ),
        ({"key_ratio": float("inf")}, "key_ratio must be finite, got key_ratio=inf"),
        ({"value_ratio": float("nan")}, "value_ratio must not be negative, got value_ratio=nan"),
        ({"groups": 0}, "groups must divide out_channels, got groups=0, out_channels=64"),
        ({"groups": 16, "value_channels": 8}, "the 56 channels left .* divisible by groups=16; try value_channels=16"),
        ({"position": "absolute"}, "position must be one of"),
        ({"downsample": -1}, "downsample must be"),
        ({"init": "zeros"}, "init must be"),
        ({"backend": "flash"}, "backend must be one of"),
        ({"size": (0, 4)}, r"size must be an int or 2 of them, at least 1, got size=\(0, 4\)"),
        ({"size": (1, 2, 3)}, r"size must be an int or 2 of them, at least 1, got size=\(1, 2, 3\)"),
        ({"stride": 0, "value_ratio": 1.0}, "stride must be .* at least 1, got stride=0"),
        ({"kernel_size": 3.0}, "kernel_size must be an int or 2 of them, at least 1, got kernel_size=3.0"),
        ({"padding": "full", "value_ratio": 1.0}, "padding must be .*'same' or 'valid', got padding='full'"),
    ],
)
def test_bad_options_are_named_with_a_way_out(options, message):
    with pytest.raises(ValueError, match=message):
        AAConv2d(64, 64, **{"kernel_size": 3, "value_ratio": None if "value_channels" in options else 0.25, **options})


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"expected input \[batch, 6, height, width\], got shape \[1, 5, 4, 4\]"):
        small(size=4)(torch.zeros(1, 5, 4, 4))
    with pytest.raises(ValueError, match=r"expected input \[batch, 6, length\]"):
        AAConv1d(6, 16, 3, **SMALL, size=4)(torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"an input of shape \[1, 6, 3, 9\] is too small for kernel_size=\(5, 5\)"):
        small(size=4, kernel_size=5, padding=0)(torch.zeros(1, 6, 3, 9))
    with pytest.raises(ValueError, match=r"expected input \[batch, 6, height, width\], got shape \[6, 4, 4\]"):
        small(size=4).attention_maps(torch.zeros(6, 4, 4))


def test_consistent_ratio_and_channels_may_both_be_given():
    assert (
        AAConv2d(64, 64, 3, value_channels=16, value_ratio=0.25, key_channels=160, key_ratio=0.2).value_channels == 16
    )


def test_attention_maps_are_those_of_the_forward():
    layer = AAConv2d(6, 16, 3, **SMALL, size=4)
    x = torch.randn(2, 6, 4, 4)
    qkv = layer.qkv(x)
    values = qkv[:, 2 * layer.key_channels :].unflatten(1, (4, -1)).flatten(3)
    attended = torch.einsum("bnij,bndj->bndi", layer.attention_maps(x), values)
    torch.testing.assert_close(layer.project(attended.flatten(1, 2).unflatten(-1, (4, 4))), layer(x)[:, 12:])


@pytest.mark.parametrize("drawn_again", [False, True])
def test_logits_that_begin_with_a_deviation_of_one(drawn_again):
    torch.manual_seed(0)
    layer = AAConv2d(64, 64, 1, size=12, value_ratio=0.25, init="unit")
    if drawn_again:
        layer.reset_parameters()
    qkv = layer.qkv(torch.randn(8, 64, 12, 12).relu()).detach().permute(0, 2, 3, 1)
    q, k = (part.unflatten(-1, (8, 20)) for part in qkv[..., :320].split(160, -1))
    content = torch.einsum("byxhd,bvuhd->bhyxvu", q, k) / 20**0.5
    rows = torch.einsum("byxhd,rd->bhyxr", q, layer.rel_h) / 20**0.5
    columns = torch.einsum("byxhd,rd->bhyxr", q, layer.rel_w) / 20**0.5
    for part in (content, rows, columns):
        assert part.std().item() == pytest.approx(1, rel=0.35)
    assert layer.qkv.weight[320:].std().item() == pytest.approx((1 / 3 / 64) ** 0.5, rel=0.2)  # values as usual


@pytest.mark.parametrize("position", ["relative", "none", "sinusoidal", "coordconv"])
def test_the_sequence_form_is_the_map_form_of_one_row(position):
    sequence = AAConv1d(6, 16, 5, stride=2, **SMALL, size=7, position=position)
    flat = AAConv2d(6, 16, (1, 5), (1, 2), **SMALL, size=(1, 7), position=position)
    state = sequence.state_dict()
    state["conv.weight"] = state["conv.weight"].unsqueeze(2)
    flat.load_state_dict(state, strict=position != "relative")
    x = torch.randn(2, 6, 13)
    torch.testing.assert_close(sequence(x), flat(x.unsqueeze(2)).squeeze(2))
    assert sequence.attention_maps(x).shape == (2, 4, 7, 7)


def test_qkv_is_read_in_the_order_the_operator_documents():
    layer = small(size=3)
    x = torch.randn(1, 6, 3, 3)
    qkv = layer.qkv(x).permute(0, 2, 3, 1)
    attended = attend_2d(qkv, layer.rel_h, layer.rel_w, num_heads=4, key_channels=layer.key_channels)
    torch.testing.assert_close(layer(x)[:, 12:], layer.project(attended.permute(0, 3, 1, 2)))


def test_attention_inputs_are_what_the_operator_takes(variant):
    layer, x = small(**variant), torch.randn(2, 6, 9, 5)
    qkv, rel_h, rel_w = layer.attention_inputs(x)
    height, width = layer.attention_size(9, 5)
    assert qkv.shape == (2, height, width, 2 * layer.key_channels + layer.value_channels)
    if layer.position_name == "relative":
        heads = () if layer.share_heads else (4,)
        assert rel_h.shape == (*heads, 2 * height - 1, layer.key_channels // 4)
        assert rel_w.shape == (*heads, 2 * width - 1, layer.key_channels // 4)
    else:
        assert rel_h is rel_w is None
    attended = attend_2d(qkv, rel_h, rel_w, num_heads=4, key_channels=layer.key_channels)
    attended = layer.project(attended.permute(0, 3, 1, 2))
    if layer.downsample:
        attended = F.interpolate(attended, layer.output_size(9, 5), mode="bilinear")
    torch.testing.assert_close(layer(x)[:, -layer.value_channels :], attended)


def test_a_sequence_is_no_map():
    """Side by side: neither is the other, and both are the base."""
    sequence = AAConv1d(6, 16, 3, **SMALL, size=7)
    assert isinstance(sequence, AAConvNd)
    assert not isinstance(sequence, AAConv2d)
    qkv, rel_h, rel_w = sequence.attention_inputs(torch.randn(2, 6, 7))
    assert (qkv.shape[1:3], rel_h.shape[0], rel_w.shape[0]) == ((1, 7), 1, 13)


def test_the_default_padding_keeps_the_size_of_a_dilated_convolution():
    layer = small(dilation=3, size=9)
    assert layer.padding == (3, 3)
    assert layer(torch.randn(1, 6, 9, 8)).shape == (1, 16, 9, 8)


def test_a_convolution_that_pads_to_same_stays_so():
    conv = nn.Conv2d(6, 16, 5, padding="same")
    layer = AAConv2d.from_conv(conv, **SMALL, size=9)
    x = torch.randn(1, 6, 9, 8)
    out = layer(x)
    assert out.shape == (1, 16, 9, 8)
    torch.testing.assert_close(out[:, :12], conv(x)[:, :12])


def test_a_convolution_that_pads_in_its_forward_keeps_its_size():
    conv = Conv2dSame(6, 16, 3, stride=2)
    layer = AAConv2d.from_conv(conv, pads_itself=True, **SMALL, size=5)
    x = torch.randn(1, 6, 9, 8)
    out = layer(x)
    assert tuple(out.shape[2:]) == layer.output_size(9, 8) == (5, 4)
    torch.testing.assert_close(out[:, :12], conv(x)[:, :12])


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 31, 64, 79, 80, 128, 800])
def test_the_defaults_do_for_every_width(channels):
    """No error and no warning: a channel or more for each head, and at least half of them convolutional."""
    layer = AAConv2d(6, channels, 3, size=4)
    assert layer.value_channels % layer.num_heads == layer.key_channels % layer.num_heads == 0
    assert 1 <= layer.num_heads <= 8
    assert layer.num_heads == 8 or channels < 16
    assert layer.value_channels <= max(1, channels // 2)
    assert layer(torch.randn(1, 6, 4, 4)).shape == (1, channels, 4, 4)
    shown = f"num_heads={layer.num_heads}, key_channels={layer.key_channels}, value_channels={layer.value_channels}"
    assert shown in repr(layer)


@pytest.mark.parametrize(
    ("channels", "options", "told"),
    [
        (
            256,
            {"key_ratio": 0.1},
            "key_ratio=0.1 of 256 channels is 24 in 8 heads, below the minimum of 20 per head: key_channels=160; "
            "pass min_key_channels_per_head=3 or key_channels",
        ),
        (
            64,
            {"value_ratio": 0.1},
            "value_ratio=0.1 of 64 channels is 0 in 8 heads, below the minimum of 1 per head: value_channels=8; "
            "pass num_heads=6 or value_channels",
        ),
        (
            64,
            {"value_ratio": 0.25, "groups": 32},
            "value_ratio=0.25 of 64 channels is 16 in 8 heads, which groups=32 do not divide: value_channels=32; "
            "pass value_channels instead",
        ),
    ],
)
def test_a_ratio_that_does_not_decide_is_told(channels, options, told):
    with pytest.warns(UserWarning, match="ratio") as warned:
        AAConv2d(channels, channels, 3, **options)
    assert [str(warning.message) for warning in warned] == [told]
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_ratio": 0.7},
        {"key_ratio": 0.1, "min_key_channels_per_head": 3},
        {"key_channels": 8},
        {"value_ratio": 0.25, "groups": 2},
    ],
    ids=str,
)
def test_a_ratio_that_decides_is_not_told(options):
    AAConv2d(256, 256, 3, **options)  # warnings are errors


def test_the_arguments_of_the_convolution_are_attributes_as_torchs_are():
    layer = AAConv2d(4, 16, 3, 2, 1, 1, 1, False, "reflect")
    plain = nn.Conv2d(4, 16, 3, 2, 1, 1, 1, False, "reflect")
    names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
    assert {name: getattr(layer, name) for name in names.split()} == {
        name: getattr(plain, name) for name in names.split()
    }
