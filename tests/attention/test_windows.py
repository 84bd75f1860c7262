"""Windows: what a query sees, and every backend against the masked reference in float64."""

import random

import pytest
import torch

from aaconv.attention import attend_2d, attention_maps, eager, windows
from aaconv.attention.windows import Axis, make_window

HEADS, DEPTH, VALUES = 2, 4, 3
SIZES = {"num_heads": HEADS, "key_channels": HEADS * DEPTH}


def random_inputs(height, width, window, *, per_head=False, batch=2, dtype=torch.float64):
    """qkv, rel_h, rel_w that want gradients, and a gradient of the output."""
    of_heads = (HEADS,) if per_head else ()
    tables = (torch.randn(*of_heads, 2 * axis.window - 1, DEPTH) for axis in window)
    inputs = [torch.randn(batch, height, width, HEADS * (2 * DEPTH + VALUES)), *tables]
    grad = torch.randn(batch, height, width, HEADS * VALUES, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_() for tensor in inputs], grad.to(dtype)


def output_and_gradients(inputs, grad, positions=True, **options):
    qkv, *tables = inputs
    out = attend_2d(qkv, *(tables if positions else (None, None)), **SIZES, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs if positions else [qkv], grad)]


def seen_one_by_one(length, window, stride, dilation):
    """The rule in words: a group's middle has its window around it, inside its own pixels of the side."""
    found = []
    for i in range(length):
        mates = [j for j in range(length) if j % dilation == i % dilation]
        place = mates.index(i)
        middle = min(place - place % stride + stride // 2, len(mates) - 1)
        first = middle - window // 2
        while first + window > len(mates):
            first -= 1
        first = max(first, 0)
        found.append(mates[first : first + window])
    return found


@pytest.mark.parametrize("length", [1, 2, 7, 12])
@pytest.mark.parametrize(
    ("window", "stride", "dilation"),
    [(1, 1, 1), (3, 1, 1), (4, 1, 1), (5, 2, 1), (5, 5, 1), (3, 1, 2), (4, 3, 3), (20, 1, 1), (7, 1, 2)],
)
def test_what_a_query_sees(length, window, stride, dilation):
    axis = Axis(window, stride, dilation)
    seen, row = axis.sees(length, torch.device("cpu"))
    assert [line.nonzero().flatten().tolist() for line in seen] == seen_one_by_one(length, window, stride, dilation)
    offset = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    assert torch.equal(((row - (window - 1)) * dilation)[seen], offset[seen])


@pytest.mark.parametrize("seed", range(24))
def test_tiles_give_what_the_mask_gives(seed):
    """Any sizes, windows, strides, dilations and tables; output and gradients in float64."""
    draw = random.Random(seed)
    height, width = draw.randint(1, 23), draw.randint(1, 23)
    sides = draw.randint(1, 14), draw.randint(1, 14)
    strides = tuple(draw.randint(1, side) for side in sides)
    dilations = draw.choice((1, 2, 3, 7, 40)), draw.choice((1, 2, 3, 5))
    window = make_window(sides, strides, dilations)
    inputs, grad = random_inputs(height, width, window, per_head=draw.random() < 0.5)
    positions = draw.random() < 0.8
    options = {"window": sides, "window_stride": strides, "window_dilation": dilations, "positions": positions}
    wanted = output_and_gradients(inputs, grad, **options, backend="eager")
    for one, other in zip(output_and_gradients(inputs, grad, **options, backend="sdpa"), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_dilation_takes_four_calls_whatever_it_is(monkeypatch):
    """One for each pair of a dilation's remainders would take minutes. In parts, if there are too many for a GPU."""
    calls = []
    monkeypatch.setattr("aaconv.attention.attend_decomposed", lambda q, *_, **__: calls.append(len(q)) or q)
    qkv = torch.zeros(2, 33, 47, 24)

    def attend():
        calls.clear()
        return attend_2d(qkv, None, None, num_heads=2, key_channels=8, backend="sdpa", window=3, window_dilation=16)

    attend()
    assert len(calls) == 4
    assert sum(calls) == 2 * 16 * 16
    monkeypatch.setattr(windows, "MAPS_AT_ONCE", 160)
    attend()
    assert max(calls) <= 160
    assert sum(calls) == 2 * 16 * 16


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [(6, 5), (9, 12)])
def test_a_window_of_the_map_is_global_attention(window, backend):
    inputs, _ = random_inputs(6, 5, make_window(window), dtype=torch.float32)
    tables = [windows.middle_of(table, length) for table, length in zip(inputs[1:], (6, 5), strict=True)]
    wanted = attend_2d(inputs[0], *tables, **SIZES, backend=backend)
    assert torch.equal(attend_2d(*inputs, **SIZES, window=window, backend=backend), wanted)
    if backend == "eager":
        masked = eager.attend(*inputs, **SIZES, window=make_window(window))
        torch.testing.assert_close(masked, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(17, 9, (5, 4)), (9, 30, (7, 13))], ids=str)
