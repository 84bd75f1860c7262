"""Layers that attend over windows: tables without a size, checkpoints, augment, cost and export."""

import logging
import re

import pytest
import timm
import torch
from torch import nn

from aaconv import AAConv1d, AAConv2d, augment
from aaconv.cost import count
from aaconv.layers import tables
from aaconv.layers.tables import fit_window_table

SMALL = {"num_heads": 2, "key_channels": 8, "value_channels": 4}


def layer(**options):
    return AAConv2d(3, 8, 3, **SMALL, **options)


def test_tables_are_made_for_the_window_whatever_the_map():
    made = layer(window=(5, 4))
    assert (made.rel_h.shape, made.rel_w.shape) == ((9, 4), (7, 4))
    for size in [(1, 1), (3, 20), (16, 9)]:
        assert made(torch.randn(2, 3, *size)).shape == (2, 8, *size)
    assert "window=(5, 4)" in repr(made)
    assert "window_stride=(2, 2), window_dilation=(3, 3)" in repr(layer(window=5, window_stride=2, window_dilation=3))


@pytest.mark.parametrize("position", ["none", "sinusoidal", "coordconv"])
def test_positions_without_tables(position):
    made = layer(window=3, position=position)
    assert made.rel_w is None
    assert made(torch.randn(1, 3, 7, 6)).isfinite().all()


@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_window_as_large_as_the_map_is_the_layer_without_one(dimensions):
    of, size = {1: (AAConv1d, 9), 2: (AAConv2d, (9, 7))}[dimensions]
    whole = of(3, 8, 3, **SMALL, size=size)
    local = of(3, 8, 3, **SMALL, window=size)
    local.load_state_dict(whole.state_dict())
    x = torch.randn(2, 3, *((9,) if dimensions == 1 else (9, 7)))
    assert torch.equal(local(x), whole(x))


def test_a_sequence_sees_its_neighbours_only():
    made = AAConv1d(3, 8, 1, **SMALL, window=3)
    x = torch.randn(1, 3, 12)
    changed = x.clone()
    changed[..., 8] += 1
    moved = (made(changed) - made(x)).abs().amax((0, 1)) > 0
    assert moved.nonzero().flatten().tolist() == [7, 8, 9]


def test_checkpoints_go_to_a_window_and_back():
    whole, local, again = layer(size=9), layer(window=5), layer(size=9)
    local.load_state_dict(whole.state_dict())
    assert torch.equal(local.rel_h, whole.rel_h[4:13])
    again.load_state_dict(local.state_dict())
    assert torch.equal(again.rel_h[4:13], whole.rel_h[4:13])
    assert torch.equal(again.rel_h[0], whole.rel_h[4])
    larger = layer(window=7)
    larger.load_state_dict(local.state_dict())
    assert torch.equal(larger.rel_w[2:11], local.rel_w)
    assert not any("window" in key for key in whole.state_dict())


@pytest.mark.parametrize("options", [{"window": 5}, {"window": (3, 5), "window_dilation": (3, 2), "window_stride": 2}])
def test_a_window_with_the_tables_of_a_map_weighs_as_the_map_does(options):
    whole, local = layer(size=13).double(), layer(**options).double()
    local.load_state_dict(whole.state_dict())
    x = torch.randn(1, 3, 13, 13, dtype=torch.float64)
    maps, wanted = local.attention_maps(x), whole.attention_maps(x)
    wanted = wanted * (maps > 0)
    torch.testing.assert_close(maps, wanted / wanted.sum(-1, keepdim=True))


def test_a_dilation_goes_with_its_checkpoint():
    wide, close, whole = layer(window=3, window_dilation=(1, 2)), layer(window=5), layer(size=13)
    close.load_state_dict(wide.state_dict())
    assert torch.equal(close.rel_w[::2], wide.rel_w)
    assert torch.equal(close.rel_h[2:-2], wide.rel_h)
    whole.load_state_dict(close.state_dict())
    wide.load_state_dict(whole.state_dict())
    assert torch.equal(wide.rel_w, close.rel_w[::2])


MARKS = {"older": torch.tensor(True), "damaged": torch.zeros(2, dtype=torch.long), "meta": torch.ones(2, device="meta")}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_a_mark_that_does_not_say_is_of_the_same_dilation(mark):
    wide, again = layer(window=3, window_dilation=(1, 2)), layer(window=3, window_dilation=(1, 2))
    again.load_state_dict(wide.state_dict() | {tables.WINDOW_MARK: mark})
    assert torch.equal(again.rel_w, wide.rel_w)
    assert again.state_dict()[tables.WINDOW_MARK].tolist() == [1, 2]


@pytest.mark.parametrize("options", [{"window": 5}, {"size": 9}], ids=str)
def test_a_network_without_memory_takes_a_checkpoint_over(options):
    with torch.device("meta"):
        local = layer(window=5)
    local.load_state_dict(layer(**options).state_dict(), assign=True)
    assert {tensor.device.type for tensor in local.state_dict().values()} == {"cpu"}


def test_a_whole_map_of_no_size_yet_cannot_take_a_windows_tables():
    """It would take them for those of a small map, and stretch them."""
    network, state = nn.Sequential(layer()), nn.Sequential(layer(window=5)).state_dict()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"0.rel_w is of a window, this layer attends to maps of no size yet; pass size="
        ):
            network.load_state_dict(state)


def test_what_a_window_has_kept_is_fitted_is_said(caplog, monkeypatch):
    monkeypatch.setattr(tables, "_told_resizes", set())
    with caplog.at_level(logging.WARNING, logger="aaconv"):
        layer(window=5).load_state_dict(layer(size=9).state_dict())
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "relative tables for maps of 9 pixels fitted to windows of 5 pixels (first: rel_h)"


