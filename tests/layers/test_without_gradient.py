"""A layer without gradients as a GPU does it, in triton's interpreter, against its parts: output to a rounding, and
weights that were changed in any way."""

import copy

import pytest
import torch
from torch import nn

from aaconv import AAConv2d
from aaconv.attention import default_backend, triton_backend
from aaconv.layers import aaconv as layers
from aaconv.layers import at_once, kept_weights
from support.interpreter import run_interpreted

PARTS = 2
interpreted = pytest.mark.skipif(not triton_backend.INTERPRETED, reason="runs in the processes that are started here")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]
FEW = {"num_heads": 2, "key_channels": 8, "value_channels": 6}


@pytest.mark.slow
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@pytest.fixture
def calls(monkeypatch):
    """As if a GPU were there: what concatenate_without_gradient returned in every call."""
    returned, concatenate = [], layers.concatenate_without_gradient

    def recorded(*arguments):
        returned.append(concatenate(*arguments))
        return returned[-1]

    monkeypatch.setattr(at_once, "on_gpu", lambda x: True)
    monkeypatch.setattr(layers, "concatenate_without_gradient", recorded)
    return returned


def make_layer(dtype=torch.float16, **options):
    torch.manual_seed(0)
    options = {"size": 3, "bias": False, **FEW, **options}
    return AAConv2d(16, 32, 3, **options).eval().to(dtype, memory_format=torch.channels_last)


def make_map(*size, dtype=torch.float16):
    torch.manual_seed(1)
    return torch.randn(2, 16, *(size or (4, 5)), dtype=dtype).contiguous(memory_format=torch.channels_last)


def by_parts(layer, x):
    """In float64, by the formula as it stands."""
    with default_backend("eager"):
        return copy.deepcopy(layer).double()(x.double())


def assert_is_right(layer, x, found):
    wanted = by_parts(layer, x)
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = (found.double() - wanted).abs().max()
    with default_backend("eager"):
        allowed = (layer(x).double() - wanted).abs().max()
    assert error <= 2 * allowed


OPTIONS = [
    {},
    {"stride": 2},
    {"downsample": True},
    {"downsample": 2, "stride": 2},
    {"attention_bias": True},
    {"attention_bias": True, "downsample": True},
    {"bias": True},
    {"position": "none"},
    {"position": "coordconv"},
    {"share_heads": False, "size": 5},
    {"dilation": 2},
    {"padding": 0},
    {"padding": "same"},
]


@interpreted
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_output_is_that_of_the_parts(options, mode, calls):
    layer, x = make_layer(**options), make_map()
    with mode():
        found = layer(x)
    assert calls[0] is found
    with torch.no_grad():
        assert_is_right(layer, x, found)


@interpreted
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (6, 2), (7, 7)], ids=str)
@pytest.mark.parametrize("downsample", [False, True])
def test_maps_of_any_size(size, downsample, calls):
    layer, x = make_layer(downsample=downsample), make_map(*size)
    with torch.no_grad():
        found = layer(x)
        assert calls[0] is found
        assert_is_right(layer, x, found)


@interpreted
def test_autocast_casts_weights_of_float32(calls):
    layer = make_layer(torch.float32)
    for dtype in (torch.float16, torch.float32):
        x = make_map(dtype=dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            found = layer(x)
        assert found is calls[-1]
        assert found.dtype == torch.float16
        with torch.no_grad():
            assert_is_right(layer.half(), x.half(), found)
        layer.float()


@interpreted
@pytest.mark.parametrize(
    ("options", "stride"), [({}, 2), ({"stride": 2}, 1), ({"downsample": True}, 2), ({"downsample": 2, "stride": 2}, 1)]
)
def test_a_convolution_that_was_changed_does_not_fit_in_silence(options, stride, calls):
    layer, x = make_layer(**options), make_map()
    layer.conv.stride = stride, stride
    with torch.no_grad(), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer(x)
    assert calls == [None]


@interpreted
def test_every_stream_has_weights_of_its_own(calls, monkeypatch):
    layer, x = make_layer(), make_map()
    kept = []
    for stream in (1, 2):
        monkeypatch.setattr(kept_weights, "stream_of", lambda like, stream=stream: stream)
        with torch.no_grad():
            layer(x)
        kept.append(kept_weights._kept[layer][1])
    assert kept[0] is not kept[1]


def step(layer):
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 0.05)
    torch.optim.SGD(layer.parameters(), 1.0).step()


def multiply(layer):
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1.5)


def copy_in(layer):
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.flip(0))


def write_behind_the_back(layer):
    """No version counter sees it."""
    for weight in layer.parameters():
        weight.data.mul_(-1.5)


def write_together(layer):
    torch._foreach_mul_([weight.data for weight in layer.parameters()], 0.5)


def assign_data(layer):
    for weight in layer.parameters():
        weight.data = weight.data * 1.25


