"""What GPUs do where the convolution is left with an odd number of channels."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from aaconv import AAConv2d
from aaconv.layers import convolution
from aaconv.layers.convolution import (
    can_reuse_weights,
    convolve_around,
    convolve_without_gradient,
    has_hooks,
    likes_more_channels,
)


def make_layer(**options):
    return AAConv2d(6, 64, 3, num_heads=2, key_channels=8, value_channels=8, size=5, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize("padding", [(1, 2), "same", "valid"])
def test_convolving_around_is_concatenating(stride, bias, padding_mode, padding):
    if (padding, stride) == ("same", 2):
        pytest.skip("torch's convolutions do not stride and pad to same")
    layer = make_layer(stride=stride, bias=bias, padding_mode=padding_mode, padding=padding, dilation=(1, 2))
    assert likes_more_channels(layer.conv, layer.out_channels)
    x = torch.randn(2, 6, 7, 9, requires_grad=True)
    whole = layer(x)
    filled = convolve_around(layer.conv, x, layer(x)[:, -layer.value_channels :])
    torch.testing.assert_close(filled, whole)
    seed = torch.randn_like(whole)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(whole, leaves, seed)
    for ours, theirs in zip(torch.autograd.grad(filled, leaves, seed), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_that_are_kept_follow_those_of_the_layer(bias, dtype, mode):
    """However they are changed: in place, behind autograd's back, or loaded."""
    layer = make_layer(stride=2, bias=bias, dilation=(1, 2))
    changes = [
        lambda: None,
        lambda: layer.conv.weight.data.mul_(2),
        lambda: layer.load_state_dict({name: 3 * tensor for name, tensor in layer.state_dict().items()}),
        lambda: layer.conv.double() and layer.conv.float(),
    ]
    x = torch.randn(2, 6, 7, 9)
    for change in changes:
        change()
        with mode(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            attended = torch.randn(2, layer.value_channels, 4, 5)
            kept = convolve_without_gradient(layer.conv, x, attended)
            wanted = convolve_around(layer.conv, x, attended)
        torch.testing.assert_close(kept, wanted)


def test_weights_are_kept_only_where_nothing_is_recorded():
    conv, x, attended = make_layer().conv, torch.randn(1, 6, 5, 5), torch.randn(1, 8, 5, 5)
    assert not can_reuse_weights(conv, x, attended)
    with torch.no_grad():
        assert can_reuse_weights(conv, x, attended)
    frozen = conv.requires_grad_(False)
    assert can_reuse_weights(frozen, x, attended)
    assert not can_reuse_weights(frozen, x.requires_grad_(), attended)
    assert not can_reuse_weights(frozen, x.detach(), attended.requires_grad_())


def test_a_bias_that_is_trained_alone_gets_its_gradient_in_every_step():
    conv, x, attended = make_layer().conv.requires_grad_(False), torch.randn(1, 6, 5, 5), torch.randn(1, 8, 5, 5)
    conv.bias.requires_grad_()
    for _ in range(2):
        convolve = convolve_without_gradient if can_reuse_weights(conv, x, attended) else convolve_around
        convolve(conv, x, attended).sum().backward()
    torch.testing.assert_close(conv.bias.grad, torch.full((56,), 2 * 25.0))


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_dtypes_that_torch_does_not_mix_are_left_to_it(changed):
    conv, x, attended = make_layer().conv, torch.randn(1, 6, 5, 5), torch.randn(1, 8, 5, 5)
    parameter = getattr(conv, changed)
    parameter.data = parameter.data.double()
    with torch.no_grad():
        assert not can_reuse_weights(conv, x, attended)
        with torch.autocast("cpu", torch.bfloat16):
            assert can_reuse_weights(conv, x, attended)


def test_nothing_is_kept_of_a_cuda_graph(monkeypatch):
    conv, x, attended = make_layer().conv, torch.randn(1, 6, 5, 5), torch.randn(1, 8, 5, 5)
    monkeypatch.setattr(convolution, "is_captured", lambda x: True)
    with torch.no_grad():
        assert not can_reuse_weights(conv, x, attended)


def test_every_stream_has_weights_of_its_own(monkeypatch):
    conv, x, attended, kept = make_layer().conv, torch.randn(1, 6, 5, 5), torch.randn(1, 8, 5, 5), []
    for stream in (1, 1, 2):
        monkeypatch.setattr(convolution, "stream_of", lambda like, stream=stream: stream)
        with torch.no_grad():
            convolve_without_gradient(conv, x, attended)
        ((weight, bias),) = convolution._widened[conv].values()
        kept.append((weight, bias))
    assert all(one is other for one, other in zip(kept[0], kept[1], strict=True))
    assert not any(one is other for one, other in zip(kept[1], kept[2], strict=True))


def test_a_convolution_without_weights_is_refused():
    with pytest.raises(ValueError, match="the convolution is lazy"):
        AAConv2d.from_conv(torch.nn.LazyConv2d(16, 3))


def test_a_convolution_with_hooks_or_weights_it_makes_is_called():
    normalised = make_layer()
    torch.nn.utils.parametrizations.weight_norm(normalised.conv)
    assert not likes_more_channels(normalised.conv, normalised.out_channels)
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        layer = make_layer()
        assert not has_hooks(layer.conv)
        handle = getattr(layer.conv, register)(lambda *_: None)
        assert has_hooks(layer.conv), register
        assert not likes_more_channels(layer.conv, layer.out_channels)
        handle.remove()
        assert likes_more_channels(layer.conv, layer.out_channels)


@pytest.mark.parametrize(
    ("convolved", "channels", "liked"),
    [(232, 256, True), (224, 256, True), (288, 320, True), (256, 320, False), (64, 128, False), (20, 24, False)],
)
def test_channels_are_made_up_where_they_cost_nothing(convolved, channels, liked):
    assert likes_more_channels(torch.nn.Conv2d(4, convolved, 3), channels) == liked


class Around(torch.nn.Module):
    """What a layer does on a GPU."""

    def __init__(self, bias=True):
        super().__init__()
        self.conv = torch.nn.Conv2d(6, 56, 3, padding=1, bias=bias)

    def forward(self, x, attended):
        assert likes_more_channels(self.conv, 64)
        return convolve_around(self.conv, x, attended)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_way_of_a_gpu_compiles_as_one_graph(bias, layout, autocast, dynamic):
    """And what is written over the convolution's channels leaves their weights without a gradient."""
    module = Around(bias)
    x, attended = (torch.randn(2, c, 5, 7).to(memory_format=layout).requires_grad_() for c in (6, 8))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    seed, found = torch.randn(2, 64, 5, 7), []
    for convolve in (compiled, lambda x, attended: torch.cat([module.conv(x), attended.to(x.dtype)], 1)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = convolve(x, attended).float()
        found.append((out, *torch.autograd.grad(out, [x, attended, *module.parameters()], seed)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, **({"rtol": 0.02, "atol": 0.02} if autocast else {}))


def test_maps_of_another_size_are_refused_when_compiled():
    compiled = torch.compile(Around(), fullgraph=True, backend="aot_eager", dynamic=False)
    with pytest.raises(RuntimeError, match="expand"):
        compiled(torch.randn(2, 6, 5, 7), torch.randn(2, 8, 4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_the_compiler_computes_again_is_laid_out_as_it_was(layout):
    """It may make a convolution channels_last that was not, and what was written by strides would be elsewhere."""
    module = Around()
    x, attended = (torch.randn(2, c, 5, 7).to(memory_format=layout).requires_grad_() for c in (6, 8))

    @torch.compile(fullgraph=True)
    def compiled(x, attended):
        return checkpoint(lambda *inputs: module(*inputs).sin(), x, attended, use_reentrant=False)

    found = []
    for out in (compiled(x, attended), torch.cat([module.conv(x), attended], 1).sin()):
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, attended, *module.parameters()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_compiled_training_only_the_attentions_channels_are_written(monkeypatch, caplog):
    """A copy into some channels is a pass over all of them, forward and backward; theirs alone is less to move."""
    from torch._inductor import compile_fx, metrics
    from torch._inductor.utils import fresh_inductor_cache

    caplog.set_level("INFO", compile_fx.inductor_metrics_log.name)  # or bytes are not counted
    x, attended = (torch.randn(2, c, 16, 16).to(memory_format=torch.channels_last) for c in (6, 8))
    moved = []
    for ours in (True, False):
        torch._dynamo.reset()
        metrics.reset()
        monkeypatch.setattr(convolution, "compiles_gradient", lambda *_, ours=ours: ours)
        compiled = torch.compile(Around(), dynamic=False)
        with fresh_inductor_cache():
            compiled(x.requires_grad_(), attended.requires_grad_()).relu().sum().backward()
        moved.append(metrics.num_bytes_accessed)
    written = 2 * 64 * 16 * 16 * 4  # bytes of the result
    assert moved[1] - moved[0] >= 2 * written