def test_as_good_as_eager_in_every_dtype(shape, dtype):
    height, width, sides = shape
    inputs, grad = random_inputs(height, width, make_window(sides))
    with torch.no_grad():
        inputs = [tensor.to(dtype).double().requires_grad_() for tensor in inputs]
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    exact = output_and_gradients(inputs, grad, window=sides, backend="eager")
    theirs, ours = (output_and_gradients(low, grad.to(dtype), window=sides, backend=name) for name in ("eager", "sdpa"))
    largest = max(part.abs().max() for part in exact)
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        allowed = 2 * (other - wanted).abs().max() + torch.finfo(dtype).eps * largest
        assert (one - wanted).abs().max() <= allowed


def test_maps_are_zero_out_of_sight():
    window = make_window(3)
    (qkv, *tables), _ = random_inputs(5, 6, window)
    maps = attention_maps(qkv, *tables, **SIZES, window=window).unflatten(3, (5, 6)).unflatten(2, (5, 6))
    assert torch.allclose(maps.flatten(4).sum(-1), torch.ones(()).double())
    assert (maps.flatten(4) > 0).sum(-1).unique().tolist() == [9]
    assert (maps[0, 0, 0, 0] > 0).nonzero().max() == 2


def test_the_largest_tensor_is_linear_in_the_pixels():
    """Twice the side, four times the pixels, about four times the largest tensor that is kept for the backward."""

    def largest(side):
        sizes = []
        inputs, _ = random_inputs(side, side, make_window(5), batch=1, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: sizes.append(kept.numel()) or kept, lambda x: x):
            attend_2d(*inputs, **SIZES, window=5)
        return max(sizes)

    assert largest(64) <= 4.1 * largest(32)


@pytest.mark.slow
def test_compiled_in_one_graph():
    inputs, _ = random_inputs(9, 11, make_window(5, 1, 2), dtype=torch.float32)

    def attend(*inputs):
        return attend_2d(*inputs, **SIZES, window=5, window_dilation=2)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_triton_says_why_its_windows_cannot_run():
    inputs, _ = random_inputs(9, 11, make_window(5))
    with pytest.raises(ValueError, match=r"^backend='triton' cannot run: .*; the kernels for windows: \w"):
        attend_2d(*inputs, **SIZES, window=5, backend="triton")  # float64


@pytest.mark.parametrize("value", [0, -3, 2.5, "7", True, (3,), (3, 3, 3), (3, 0)])
def test_a_wrong_window_is_named(value):
    with pytest.raises(ValueError, match=r"^window must be a whole number from 1, or a pair \(rows, columns\), got "):
        make_window(value)


@pytest.mark.parametrize("value", [2**16 + 1, 10**9, 10**30, (3, 10**9)])
def test_a_window_that_no_map_has_is_named(value):
    with pytest.raises(ValueError, match=r"^window must be at most 65536, got .*; a window as large as the map"):
        make_window(value)
    with pytest.raises(ValueError, match=r"^window_dilation must be at most 65536, got "):
        make_window(3, 1, value)


def test_a_window_object_keeps_its_stride():
    window = make_window(5, 2)
    assert make_window(window) is window
    with pytest.raises(ValueError, match=r"^window=\(5, 5\), window_stride=\(2, 2\) has a stride and .* got stride=3"):
        attend_2d(torch.zeros(1, 9, 9, 24), None, None, num_heads=2, key_channels=8, window=window, window_stride=3)


@pytest.mark.parametrize("option", ["window_stride", "window_dilation"])
def test_options_of_windows_are_refused_without_one(option):
    (qkv, *_), _ = random_inputs(4, 4, make_window(4))
    with pytest.raises(ValueError, match=rf"^{option}=2 has no meaning without a window; pass window=K as well"):
        attend_2d(qkv, None, None, **SIZES, **{option: 2})


def test_wrong_strides_dilations_and_tables_are_named():
    with pytest.raises(ValueError, match=r"window_stride must be at most the window, 3, .* got window_stride=4"):
        make_window(3, 4)
    with pytest.raises(ValueError, match=r"window_stride must be a whole number from 1.* got 0"):
        make_window(3, 0)
    with pytest.raises(ValueError, match=r"window_dilation must be a whole number from 1.* got 1.5"):
        make_window(3, 1, 1.5)
    (qkv, *tables), _ = random_inputs(4, 4, make_window(4))
    with pytest.raises(ValueError, match=r"rel_h must be \[5, 4\] or \[2, 5, 4\] for a window of 3 x 3, got \[7, 4\]"):
        attend_2d(qkv, *tables, **SIZES, window=3)
