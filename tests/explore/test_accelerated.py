"""The explorer and networks that aaconv.accelerate knows: whole maps, and windows unfolded into the image."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.models.vision_transformer_sam import Attention, VisionTransformerSAM
from torch import nn

from aaconv.explore import write_page
from aaconv.explore.alignment import cell_shifts
from aaconv.explore.capture import TOLERANCE, attention_layers, capture
from aaconv.explore.study import study
from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import drawn
from support.explored import small_network


def small_sam(window=3):
    settings = {"img_size": 24, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 2}
    windows = {"use_rel_pos": True, "window_size": window, "global_attn_indexes": (1,), "neck_chans": 8}
    return drawn(VisionTransformerSAM(**settings | windows), torch.float32).eval()


def weights_of(module, x):
    """By the definition of SAM's attention: [windows, heads, pixels (i), pixels (j)]."""
    _, height, width, _ = x.shape
    q, k, _ = module.qkv(x).flatten(1, 2).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    rows, columns = (part.ravel() for part in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    tables = (
        module.rel_pos_h[rows[:, None] - rows + height - 1],
        module.rel_pos_w[columns[:, None] - columns + width - 1],
    )
    logits = module.scale * q @ k.transpose(-1, -2) + torch.einsum("bnid,ijd->bnij", q, sum(tables))
    return logits.softmax(-1)


def assert_packed(packed, facts, exact):
    maps = packed.unpack(facts.height, facts.width).maps()
    assert maps.shape == exact.shape
    off = np.abs(maps - exact) / exact.max(-1, keepdims=True)
    assert off.max() <= TOLERANCE
    assert off.max() == pytest.approx(packed.error, rel=1e-3, abs=1e-6)


def test_the_attention_of_a_whole_map():
    module, x = (
        drawn(Attention(12, num_heads=3, use_rel_pos=True, input_size=(4, 5)), torch.float32),
        torch.randn(4, 5, 12),
    )
    accelerate(module)
    _, [facts], packed = capture(nn.Sequential(module), x, {"0": module})
    with torch.no_grad():
        assert_packed(packed["0"], facts, weights_of(module, x[None])[0].numpy())
    assert (facts.heads, facts.height, facts.width, facts.depth) == (3, 4, 5, 4)


def test_windows_lie_side_by_side_in_the_image():
    model, image = small_sam(), torch.randn(3, 24, 24)
    accelerate(model)
    seen = {}
    hook = model.blocks[0].attn.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    layers = attention_layers(model, "small_sam")
    assert list(layers) == ["blocks.0.attn", "blocks.1.attn"]
    _, [windowed, whole], packed = capture(model, image, layers)
    hook.remove()
    assert (windowed.height, windowed.width) == (whole.height, whole.width) == (6, 6)
    with torch.no_grad():
        own = weights_of(model.blocks[0].attn, seen["x"])
    exact = np.zeros((2, 6, 6, 6, 6))
    for number, weights in enumerate(own):
        y, x = (slice(3 * place, 3 * place + 3) for place in divmod(number, 2))
        exact[:, y, x, y, x] = weights.unflatten(1, (3, 3)).unflatten(3, (3, 3)).numpy()
    assert_packed(packed["blocks.0.attn"], windowed, exact.reshape(2, 36, 36))


def test_windows_with_large_logits_stay_apart():
    model = small_sam()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight *= 12
    accelerate(model)
    layers = attention_layers(model, "small_sam", ["blocks.0.*"])
    _, _, packed = capture(model, torch.randn(3, 24, 24), layers)
    maps = packed["blocks.0.attn"].unpack(6, 6).maps().reshape(2, 6, 6, 6, 6)
    assert maps[:, :3, :3, 3:].max() < 1e-6
    assert maps[:, 3:, :3, :, 3:].max() < 1e-6
    assert packed["blocks.0.attn"].error <= TOLERANCE


def test_bottleneck_attention():
    module, x = drawn(BottleneckAttn(8, feat_size=(4, 5), num_heads=2), torch.float32), torch.randn(8, 4, 5)
    accelerate(module)
    _, [facts], packed = capture(nn.Sequential(module), x, {"0": module})
    with torch.no_grad():
        assert_packed(packed["0"], facts, module.forward.attention_maps(x[None])[0].numpy())
    assert (facts.height, facts.width) == (4, 5)


def test_windows_that_reach_beyond_the_map_are_refused():
    model = small_sam(window=4)
    accelerate(model)
    with pytest.raises(
        ValueError,
        match=r"blocks.0.attn has 6 x 6 cells, and its windows of 4 x 4 reach beyond it; .* a multiple of 4 cells",
    ):
        capture(model, torch.randn(3, 24, 24), attention_layers(model, "small_sam"))


def test_patches_divide_the_image_evenly():
    model = small_sam()
    accelerate(model)
    assert cell_shifts(model, torch.randn(1, 3, 24, 24), ["blocks.0.attn"]) == {"blocks.0.attn": (0.0, 0.0)}


def test_convolutions_shift_the_cells_of_a_bottleneck():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), BottleneckAttn(8, feat_size=(4, 4), num_heads=2))
    accelerate(model)
    assert cell_shifts(model, torch.randn(1, 3, 8, 8), ["1"]) == {"1": (-0.5, -0.5)}


def test_a_page_of_an_accelerated_network(tmp_path):
    loaded = replace(small_network(), model=small_sam(), size=24, source="small_sam")
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"has no AAConv2d layers, .* a model whose attention aaconv.accelerate knows"):
        write_page(loaded, [image], tmp_path / "page.html")
    accelerate(loaded.model)
    written = write_page(loaded, [image], tmp_path / "page.html")
    assert (written.layers, written.error <= TOLERANCE) == (2, True)


def test_queries_and_keys_that_do_not_lie_on_one_map_are_named():
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"queries and keys of halonet26t .* do not lie on one map"):
        study("halonet26t", [image], size=64)


def test_a_size_that_patches_do_not_divide_is_named():
    loaded = replace(small_network(), model=small_sam(), size=24, source="small_sam")
    accelerate(loaded.model)
    image = np.zeros((24, 24, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"small_sam does not run on images of 26 x 26 pixels: Input height \(26\)"):
        study(loaded, [image], size=26)


def test_a_network_of_timm_by_its_name():
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    looked_at = study("botnet26t_256", [image], layers=["stages.3.*"])
    assert [(layer.name, layer.height, layer.width) for layer in looked_at.layers] == [
        ("stages.3.0.self_attn", 16, 16),
        ("stages.3.1.self_attn", 8, 8),
    ]
