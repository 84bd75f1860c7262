"""Averages and resizing are torch's, with gradients of our own where they are compiled."""

import pytest
import torch
import torch.nn.functional as F

from aaconv.layers import pooling
from aaconv.layers.pooling import Enlarge, Halve, average, resize

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


@pytest.mark.parametrize(("old", "new"), [*SIZES, ((1, 1), (2, 2)), ((2, 3), (4, 6)), ((3, 2), (6, 3))], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_enlarged_by_the_compiler_has_the_gradient_of_torchs(old, new, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *old, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    ours, torchs = Enlarge.apply(x, new), F.interpolate(x, new, mode="bilinear")
    grad = torch.randn_like(torchs)
    assert torch.equal(ours, torchs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad)[0] for out in (ours, torchs)))
    assert torch.autograd.gradgradcheck(lambda x: Enlarge.apply(x, new), x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("old", "new"), SIZES[:2], ids=str)
def test_a_compiled_map_is_enlarged_as_one_graph(old, new, dtype, dynamic):
    x, found = torch.randn(2, 3, *old, dtype=dtype, requires_grad=True), []
    compiled = torch.compile(resize, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for function in (compiled, resize):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = function(x, new)
        assert out.dtype == dtype
        found.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    torch.testing.assert_close(*found, **({"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}))


def test_the_gradient_of_a_doubled_map_is_as_good_as_torchs_in_bfloat16():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 14, 14, dtype=torch.bfloat16, requires_grad=True)
    grad, exact = torch.randn(2, 8, 28, 28, dtype=torch.bfloat16), x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.interpolate(exact, (28, 28), mode="bilinear"), exact, grad.double())
    errors = []
    for out in (Enlarge.apply(x, (28, 28)), F.interpolate(x, (28, 28), mode="bilinear")):
        (found,) = torch.autograd.grad(out, x, grad)
        errors.append((found - truth).abs().max())
    assert errors[0] <= 2 * errors[1]


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
        monkeypatch.setattr(pooling, "stream_of", lambda like, stream=stream: stream)
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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 0, 1, 2), (0, 3, 2, 1), (2, 3, 0, 1)], ids=str)
@pytest.mark.parametrize("size", [(2, 3, 4, 2), (1, 3, 4, 1), (2, 1, 1, 4), (1, 2, 3, 3)], ids=str)
def test_a_halved_maps_gradient_may_lie_in_any_order(size, order):
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    ours, torchs = Halve.apply(x), average(x, (3, 3), (2, 2))
    grad = torch.randn([torchs.shape[axis] for axis in order], dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(out.permute(order), x, grad)[0] for out in (ours, torchs)))


@pytest.mark.parametrize(("window", "stride"), [((3, 3), (2, 2)), ((5, 5), (4, 4)), ((3, 1), (2, 1))], ids=str)
def test_gradients_do_not_go_through_torchs_average_of_channels_last_maps(window, stride, monkeypatch):
    """Which is wrong on GPUs (torch 2.11): they are pooled in contiguous memory, and come out channels_last."""
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    expected = average(x, window, stride)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    pooled, real = [], F.avg_pool2d
    monkeypatch.setattr(pooling, "torchs_gradient_may_be_wrong", lambda x: True)
    monkeypatch.setattr(F, "avg_pool2d", lambda x, *more, **options: pooled.append(x) or real(x, *more, **options))
    found = average(x, window, stride)
    assert [one.is_contiguous() for one in pooled] == [True]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], grad)


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


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_a_graph_captured_without_gradients_resizes_by_torch(wants_gradient, monkeypatch):
    """The calls before it have not compiled the kernel for these strides, and nothing can be compiled in a capture."""
    taken = []
    monkeypatch.setattr(pooling, "can_resample", lambda x, size: True)
    monkeypatch.setattr(pooling, "is_captured", lambda x: True)
    monkeypatch.setattr(pooling, "enlarge", lambda x, size: taken.append(size))
    x = torch.randn(1, 3, 4, 5, requires_grad=wants_gradient)
    found = resize(x, (8, 9))
    assert taken == [(8, 9)] * wants_gradient
    assert wants_gradient or torch.equal(found, F.interpolate(x, size=(8, 9), mode="bilinear"))


@pytest.mark.parametrize("part", [slice(None), slice(0, 4), slice(0, 8, 2), slice(1, 8, 4)], ids=str)
def test_parts_of_channels_last_maps_are_taken_for_such(part, monkeypatch):
    """As torch does: where its average comes out channels_last its gradient is the wrong one."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    whole = torch.randn(2, 8, 9, 7)
    last = whole.to(memory_format=torch.channels_last)
    for x in (whole[:, part], last[:, part]):
        pooled = F.avg_pool2d(x, 5, 4, 2, count_include_pad=False)
        if pooled.stride(1) <= pooled.stride(3):
            assert pooling.torchs_gradient_may_be_wrong(x)
    assert pooling.torchs_gradient_may_be_wrong(last[:, part])
    assert not pooling.torchs_gradient_may_be_wrong(whole[:, part])
