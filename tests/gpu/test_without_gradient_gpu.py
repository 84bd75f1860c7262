"""A layer where no gradient is wanted, on a GPU: as near to float64 as with gradients, with the weights of the day."""

import pytest
import torch

from aaconv import AAConv2d
from aaconv.layers import aaconv
from aaconv.models import create_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LAYERS = [
    {},
    {"downsample": True},
    {"stride": 2, "downsample": 1},
    {"stride": 2, "bias": True, "attention_bias": True},
    {"position": "sinusoidal"},
]


@pytest.fixture
def taken(monkeypatch):
    """Whether the short way was taken, of every call of a layer."""
    found, short_way = [], aaconv.concatenate_without_gradient

    def recorded(*arguments):
        output = short_way(*arguments)
        found.append(output is not None)
        return output

    monkeypatch.setattr(aaconv, "concatenate_without_gradient", recorded)
    return found


def made(options, dtype):
    torch.manual_seed(0)
    options = {"bias": False, **options}
    layer = AAConv2d(64, 128, 3, size=14, num_heads=4, key_channels=80, value_channels=12, **options)
    return layer.to("cuda", dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sides", [(14, 14), (9, 13)], ids=str)
def test_a_layer_is_as_near_to_float64_as_with_gradients(options, dtype, sides, taken):
    x = torch.randn(3, 64, *sides, device="cuda").to(dtype).to(memory_format=torch.channels_last)
    layer, exact = made(options, dtype), made(options, torch.float64)
    exact.load_state_dict({name: weight.double() for name, weight in layer.state_dict().items()})
    with torch.no_grad():
        truth, short = exact(x.double()), layer(x)
    assert taken == [False, True]
    long = layer(x).detach()
    assert short.dtype == dtype
    assert short.is_contiguous(memory_format=torch.channels_last)
    error, allowed = ((one.double() - truth).abs().max() for one in (short, long))
    assert error <= 2 * allowed + 1e-3 * truth.abs().max()


@pytest.mark.parametrize("batch", [1, 5])
def test_a_network_under_autocast(batch, taken):
    torch.manual_seed(0)
    network = create_model("aa_resnet50", num_classes=10).cuda().eval().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        truth = network(x)
    taken.clear()
    with torch.autocast("cuda", torch.bfloat16):
        long = network(x).detach()
        assert not any(taken)
        taken.clear()
        with torch.no_grad():
            short = [network(x) for _ in range(2)]
    assert taken.count(True) == 26  # 13 layers, twice
    assert torch.equal(*short)
    error, allowed = ((one.float() - truth).norm() for one in (short[0], long))
    assert error <= 2 * allowed


def test_weights_that_change_are_seen(taken):
    layer, x = made({}, torch.bfloat16), torch.randn(2, 64, 14, 14, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        before = layer(x)
        for weight in (layer.conv.weight, layer.qkv.weight, layer.project.weight):
            weight.data.mul_(-1)
        after = layer(x)
    assert taken == [True, True]
    torch.testing.assert_close(after.float(), layer(x).detach().float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(after[:, :116], -before[:, :116])
