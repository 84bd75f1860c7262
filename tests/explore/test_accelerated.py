"""The explorer and networks that aaconv.accelerate knows: whole maps, and windows unfolded into the image."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer_sam import Attention, VisionTransformerSAM
from torch import nn

from aaconv.explore import write_page
from aaconv.explore.alignment import cell_shifts
from aaconv.explore.capture import MOST_WEIGHTS, attention_layers, capture
from aaconv.explore.factors import TOLERANCE
from aaconv.explore.grid import Grid
from aaconv.explore.study import study
from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import drawn
from support.explored import maps_of, small_network


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
    maps = maps_of(packed, facts)
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


class Switched(Attention):
    """As transformers calls SAM's: by keywords, with a switch beside the input."""

    def forward(self, hidden_states, output_attentions=None):
        return super().forward(hidden_states)


class ByKeywords(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(hidden_states=x, output_attentions=False)


def test_switches_beside_the_input_are_passed_over():
    module = drawn(Switched(12, num_heads=3, use_rel_pos=True, input_size=(4, 5)), torch.float32)
    accelerate(module)
    x = torch.randn(4, 5, 12)
    _, [facts], packed = capture(ByKeywords(module), x, {"attention": module})
    with torch.no_grad():
        assert_packed(packed["attention"], facts, weights_of(module, x[None])[0].numpy())


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


def test_bottleneck_attention():
    module, x = drawn(BottleneckAttn(8, feat_size=(4, 5), num_heads=2), torch.float32), torch.randn(8, 4, 5)
    accelerate(module)
    _, [facts], packed = capture(nn.Sequential(module), x, {"0": module})
    with torch.no_grad():
        assert_packed(packed["0"], facts, module.forward.attention_maps(x[None])[0].numpy())
    assert (facts.height, facts.width) == (4, 5)


def test_windows_that_reach_beyond_the_map_are_cut_off():
    """6 x 6 cells in windows of 4 x 4: what the padding gets is missing to 1."""
    model, seen = small_sam(window=4), {}
    accelerate(model)
    model.blocks[0].attn.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
    layers = attention_layers(model, "small_sam")
    _, [windowed, _], packed = capture(model, torch.randn(3, 24, 24), layers)
    assert (windowed.height, windowed.width) == windowed.grid.key_map == (6, 6)
    with torch.no_grad():
        own = weights_of(model.blocks[0].attn, seen["x"])
    exact = np.zeros((2, 8, 8, 8, 8))
    for number, weights in enumerate(own):
        y, x = (slice(4 * place, 4 * place + 4) for place in divmod(number, 2))
        exact[:, y, x, y, x] = weights.unflatten(1, (4, 4)).unflatten(3, (4, 4)).numpy()
    shown = exact[:, :6, :6, :6, :6].reshape(2, 36, 36)
    maps = maps_of(packed["blocks.0.attn"], windowed)
    off = np.abs(maps - shown) / exact.max((-2, -1))[:, :6, :6].reshape(2, 36, 1)
    assert off.max() <= TOLERANCE
    assert maps[:, 0].sum(-1) == pytest.approx(1)
    assert maps[:, 5].sum(-1).max() < 0.99
    row, column = packed["blocks.0.attn"].focus
    assert max(row, column) < 6


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


@pytest.mark.parametrize("stride", [1, 2])
def test_keys_around_a_block(stride):
    """timm's HaloNet: blocks of 4 x 4 pixels, keys 2 further in each direction; strided, a query for every other."""
    module = drawn(
        HaloAttn(8, 16, stride=stride, num_heads=2, block_size=4, halo_size=2, avg_down=False), torch.float32
    )
    x = torch.randn(1, 8, 8, 12)
    accelerate(module)
    _, [facts], packed = capture(nn.Sequential(module), x[0], {"0": module})
    queries = (8 // stride, 12 // stride)
    assert (facts.height, facts.width, facts.grid.key_map) == (*queries, (8, 12))
    maps = maps_of(packed["0"], facts).reshape(2, *queries, 8, 12)
    with torch.no_grad():
        q = module.q(x)[0].unflatten(0, (2, -1))
        k = F.pad(module.kv(x)[0].unflatten(0, (2, -1))[:, : module.dim_head_qk], [2, 2, 2, 2])
        for row, column in np.ndindex(*queries):
            top, left = (4 * (place * stride // 4) for place in (row, column))
            inside = row - top // stride, column - left // stride
            query, keys = q[:, :, row, column], k[:, :, top : top + 8, left : left + 8]
            tables = (getattr(module.pos_embed, f"{name}_rel") for name in ("height", "width"))
            by_row, by_column = (
                table[torch.arange(8) - place + 7] for table, place in zip(tables, inside, strict=True)
            )
            bias = (query @ by_row.T)[:, :, None] + (query @ by_column.T)[:, None, :]
            bias = bias * module.scale if module.scale_pos_embed else bias
            logits = torch.einsum("nd,ndyx->nyx", query, keys) * module.scale + bias
            exact = np.zeros((2, 12, 16))
            exact[:, top : top + 8, left : left + 8] = logits.flatten(1).softmax(-1).reshape(2, 8, 8)
            off = np.abs(maps[:, row, column] - exact[:, 2:-2, 2:-2]) / exact.max((-2, -1))[:, None, None]
            assert off.max() <= TOLERANCE


@pytest.mark.parametrize("token", [False, True])
def test_keys_on_a_coarser_map(token):
    """timm's MViTv2, keys pooled to half the queries' side; the class token's share is missing to 1."""
    pooling = {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_q": (1, 1), "stride_kv": (2, 2)}
    options = {"num_heads": 2, "has_cls_token": token, "rel_pos_type": "spatial", **pooling}
    module = drawn(MultiScaleAttention(8, 8, (6, 6), **options), torch.float32)
    x = torch.randn(1, 24 + token, 8)
    accelerate(module)
    model = OnMap(module)
    _, [facts], packed = capture(model, x[0], {"attention": module})
    assert (facts.height, facts.width, facts.grid.key_map) == (4, 6, (2, 3))
    with torch.no_grad():
        (q, k, v, rows, columns), _, _ = module.forward.attention_inputs(x, [4, 6])
        logits = module.scale * q @ k.transpose(-1, -2)
        logits[..., token:] += (rows[..., None] + columns[..., None, :]).flatten(-2)
        exact = logits.softmax(-1)[0, :, token:].numpy()
        own = module.proj((logits.softmax(-1) @ v + q * module.residual_pooling).transpose(1, 2).flatten(2))
        torch.testing.assert_close(own, module(x, [4, 6])[0])
    off = np.abs(maps_of(packed["attention"], facts) - exact[..., token:]) / exact.max(-1, keepdims=True)
    assert off.max() <= TOLERANCE


class OnMap(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, [4, 6])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("mvitv2_tiny", 64), ("halonet26t", 256)])
def test_networks_whose_keys_lie_elsewhere_have_pages(name, size, tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    layers = ["stages.3.*"]
    assert write_page(name, [image], tmp_path / "page.html", size=size, layers=layers).error <= TOLERANCE


def test_a_map_that_blocks_do_not_divide_is_named():
    module = drawn(HaloAttn(8, 16, num_heads=2, block_size=4, halo_size=2), torch.float32)
    accelerate(module)
    with pytest.raises(
        ValueError, match=r"map of 0 is 6 x 8, and its blocks of 4 x 4 do not divide it; choose another"
    ):
        capture(nn.Sequential(module), torch.randn(8, 6, 8), {"0": module})


def test_sams_own_size_fits_and_more_does_not():
    assert Grid.whole(64, 64).weights <= MOST_WEIGHTS < Grid.whole(65, 64).weights
    assert Grid((5, 5), (14, 14), (14, 14), (64, 64), (64, 64), step=(14, 14)).weights <= MOST_WEIGHTS


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
