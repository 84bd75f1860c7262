"""Attention with a bias of two parts: every backend against float64, output and all five gradients."""

import math
import re

import numpy as np
import pytest
import torch

from aaconv.attention import attend_2d, attend_decomposed, eager, sdpa
from aaconv.attention.heads import relative_logits, split_heads

SHAPES = [  # batch, heads, queries, height and width of the keys' map, leading keys, depth, value depth
    (1, 1, 1, 1, 1, 0, 4, 4),
    (2, 3, 7, 5, 3, 0, 8, 5),
    (1, 2, 12, 3, 4, 1, 6, 6),
    (2, 1, 5, 1, 9, 2, 16, 3),
    (1, 2, 300, 9, 7, 0, 5, 20),
]


def random_inputs(batch, heads, queries, height, width, leading, depth, value_depth, dtype=torch.float64):
    keys = leading + height * width
    lengths = (queries, depth), (keys, depth), (keys, value_depth), (queries, height), (queries, width)
    return [torch.randn(batch, heads, *length, dtype=torch.float64).to(dtype) for length in lengths]


def output_and_gradients(attend, inputs, grad, **options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def test_the_reference_is_the_definition():
    q, k, v, rows, columns = random_inputs(1, 1, 3, 2, 4, 1, 5, 2)
    out = attend_decomposed(q, k, v, rows, columns, scale=0.3, backend="eager")
    for i in range(3):
        logits = [0.3 * q[0, 0, i] @ k[0, 0, 0]]
        for y in range(2):
            for x in range(4):
                logits.append(0.3 * q[0, 0, i] @ k[0, 0, 1 + 4 * y + x] + rows[0, 0, i, y] + columns[0, 0, i, x])
        torch.testing.assert_close(out[0, 0, i], torch.stack(logits).softmax(0) @ v[0, 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sdpa_is_the_reference(shape):
    inputs = random_inputs(*shape)
    grad = torch.randn(*inputs[0].shape[:3], shape[-1], dtype=torch.float64)
    exact = output_and_gradients(attend_decomposed, inputs, grad, backend="eager")
    for ours, wanted in zip(output_and_gradients(attend_decomposed, inputs, grad, backend="sdpa"), exact, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_it_is_attend_2d_where_rows_and_columns_are_relative_logits():
    height, width, heads, depth = 4, 6, 2, 5
    qkv = torch.randn(2, height, width, heads * (2 * depth + 3), dtype=torch.float64)
    rel_h, rel_w = (torch.randn(2 * side - 1, depth, dtype=torch.float64) for side in (height, width))
    sizes = {"num_heads": heads, "key_channels": heads * depth}
    q, k, v = split_heads(qkv, **sizes)
    rows, columns = (part.flatten(2, 3) for part in relative_logits(q * depth**-0.5, rel_h, rel_w))
    out = attend_decomposed(*(part.flatten(2, 3) for part in (q, k, v)), rows, columns)
    wanted = attend_2d(qkv, rel_h, rel_w, **sizes, backend="eager")
    torch.testing.assert_close(out.transpose(1, 2).flatten(2).unflatten(1, (height, width)), wanted)


def test_the_scale_is_that_of_the_depth():
    inputs = random_inputs(1, 1, 3, 2, 2, 0, 9, 4)
    torch.testing.assert_close(attend_decomposed(*inputs), eager.attend_decomposed(*inputs, scale=1 / math.sqrt(9)))


@pytest.mark.parametrize(
    ("place", "shape", "told"),
    [
        (
            0,
            (2, 7, 6),
            r"q must be \[batch, heads, queries, depth\], got shape \[2, 7, 6\]; try q.unsqueeze\(1\) for one",
        ),
        (4, (4,), r"columns must be \[batch, heads, queries, width\], got shape \[4\]$"),
        (1, (1, 2, 12, 6), r"k must have the batch and heads of q, \[2, 4\], got shape \[1, 2, 12, 6\]$"),
        (1, (1, 4, 12, 6), r"k must have the batch and heads of q, .*; try k.expand\(2, 4, -1, -1\)$"),
        (2, (2, 2, 12, 6), r"v must have the batch and heads of q, .*; try v.repeat_interleave\(2, dim=1\)$"),
        (1, (2, 4, 12, 5), "k must have the depth of q, 6, got .*; only v may have another$"),
        (1, (2, 4, 6, 12), r"k must have the depth of q, 6, got .*; try k.transpose\(2, 3\)$"),
        (2, (2, 4, 11, 6), "v must have as many keys as k, 12, got .*; a key before the map, .*, needs a value, too"),
        (3, (2, 4, 5, 3), "rows must have as many queries as q, 7, got .*; a query without a place, .*, has zeros"),
        (
            4,
            (2, 4, 7, 5),
            r"k must have the 3 x 5 = 15 keys of the map .* got 12 keys; rows and columns must be as long",
        ),
    ],
)
def test_wrong_shapes_are_named(place, shape, told):
    inputs = random_inputs(2, 4, 7, 3, 4, 0, 6, 6)
    inputs[place] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=told):
        attend_decomposed(*inputs)


def test_mixed_dtypes_devices_and_unknown_backends_are_named():
    q, k, v, rows, columns = random_inputs(1, 1, 2, 2, 2, 0, 4, 4)
    with pytest.raises(ValueError, match=r"k must have the dtype of q, torch.float64, got torch.float32"):
        attend_decomposed(q, k.float(), v, rows, columns)
    with pytest.raises(ValueError, match="columns must be on the device of q, cpu, got meta"):
        attend_decomposed(q, k, v, rows, columns.to("meta"))
    with pytest.raises(ValueError, match="backend must be one of eager, sdpa, triton or None, got backend='nope'"):
        attend_decomposed(q, k, v, rows, columns, backend="nope")
    with pytest.raises(
        ValueError, match=r"^backend must be one of eager, sdpa, triton or None, got backend=\['sdpa'\]$"
    ):
        attend_decomposed(q, k, v, rows, columns, backend=["sdpa"])
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: .*; backend=None takes the fastest that can"):
        attend_decomposed(q, k, v, rows, columns, backend="triton")


def test_half_precision_without_a_fused_kernel_is_told():
    inputs = [tensor.to(torch.complex64) for tensor in random_inputs(1, 1, 2, 2, 2, 0, 4, 4)]
    assert "float16" in sdpa.why_not_decomposed(*inputs)


@pytest.mark.parametrize(
    ("place", "given", "told"),
    [
        (3, None, "rows must be a torch.Tensor, got NoneType"),
        (0, torch.ones(1, 2, 5, 16, dtype=torch.int64), "q must be floating-point, got torch.int64; try q.float()"),
        (2, torch.empty(1, 2, 13, 8, device="meta"), "v must be on the device of q, cpu, got meta; try v.to('cpu')"),
        (1, torch.ones(1, 2, 13, 16).half(), "k must have the dtype of q, torch.float32, got torch.float16; try"),
        (0, torch.ones(1, 2, 5, 16).to(torch.float8_e5m2), "q must be bfloat16, float16, float32 or float64, got torch."
            "float8_e5m2; try q.to(torch.bfloat16)"),
        (3, torch.ones(1, 2, 5, 3).to(torch.float8_e5m2), "rows must be bfloat16, float16, float32 or float64, got"),
        (1, torch.ones(1, 2, 13, 16).int(), "k must be floating-point, got torch.int32; try k.float()"),
        (0, torch.ones(1, 2, 5, 0), "q must have a depth of at least 1, got shape [1, 2, 5, 0]"),
    ],
)  # fmt: skip
def test_what_is_no_such_tensor_is_named_with_the_way_out(place, given, told):
    shapes = (5, 16), (13, 16), (13, 8), (5, 3), (5, 4)
    inputs = [torch.randn(1, 2, *shape) for shape in shapes]
    inputs[place] = given
    with pytest.raises(ValueError, match=re.escape(told)):
        attend_decomposed(*inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in forward mode
def test_forward_mode_in_half_precision_takes_the_reference():
    """torch's fused kernel has none, on the CPU in half precision as on a GPU."""
    inputs = [torch.randn(1, 2, *shape).bfloat16() for shape in ((5, 16), (13, 16), (13, 8), (5, 3), (5, 4))]
    _, tangent = torch.func.jvp(lambda q: attend_decomposed(q, *inputs[1:]), (inputs[0],), (inputs[0],))
    assert tangent.norm() > 0
    with pytest.raises(ValueError, match="torch's fused kernels have no forward-mode derivative on cpu"):
        torch.func.jvp(lambda q: attend_decomposed(q, *inputs[1:], backend="sdpa"), (inputs[0],), (inputs[0],))


@pytest.mark.parametrize("backend", [None, "sdpa", "eager"])
@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (torch.tensor(0.5), "scale must be None or a finite number, got a Tensor; try q * scale, and scale=1.0"),
        ("0.5", "scale must be None or a finite number, got scale='0.5'"),
        ([0.5], "scale must be None or a finite number, got scale=[0.5]"),
        (math.nan, "scale must be None or a finite number, got scale=nan"),
        (-math.inf, "scale must be None or a finite number, got scale=-inf"),
        (True, "scale must be None or a finite number, got scale=True"),
        (0.5j, "scale must be None or a finite number, got scale=0.5j"),
    ],
    ids=str,
)
def test_a_scale_that_is_no_number_is_named(scale, told, backend):
    inputs = random_inputs(1, 1, 3, 2, 2, 0, 9, 4)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        attend_decomposed(*inputs, scale=scale, backend=backend)


@pytest.mark.parametrize("scale", [2, 0, -0.5, np.float32(0.25), np.int64(2)], ids=repr)
def test_a_scale_is_any_real_number(scale):
    inputs = random_inputs(1, 1, 3, 2, 2, 0, 9, 4)
    wanted = attend_decomposed(*inputs, scale=float(scale), backend="eager")
    torch.testing.assert_close(attend_decomposed(*inputs, scale=scale), wanted)


def test_compiled_code_takes_any_scale():
    """Nothing of the check compares a symbol, which would compile it again for every value."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    inputs = random_inputs(1, 1, 3, 2, 2, 0, 9, 4)
    compiled = torch.compile(attend_decomposed, fullgraph=True, dynamic=True, backend=count)
    for scale in (0.25, 0.5, 0.75):
        wanted = attend_decomposed(*inputs, scale=scale)
        torch.testing.assert_close(compiled(*inputs, scale=scale), wanted)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 5, 3, 4, 1, 6, 6),
        (1, 2, 0, 3, 4, 1, 6, 6),
        (1, 2, 5, 3, 4, 1, 6, 0),
        (1, 2, 5, 0, 4, 0, 6, 6),
        (1, 2, 5, 3, 0, 2, 6, 6),
    ],
    ids=["no images", "no queries", "no value channels", "no keys", "only leading keys"],
)
def test_where_there_is_nothing_backends_agree(shape, dtype):
    inputs = random_inputs(*shape, dtype=dtype)
    grad = torch.ones(*inputs[0].shape[:3], shape[-1], dtype=dtype)
    exact = output_and_gradients(attend_decomposed, inputs, grad, backend="eager")
    for ours, wanted in zip(output_and_gradients(attend_decomposed, inputs, grad, backend="sdpa"), exact, strict=True):
        torch.testing.assert_close(ours, wanted, atol=0.05 if dtype == torch.bfloat16 else 1e-9, rtol=1e-2)


@pytest.mark.parametrize("backend", [None, "sdpa", "eager"])
def test_rows_and_columns_may_be_float32(backend):
    q, k, v, rows, columns = random_inputs(1, 2, 5, 3, 4, 1, 6, 6, dtype=torch.bfloat16)
    biases = [bias.float().requires_grad_() for bias in (rows, columns)]
    out = attend_decomposed(q, k, v, *biases, backend=backend)
    torch.testing.assert_close(out, attend_decomposed(q, k, v, rows, columns, backend=backend))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert [bias.grad.dtype for bias in biases] == [torch.float32] * 2
