"""Relative tables: fitted to any map, loaded from any checkpoint, drawn as the layer says."""

import logging

import pytest
import torch
from torch import nn

from aaconv import AAConv2d
from aaconv.layers import tables as tables_module
from aaconv.layers.tables import fit_table
from support.small_layers import SMALL, small


@pytest.mark.parametrize("longest", [1, 2, 7, 14])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_a_smaller_map_uses_the_middle_of_the_table_exactly(longest, heads):
    table = torch.randn(*heads, 2 * longest - 1, 5)
    for length in range(1, longest + 1):
        fitted = fit_table(table, length)
        for offset in range(-(length - 1), length):
            assert torch.equal(fitted[..., offset + length - 1, :], table[..., offset + longest - 1, :])


def test_the_expression_for_export_equals_the_slice_bit_for_bit(monkeypatch):
    table = torch.randn(27, 5)
    sliced = [fit_table(table, length) for length in range(1, 15)]
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    for length, expected in enumerate(sliced, 1):
        assert torch.equal(fit_table(table, length), expected)


@pytest.mark.parametrize(("longest", "length"), [(7, 14), (7, 8), (14, 40), (2, 9)])
def test_a_larger_map_stretches_the_table_smoothly(longest, length):
    offsets = torch.arange(-(longest - 1), longest, dtype=torch.float64)
    line = torch.stack([offsets, torch.ones_like(offsets)], -1)
    fitted = fit_table(line, length)
    assert fitted.shape == (2 * length - 1, 2)
    # The ends and the middle stay, a constant stays constant, and a line stays a line away from the ends.
    torch.testing.assert_close(fitted[[0, length - 1, -1], 0], torch.tensor([1 - longest, 0, longest - 1]).double())
    torch.testing.assert_close(fitted[:, 1], torch.ones(2 * length - 1).double())
    stretched = torch.linspace(1 - longest, longest - 1, 2 * length - 1, dtype=torch.float64)
    inner = (stretched.abs() <= longest - 2) | (stretched.abs() == longest - 1)
    torch.testing.assert_close(fitted[inner, 0], stretched[inner])
    assert (fitted[1:, 0] > fitted[:-1, 0]).all()


def test_a_single_entry_serves_any_length():
    table = torch.randn(1, 4)
    assert torch.equal(fit_table(table, 5), table.expand(9, 4))


def test_smaller_maps_are_exact_and_larger_ones_change_no_parameter():
    large, x = small(size=(9, 9)).double(), torch.randn(1, 6, 5, 7).double()
    exact = small(size=(5, 7)).double()
    state = large.state_dict()
    state["rel_h"], state["rel_w"] = state["rel_h"][4:13], state["rel_w"][2:15]
    exact.load_state_dict(state)
    assert torch.equal(large(x), exact(x))
    before = {name: value.clone() for name, value in large.state_dict().items()}
    large(torch.randn(1, 6, 20, 13).double())
    assert all(torch.equal(value, large.state_dict()[name]) for name, value in before.items())


def test_a_checkpoint_of_another_size_is_resized_and_said_once(caplog, monkeypatch):
    monkeypatch.setattr(tables_module, "_told_resizes", set())
    trained = nn.Sequential(small(size=(7, 7)), AAConv2d(16, 16, 3, **SMALL, size=(7, 7)))
    larger = nn.Sequential(small(size=(14, 14)), AAConv2d(16, 16, 3, **SMALL, size=(14, 14)))
    with caplog.at_level(logging.WARNING, logger="aaconv"):
        larger.load_state_dict(trained.state_dict())
    assert larger[0].size == (14, 14)
    assert [r.getMessage() for r in caplog.records] == [
        "relative tables for maps of 7 pixels fitted to maps of 14 pixels (first: 0.rel_h)"
    ]
    # Back in the small size the ends, the middle and everything that is no table are the trained ones.
    torch.testing.assert_close(larger[1].rel_w[[0, 13, -1]], trained[1].rel_w[[0, 6, -1]])
    assert torch.equal(larger[0].conv.weight, trained[0].conv.weight)
    smaller = small(size=(3, 3))
    smaller.load_state_dict(trained[0].state_dict())
    assert torch.equal(smaller.rel_h, trained[0].rel_h[4:9])


def test_a_checkpoint_with_other_heads_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch"):
        small(size=4).load_state_dict(small(size=4, share_heads=False).state_dict())


def test_initialisation_of_the_tables():
    scaled = AAConv2d(64, 64, 1, size=200, value_ratio=0.25)
    assert scaled.rel_h.mean().abs() < 0.02
    assert scaled.rel_h.std().item() == pytest.approx(20**-0.5, rel=0.1)
    literal = AAConv2d(64, 64, 1, size=200, value_ratio=0.25, init="literal")
    assert literal.rel_h.mean().item() == pytest.approx(20**-0.5, rel=0.3)
    assert literal.rel_h.std().item() == pytest.approx(1, rel=0.1)
    before = scaled.rel_h.clone()
    scaled.reset_parameters()
    assert not torch.equal(before, scaled.rel_h)
