"""Maps halved and enlarged by kernels, in triton's interpreter, against torch in float64; tests/gpu compiles them."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aaconv.attention import triton_backend
from aaconv.layers import resampling
from aaconv.layers.pooling import average, resize, resize_into
from support.interpreter import run_interpreted
from support.resampling_laws import (
    HALVED,
    RESIZED,
    assert_enlarges,
    assert_halves,
    halve_by_torch,
    in_turn,
    resize_by_torch,
)

PARTS = 2
INTERPRETED = triton_backend.INTERPRETED
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes that are started here")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]
HALF = [torch.float32, torch.float16]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


def random_map(channels=4, size=(6, 7), batch=2, dtype=torch.float32):
    return torch.randn(batch, channels, *size, dtype=dtype).contiguous(memory_format=torch.channels_last)


@interpreted
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("size", "channels"), in_turn(HALVED), ids=str)
def test_halved_maps_match_float64(size, channels, dtype):
    assert_halves(size, channels, dtype)


@interpreted
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("sizes", "channels"), in_turn(RESIZED), ids=str)
def test_enlarged_maps_match_float64(sizes, channels, dtype):
    assert_enlarges(*sizes, channels, dtype)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_bfloat16_matches_float64():
    assert_halves((7, 8), 8, torch.bfloat16)
    assert_enlarges((4, 5), (7, 10), 8, torch.bfloat16)


@interpreted
@pytest.mark.parametrize("size", [(7, 8), (1, 1), (5, 1)], ids=str)
def test_gradients_of_channels_of_a_wider_map(size):
    assert_halves(size, 8, torch.float32, slots=True)
    assert_enlarges(size, (9, 11), 8, torch.float32, slots=True)


@interpreted
@pytest.mark.parametrize("name", ["halve", "enlarge"])
def test_many_gradients_at_once_and_of_gradients(name):
    """is_grads_batched: as one by one, and without a graph that nobody asked for."""
    ours = {"halve": resampling.halve, "enlarge": enlarge}[name]
    x = random_map().requires_grad_()
    out = ours(x)
    many = torch.randn(3, *out.shape)
    (batched,) = torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)
    assert not batched.requires_grad
    one_by_one = [torch.autograd.grad(out, x, grad, retain_graph=True)[0] for grad in many]
    torch.testing.assert_close(batched, torch.stack(one_by_one))
    grad = many[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(ours(x), x, grad, create_graph=True)
    many = torch.randn(3, *first.shape)
    (batched,) = torch.autograd.grad(first, grad, many, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(first, grad, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(batched, torch.stack(one_by_one))


@interpreted
def test_a_gradient_of_any_layout_is_taken():
    """An expanded one, and one with its channels first."""
    x = random_map().requires_grad_()
    exact = x.detach().double().requires_grad_()
    for ours, torchs in ((resampling.halve, halve_by_torch), (enlarge, enlarge_by_torch)):
        result = torchs(exact)
        for grad in (torch.tensor(2.0).expand(result.shape), torch.randn(result.shape)):
            (found,), (wanted,) = (
                torch.autograd.grad(one, leaf, grad.to(leaf.dtype))
                for one, leaf in ((ours(x), x), (torchs(exact), exact))
            )
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def enlarge(x):
    return resampling.enlarge(x, (11, 9))


def enlarge_by_torch(x):
    return resize_by_torch(x, (11, 9))


@interpreted
@pytest.mark.parametrize(("ours", "torchs"), [(resampling.halve, halve_by_torch), (enlarge, enlarge_by_torch)])
def test_gradients_can_be_differentiated_again_and_again(ours, torchs):
    """The third derivative of a cube."""
    found = []
    for function, x in ((ours, random_map()), (torchs, None)):
        leaf = x.requires_grad_() if x is not None else found[0][0].detach().double().requires_grad_()
        grads, last = [leaf], function(leaf).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(last, leaf, create_graph=True)
            grads.append(grad)
            last = grad.sum()
        found.append(grads)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@interpreted
def test_slots_of_a_wider_map_are_filled_and_nothing_else():
    wide = torch.full((2, 9, 8, 6), 7.0).contiguous(memory_format=torch.channels_last)
    x = random_map(3, (4, 5))
    resize_into(wide[:, 4:7], x)
    assert torch.equal(wide[:, 4:7], resampling.enlarge(x, (8, 6)))
    assert (wide[:, :4] == 7).all()
    assert (wide[:, 7:] == 7).all()


@interpreted
def test_the_layers_pooling_takes_the_kernels(monkeypatch):
    calls, run = [], resampling._run
    monkeypatch.setattr(resampling, "_run", lambda name, *rest: calls.append(name) or run(name, *rest))
    x = random_map()
    average(x, (3, 3), (2, 2))
    resize(x, (12, 14))
    resize_into(torch.empty(2, 4, 12, 14, memory_format=torch.channels_last), x)
    assert calls == ["halve", "enlarge", "enlarge"]
    average(x, (1, 3), (1, 2))
    average(x, (2, 2), (2, 2))
    assert len(calls) == 3


CHANGES = ["channels first", "float64", "empty", "mode", "vmap", "forward mode", "compiled", "traced", "subclass"]


@interpreted
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch.jit, in forward mode too
@pytest.mark.parametrize("change", CHANGES)
def test_where_something_looks_on_it_is_done_by_torch(change, monkeypatch):
    calls, run = [], resampling._run
    monkeypatch.setattr(resampling, "_run", lambda name, *rest: calls.append(name) or run(name, *rest))

    def both(x):
        return average(x, (3, 3), (2, 2)), resize(x, (12, 14))

    def run_changed(x):
        if change == "mode":
            with FlopCounterMode(display=False):
                return both(x)
        if change == "vmap":
            return [one[0] for one in torch.vmap(both)(x[None])]
        if change == "forward mode":
            return torch.func.jvp(both, (x,), (x,))[0]
        if change == "compiled":
            return torch.compile(both, backend="aot_eager", fullgraph=True)(x)
        if change == "traced":
            return torch.jit.trace(both, x, check_trace=False)(x)
        return both(x)

    x = random_map(batch=0 if change == "empty" else 2, dtype=torch.float64 if change == "float64" else torch.float32)
    if change == "channels first":
        x = x.contiguous()
    if change == "subclass":
        x = x.as_subclass(type("Own", (torch.Tensor,), {}))
    halved, resized = run_changed(x)
    assert not calls
    torch.testing.assert_close(torch.Tensor(halved), halve_by_torch(torch.Tensor(x)), check_dtype=False)
    torch.testing.assert_close(torch.Tensor(resized), resize_by_torch(torch.Tensor(x), (12, 14)), check_dtype=False)


@interpreted
def test_gradients_of_many_at_once_go_through_torch(monkeypatch):
    calls, run = [], resampling._run
    monkeypatch.setattr(resampling, "_run", lambda name, *rest: calls.append(name) or run(name, *rest))
    x = random_map().requires_grad_()
    for ours, torchs in ((resampling.halve, halve_by_torch), (enlarge, enlarge_by_torch)):
        grads = torch.randn(3, *torchs(x).shape)
        found, wanted = (
            torch.autograd.grad(function(x), x, grads, is_grads_batched=True)[0] for function in (ours, torchs)
        )
        torch.testing.assert_close(found, wanted)
    assert calls == ["halve", "enlarge"]  # forward alone


def test_without_a_gpu_torch_does_it():
    if INTERPRETED:
        pytest.skip("the interpreter is as good as a GPU")
    assert not resampling.can_resample(random_map())


@pytest.mark.parametrize("family", ["maps", "weights"])
def test_the_tool_for_compute_sanitizer_fails_where_no_kernel_runs(family):
    run_family = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "run_kernels.py"))["run_family"]
    if INTERPRETED and family == "weights":  # maps would take a minute
        run_family(family, torch.float16, torch.device("cpu"))
    for dtype in (torch.bfloat16,) if INTERPRETED else (torch.bfloat16, torch.float32):
        with pytest.raises(SystemExit, match=f"^--only {family}: no kernel takes {dtype} on cpu: "):
            run_family(family, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3, 4, 5), None),
        (torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), 3),
        (torch.empty(2, 8, 4, 5, memory_format=torch.channels_last)[:, 2:5], 8),
        (torch.empty(2, 8, 4, 5, memory_format=torch.channels_last)[:, :, :2], None),
        (torch.empty(2, 8, 4, 5, memory_format=torch.channels_last)[:1, :, :2], 8),
        (torch.empty(2, 8, 4, 5, memory_format=torch.channels_last)[..., :2], None),
        (torch.empty(2, 8, 4, 1, memory_format=torch.channels_last)[:, 2:5], 8),
        (torch.empty(2, 8, 1, 1, memory_format=torch.channels_last)[:, 2:5], 8),
        (torch.empty(1, 3, 1, 1), 3),
        (torch.empty(2, 1, 4, 5), 1),
        (torch.empty(1).expand(2, 3, 4, 5), None),
        (torch.empty(1).expand(2, 1, 4, 5), None),
    ],
)
def test_how_far_apart_pixels_are(tensor, stride):
    assert resampling.pixel_stride(tensor) == stride