def test_averages_of_weights_take_in_all_buffers():
    network = nn.Sequential(layer(window=5), nn.BatchNorm2d(8))
    average = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)
    for _ in range(3):
        average.update_parameters(network)
    assert torch.equal(average.module[0].rel_h, network[0].rel_h)


def test_a_longer_table_repeats_the_farthest_vectors():
    table = torch.arange(5.0)[:, None]
    assert fit_window_table(table, 5).flatten().tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert fit_window_table(table, 2).flatten().tolist() == [1, 2, 3]
    assert fit_window_table(table, 3, 2).flatten().tolist() == [0, 0, 2, 4, 4]
    assert fit_window_table(table, 3, 0.5).flatten().tolist() == [1, 1.5, 2, 2.5, 3]


def test_gradients_reach_everything():
    made = layer(window=5, share_heads=False, qk_norm=True)
    made(torch.randn(2, 3, 11, 8)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in made.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_transforms_go_through_windows(backend):
    """A gradient for each image, and a derivative along a direction."""
    made = layer(window=(3, 4), window_dilation=(2, 1), backend=backend).double()
    x, along = torch.randn(2, 2, 3, 7, 5, dtype=torch.float64)

    def loss(one):
        return made(one[None]).sin().sum()

    by_image = torch.func.vmap(torch.func.grad(loss))(x)
    leaf = x.clone().requires_grad_()
    made(leaf).sin().sum().backward()
    torch.testing.assert_close(by_image, leaf.grad)
    _, change = torch.func.jvp(made, (x,), (along,))
    torch.testing.assert_close(change, (made(x + 1e-6 * along) - made(x - 1e-6 * along)) / 2e-6, rtol=1e-5, atol=1e-7)


def test_augment_takes_a_window_or_a_rule():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1))
    rule = {"0": 7}
    local, report = augment(model, 32, where="*", window=lambda name, conv, size: rule.get(name))
    assert [" in 7 x 7 " in line for line in str(report).splitlines()] == [False, True, False, False]
    assert local[0].window.size == (7, 7)
    assert local[1].window is None
    assert local.augmentations[0]["window"] == {"0": (7, 7)}
    assert local[1].size == (16, 16)
    for size in (20, 64):
        assert local(torch.randn(1, 3, size, size)).shape[-1] == size // 2


def two_convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1))


@pytest.mark.parametrize("window", [{"0": 7}, lambda name, conv, size: 7 if size == (32, 32) else None])
def test_strides_and_dilations_are_for_the_layers_that_have_a_window(window):
    local, _ = augment(two_convolutions(), 32, where="*", window=window, window_stride=2, window_dilation=3)
    assert str(local[0].window) == "window=(7, 7), window_stride=(2, 2), window_dilation=(3, 3)"
    assert local[1].window is None
    again, _ = augment(two_convolutions(), **{**local.augmentations[0], "example": 32})
    assert [layer.window for layer in again] == [layer.window for layer in local]
    with pytest.raises(ValueError, match="window_stride=2 has no meaning without a window"):
        augment(two_convolutions(), 32, where="*", window_stride=2)


@pytest.mark.parametrize("option", ["window", "downsample"])
def test_a_layer_that_is_not_augmented_is_named(option):
    with pytest.raises(ValueError, match=f"^{option} names '2', which is not augmented; such are 0, 1"):
        augment(two_convolutions(), 32, where="*", **{option: {"0": 1, "2": 1}})


def test_a_network_with_windows_in_all_stages():
    model = timm.create_model("aa_resnet18", window=7, where="layer*.*.conv1", downsample=False, img_size=64)
    layers = [module for module in model.modules() if isinstance(module, AAConv2d)]
    assert len(layers) == 8
    assert {made.window.size for made in layers} == {(7, 7)}
    assert model.eval()(torch.randn(1, 3, 96, 64)).shape == (1, 1000)


def test_cost_is_linear_in_the_pixels():
    model = nn.Sequential(layer(window=5))
    small, large = (count(model, (side, side)) for side in (32, 64))
    assert large.true_flops == 4 * small.true_flops
    assert large.map_bytes == 4 * small.map_bytes == 4 * 2 * 2 * 32 * 32 * 25
    assert count(nn.Sequential(layer(size=8)), (8, 8)).map_bytes == 2 * 2 * 64 * 64


@pytest.mark.slow
def test_exported_as_one_program():
    made = layer(window=5, window_dilation=2).eval()
    x = torch.randn(1, 3, 9, 12)
    program = torch.export.export(made, (x,))
    torch.testing.assert_close(program.module()(x), made(x))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window": 0}, "window must be a whole number from 1"),
        ({"window": 3.0}, r"window must be a whole number from 1.*got 3\.0"),
        ({"window": -1}, "window must be a whole number from 1.*got -1"),
        ({"window": 10**9}, "window must be at most 65536, got 1000000000; a window as large as the map"),
        ({"window": 3, "size": 8}, "size=8 has no meaning with a window"),
        ({"window_stride": 2}, "window_stride=2 has no meaning without a window"),
        ({"window": 3, "window_stride": 4}, "window_stride must be at most the window, 3"),
    ],
    ids=str,
)
def test_wrong_windows_are_named(options, told):
    with pytest.raises(ValueError, match=told):
        layer(**options)


@pytest.mark.parametrize("value", [(3, 3), 0, -2, 3.0, True, "3"], ids=repr)
def test_a_window_of_a_sequence_is_one_number(value):
    told = rf"^window of a sequence must be a whole number from 1, got window={re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=told):
        AAConv1d(3, 8, 3, window=value)
