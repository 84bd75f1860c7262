"""Tables whose size the first input decides."""

import copy
import pickle

import pytest
import torch
from torch import nn

from aaconv import AAConv1d, AAConv2d
from support.small_layers import SMALL, VARIANTS, small


def test_a_bad_input_makes_no_tables():
    layer = small()
    with pytest.raises(ValueError, match="expected input"):
        layer(torch.zeros(1, 5, 9, 9))
    layer(torch.zeros(1, 6, 4, 7))
    assert layer.size == (4, 7)


def test_tables_made_in_inference_mode_can_be_trained():
    layer = small()
    with torch.inference_mode():
        layer(torch.zeros(1, 6, 4, 7))
    assert layer.rel_w.requires_grad
    assert not layer.rel_w.is_inference()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_lazy_tables_take_the_size_of_the_first_map(variant):
    layer = small(**variant)
    x = torch.randn(1, 6, 9, 5)
    has_tables = variant.get("position", "relative") == "relative"
    assert layer.size is None
    layer(x)
    assert type(layer) is AAConv2d
    assert layer.size == (layer.attention_size(9, 5) if has_tables else None)


def test_lazy_layer_copies_saves_and_loads():
    lazy = small()
    assert copy.deepcopy(lazy).size is None
    saved = lazy.state_dict()
    small().load_state_dict(saved)
    made = copy.deepcopy(lazy)
    made(torch.randn(1, 6, 4, 7))
    lazy.load_state_dict(made.state_dict())
    assert lazy.size == (4, 7)
    x = torch.randn(2, 6, 4, 7)
    assert torch.equal(lazy(x), made(x))
    assert type(lazy) is AAConv2d


def test_attention_maps_of_a_lazy_layer():
    layer = small(stride=2)
    x = torch.randn(2, 6, 6, 10)
    maps = layer.attention_maps(x)
    assert maps.shape == (2, 4, 15, 15)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 15))
    assert layer.size == (3, 5)


def test_lazy_sequence():
    layer = AAConv1d(6, 16, 3, **SMALL, downsample=True)
    out = layer(torch.randn(2, 6, 11))
    assert out.shape == (2, 16, 11)
    assert layer.size == (1, 6)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_lazy_layer_can_be_pickled():
    x = torch.randn(1, 6, 4, 7)
    for lazy in (small(), AAConv1d(6, 16, 3, **SMALL)):
        again = pickle.loads(pickle.dumps(lazy))
        assert again.size is None
        assert isinstance(again, AAConv2d) == isinstance(lazy, AAConv2d)
        seen = x if isinstance(lazy, AAConv2d) else x[:, :, 0]
        again(seen)
        assert again.size == ((4, 7) if isinstance(lazy, AAConv2d) else (1, 7))
        assert type(pickle.loads(pickle.dumps(again))) is type(again)


class Subclass(AAConv2d):
    def forward(self, input):
        return -super().forward(input)


def test_a_subclass_stays_what_it_is():
    x = torch.randn(1, 6, 5, 5)
    layer = Subclass(6, 16, 3, **SMALL)
    out = layer(x)
    assert type(layer) is Subclass
    plain = small(size=5)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(out, -plain(x))


@pytest.mark.parametrize(
    "touch",
    [
        lambda layer: sum(p.numel() for p in layer.parameters()),
        lambda layer: layer.apply(lambda m: [nn.init.zeros_(p) for p in m.parameters(recurse=False)]),
        lambda layer: layer.rel_h + 1,
    ],
    ids=["numel", "apply(init)", "add"],
)
def test_whoever_wants_lazy_tables_is_told_what_to_do(touch):
    layer = small()
    with pytest.raises(ValueError, match=r"^the relative tables are lazy.*pass size=\(height, width\).*make_tables"):
        touch(layer)
    layer.make_tables(4, 7)
    touch(layer)