def assign_parameters(layer):
    for module in (layer.conv, layer.qkv, layer.project):
        module.weight = nn.Parameter(module.weight.detach() * 0.75)


def load(layer):
    layer.load_state_dict({name: tensor * 1.5 for name, tensor in layer.state_dict().items()})


def load_by_assigning(layer):
    layer.load_state_dict({name: tensor * 1.5 for name, tensor in layer.state_dict().items()}, assign=True)


def convert(layer):
    layer.double()
    multiply(layer)
    layer.half()


def lay_out_channels_first(layer):
    layer.to(memory_format=torch.contiguous_format)
    for module in (layer.conv, layer.qkv, layer.project):
        module.weight.data = module.weight.data.contiguous() * 1.5


def through_numpy(layer):
    for weight in layer.parameters():
        weight.detach().numpy()[...] *= 0.5


CHANGES = [
    step,
    multiply,
    copy_in,
    write_behind_the_back,
    write_together,
    assign_data,
    assign_parameters,
    load,
    load_by_assigning,
    convert,
    lay_out_channels_first,
    through_numpy,
]


@interpreted
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_were_changed_in_any_way_are_seen(change, mode, calls):
    layer, x = make_layer(attention_bias=True, bias=True), make_map(3, 3)
    with mode():
        before = layer(x).clone()
    change(layer)
    with mode():
        after = layer(x)
    assert len(calls) == 2
    assert calls[-1] is after
    assert not torch.equal(after, before)
    with torch.no_grad():
        assert_is_right(layer, x, after)


@interpreted
def test_half_of_a_network_under_autocast_after_the_other_way(calls):
    """Other dtypes get other memory, and may come back."""
    layer, x = make_layer(torch.float32), make_map(3, 3)
    with torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                cast = layer(x)
            layer.half()
            assert torch.equal(layer(x), cast)
            layer.float()
    assert all(result is not None for result in calls)


@interpreted
def test_memory_is_kept_and_goes_with_the_layer(calls):
    layer, x = make_layer(), make_map(3, 3)
    with torch.inference_mode():
        layer(x)
    (_, kept), *_ = [kept_weights._kept[layer]]
    with torch.no_grad():
        layer(x)
        layer(make_map(4, 4))
    assert kept_weights._kept[layer][1] is kept
    assert not kept.conv.is_inference()
    twin = copy.deepcopy(layer)
    assert twin not in kept_weights._kept
    before = len(kept_weights._kept)
    del layer
    assert len(kept_weights._kept) == before - 1


@interpreted
def test_memory_of_a_gpu_goes_where_the_layer_is_called_elsewhere(calls, monkeypatch):
    layer, x = make_layer(), make_map(3, 3)
    with torch.no_grad():
        layer(x)
        assert layer in kept_weights._kept
        monkeypatch.setattr(at_once, "on_gpu", lambda x: False)
        layer(x)
    assert layer not in kept_weights._kept


@interpreted
def test_a_bias_of_another_dtype_is_left_to_torch(calls):
    """Which refuses it with gradients, and therefore without."""
    layer, x = make_layer(bias=True), make_map(3, 3)
    layer.conv.bias.data = layer.conv.bias.data.float()
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, pytest.raises(RuntimeError, match="type"):
            layer(x)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        found = layer(x)
    assert calls[0] is calls[1] is None
    assert found is calls[2]
    with torch.no_grad():
        assert_is_right(layer.half(), x, found)


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"combine": "add"},
        {"qk_norm": True},
        {"window": 3, "size": None},
        {"value_channels": 32},
        {"padding_mode": "reflect"},
        {"backend": "eager"},
    ],
    ids=str,
)
def test_other_layers_are_done_part_by_part(options, calls):
    layer, x = make_layer(**options), make_map(5, 5)
    with torch.no_grad():
        found = layer(x)
        assert calls == [None]
        assert (found.double() - by_parts(layer, x)).abs().max() < 0.02


@interpreted
@pytest.mark.parametrize(
    "change", ["gradients", "channels first", "hook", "weight norm", "transposed", "float32", "mode"]
)
def test_done_part_by_part_where_it_must_be(change, calls):
    from torch.utils.flop_counter import FlopCounterMode

    dtype = torch.float32 if change == "float32" else torch.float16
    layer, x, seen = make_layer(dtype), make_map(3, 3, dtype=dtype), []
    if change == "channels first":
        x = x.contiguous()
    if change == "hook":
        layer.conv.register_forward_hook(lambda *_: seen.append("hook"))
    if change == "weight norm":
        torch.nn.utils.parametrizations.weight_norm(layer.conv)
    if change == "transposed":
        layer.project.weight.data = layer.project.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.set_grad_enabled(change == "gradients"):
        if change == "mode":
            with FlopCounterMode(display=False):
                found = layer(x)
        else:
            found = layer(x)
    assert calls[0] is None
    assert seen == (["hook"] if change == "hook" else [])
    assert (found.double() - by_parts(layer, x)).abs().max() < 0.02
