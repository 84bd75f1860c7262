"""accelerate against timm's own attention modules: output and all gradients, in float64."""

import pytest
import timm
import torch
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer_sam import Attention, VisionTransformerSAM

from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import assert_accelerates, drawn


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qkv_bias": False}, {"proj_drop": 0.0}], ids=str)
@pytest.mark.parametrize(
    ("tables", "size"),
    [((5, 5), (5, 5)), ((3, 7), (3, 7)), ((4, 4), (7, 3)), ((9, 6), (2, 5)), ((1, 1), (1, 1)), ((2, 3), (1, 6))],
    ids=str,
)
def test_sam_attention(tables, size, options, fused):
    module = drawn(Attention(12, num_heads=3, use_rel_pos=True, input_size=tables, **options))
    module.fused_attn = fused
    assert_accelerates(module, random(2, *size, 12))


class WithOneNorm(Attention):
    """SAM's attention without a norm of the queries: None stands for it."""

    def forward(self, x):
        self.q_norm = torch.nn.Identity()
        out = super().forward(x)
        self.q_norm = None
        return out


def test_queries_without_the_norm_that_keys_have():
    module = WithOneNorm(12, num_heads=3, use_rel_pos=True, input_size=(3, 4), qk_norm=True)
    module.q_norm = None
    assert_accelerates(drawn(module), random(2, 3, 4, 12))


class WithWeights(Attention):
    """As transformers has SAM's: weights come with the output, wanted or not."""

    def forward(self, hidden_states, output_attentions=None):
        batch, height, width, _ = hidden_states.shape
        weights = torch.full((batch * self.num_heads, height * width, height * width), 1 / (height * width))
        return super().forward(hidden_states), weights


def test_a_module_that_returns_its_weights_is_computed_by_ours_unless_somebody_watches():
    module, x = drawn(WithWeights(12, num_heads=3, use_rel_pos=True, input_size=(3, 4))), random(2, 3, 4, 12)
    assert_accelerates(module, x)
    report = accelerate(module)
    assert module(x)[1] is None
    assert torch.compile(module, fullgraph=True, backend="aot_eager")(x)[1] is None
    assert module(x, output_attentions=True)[1] is not None
    handle = module.register_forward_hook(lambda *_: None)
    assert module(x)[1] is not None
    handle.remove()
    assert module(x)[1] is None
    report.undo()


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (6, 4)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_pos_embed": True},
        {"qk_ratio": 0.5, "num_heads": 2, "qkv_bias": True},
        {"dim_head": 5, "dim_out": 12},
        {"stride": 2},
    ],
    ids=str,
)
def test_bottleneck_attention(size, options):
    if options.get("stride") == 2 and min(size) < 2:
        pytest.skip("nothing is left of one pixel")
    module = drawn(BottleneckAttn(16, feat_size=size, **options))
    assert_accelerates(module, random(2, 16, *size))
    assert_accelerates(module, random(2, 16, *size).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("size", [(4, 4), (8, 12)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_pos_embed": True, "halo_size": 1},
        {"stride": 2},
        {"stride": 2, "avg_down": True},
        {"qk_ratio": 0.5, "num_heads": 2, "dim_out": 24, "halo_size": 3},
        {"block_size": 2, "dim_head": 5, "qkv_bias": True},
    ],
    ids=str,
)
def test_halo_attention(size, options):
    module = drawn(HaloAttn(16, **({"num_heads": 4, "block_size": 4, "halo_size": 2} | options)))
    assert_accelerates(module, random(2, 16, *size))


@pytest.mark.parametrize("token", [True, False], ids=["token", "no-token"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_kv": (2, 2)},
        {"kernel_q": (3, 3), "stride_q": (2, 2), "kernel_kv": (3, 3), "stride_kv": (4, 4)},
        {"kernel_kv": (2, 2), "stride_kv": (2, 2), "mode": "avg", "residual_pooling": False},
        {"kernel_q": (3, 3), "stride_q": (2, 2), "mode": "max", "dim_out": 24},
    ],
    ids=str,
)
def test_multi_scale_attention(options, token):
    settings = {"dim_out": 12, "feat_size": (8, 8), "num_heads": 3, "has_cls_token": token} | options
    module = drawn(MultiScaleAttention(12, **settings))
    for size in ((8, 8), (6, 8), (4, 5)):
        assert_accelerates(module, random(2, size[0] * size[1] + token, 12), size)


def small_sam(**options):
    settings = {"img_size": 20, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 4}
    windows = {"use_rel_pos": True, "window_size": 3, "global_attn_indexes": (1,), "neck_chans": 8}
    return VisionTransformerSAM(**settings | windows | options)


@pytest.mark.parametrize("size", [20, 24], ids=str)
def test_a_whole_sam_encoder(size):
    """Windows of 3 x 3 in maps of 5 x 5 and 6 x 6; the tables of the second block are for 5 x 5."""
    model = drawn(small_sam())
    model.patch_embed.strict_img_size = False
    assert_accelerates(model, random(2, 3, size, size), modules=3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules"), [("botnet26t_256", 3), ("mvitv2_tiny", 10)])
def test_a_whole_network_of_timm(name, modules):
    model = timm.create_model(name, img_size=64).to(torch.float64).eval()
    assert_accelerates(model, random(1, 3, 64, 64), modules=modules)


@pytest.mark.parametrize(
    "name", ["samvit_base_patch16_224", "halo2botnet50ts_256", "lamhalobotnet50ts_256", "mvitv2_small_cls"]
)
def test_every_attention_of_timms_networks_is_found(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    report = accelerate(model)
    assert report.replaced
    assert not report.kept
