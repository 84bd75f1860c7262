"""Averages and resizing are torch's, with gradients of our own where they are compiled."""

import pytest
import torch
import torch.nn.functional as F

from aaconv.layers import pooling
from aaconv.layers.pooling import Halve, average, resize

SIZES = [((7, 7), (14, 14)), ((4, 5), (7, 10)), ((1, 3), (1, 5)), ((5, 6), (5, 6)), ((6, 9), (3, 4))]


@pytest.mark.parametrize(("old", "new"), SIZES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_values_and_gradients_are_torchs(old, new, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *old, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    ours, torchs = resize(x, new), F.interpolate(x, new, mode="bilinear")
    grad = torch.randn_like(torchs)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad)[0] for out in (ours, torchs)))
    with torch.no_grad():
        assert torch.equal(resize(x, new), torchs)


def test_bfloat16_is_as_good_as_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 14, 14, dtype=torch.bfloat16)
    exact = F.interpolate(x.double(), (28, 28), mode="bilinear")
    ours = resize(x.requires_grad_(), (28, 28))
    assert ours.dtype == torch.bfloat16
    torchs = F.interpolate(x, (28, 28), mode="bilinear")
    assert (ours - exact).abs().max() <= 2 * (torchs - exact).abs().max()


def test_the_weights_are_kept_and_can_be_trained_through_after_inference_mode():
    pooling._kept_weights.cache_clear()
    x = torch.randn(1, 2, 3, 5)
    with torch.inference_mode(), torch.enable_grad():
        pooling._weights(3, 6, x)
    for _ in range(2):
        resize(x.requires_grad_(), (6, 10)).sum().backward()
    assert pooling._kept_weights.cache_info().misses == 2
    assert not pooling._weights(3, 6, x).is_inference()


def test_every_stream_has_weights_of_its_own(monkeypatch):
    pooling._kept_weights.cache_clear()
    x, found = torch.randn(1, 2, 3, 5), []
    for stream in ("one", "other", "one"):
        monkeypatch.setattr(pooling, "_stream", lambda like, stream=stream: stream)
        found.append(pooling._weights(3, 6, x))
    assert found[0] is found[2] is not found[1]


@pytest.mark.slow
def test_no_atomic_addition_in_the_compiled_gradient():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(1, 4, 6, 6, requires_grad=True)
    compiled = torch.compile(lambda x: resize(x, (12, 12)).square().sum())

    def gradient():
        compiled(x).backward()

    _, code = run_and_get_code(gradient)
    assert len(code) == 2
    assert not any("atomic_add" in part for part in code)


@pytest.mark.slow
def test_exports_with_any_size_where_gradients_are_enabled():
    class Resized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)

        def forward(self, x):
            return resize(self.convolution(x), x.shape[2:])

    height, width = (torch.export.Dim(name, min=8, max=64) for name in ("height", "width"))
    network, x = Resized(), torch.randn(1, 3, 21, 18)
    program = torch.export.export(network, (torch.randn(1, 3, 12, 16),), dynamic_shapes=({2: height, 3: width},))
    torch.testing.assert_close(program.module()(x), network(x))


@pytest.mark.parametrize("size", [(2, 2), (8, 6), (2, 14), (7, 6), (1, 3), (1, 1), (5, 2)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_halved_map_has_the_gradient_of_torchs_average(size, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    ours, torchs = Halve.apply(x), average(x, (3, 3), (2, 2))
    assert torch.equal(ours, torchs)
    grad = torch.randn_like(torchs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad)[0] for out in (ours, torchs)))
    assert torch.autograd.gradgradcheck(Halve.apply, x)


def test_what_is_not_compiled_is_halved_by_torch():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    assert average(x, (3, 3), (2, 2)).grad_fn.name() == "AvgPool2DBackward0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "window", "stride"),
    [((8, 6), (3, 3), (2, 2)), ((7, 6), (3, 3), (2, 2)), ((8, 8), (2, 2), (2, 2)), ((1, 8), (1, 3), (1, 2))],
    ids=str,
)
def test_compiled_averages_are_those_that_are_not(size, window, stride):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *size, requires_grad=True)
    results = []
    for function in (average, torch.compile(average, fullgraph=True)):
        out = function(x, window, stride)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_the_compiled_gradient_of_a_halved_map_looks_for_no_windows():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(1, 4, 6, 6, requires_grad=True)
    compiled = torch.compile(lambda x: average(x, (3, 3), (2, 2)).square().sum())
    _, code = run_and_get_code(lambda: compiled(x).backward())
    assert len(code) == 2
    assert not any("avg_pool2d_backward" in part for part in code)
