"""The kernels for heads of many channels and for biases of two parts, in triton's interpreter; tests/gpu compiles them.

They run in processes that test_in_the_interpreter starts.
"""

import pytest
import torch

from aaconv.attention import (
    attend_2d,
    attend_decomposed,
    triton_backend,
    triton_decomposed,
    triton_decomposed_backend,
    triton_wide,
)
from aaconv.attention.triton_plan import is_wide
from support import decomposed_laws, fused_laws
from support.decomposed_laws import GENERAL_SHAPES
from support.interpreter import run_interpreted

INTERPRETED = triton_backend.INTERPRETED
PARTS = 3
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes test_in_the_interpreter starts")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers", "small_tiles"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]
WIDE_SHAPES = [  # batch, height, width, heads, key depth, value depth
    (1, 5, 7, 2, 64, 40),
    (2, 14, 14, 2, 80, 24),
    (1, 6, 33, 1, 64, 80),
    (2, 3, 64, 1, 64, 64),
    (1, 4, 70, 1, 96, 48),
    (1, 20, 9, 4, 128, 16),
    (2, 3, 5, 3, 112, 33),  # these two: heads whose depth is not a multiple of 16
    (1, 4, 3, 2, 65, 72),
]


@pytest.fixture
def small_tiles(monkeypatch):
    """The interpreter takes as long for a tile that is half empty."""
    made = triton_decomposed.Decomposed.__init__

    def make(plan, *sizes):
        made(plan, *sizes)
        plan.tiles = {name: triton_decomposed.Tile(16, 32, 4, 2) for name in plan.tiles}

    monkeypatch.setattr(triton_decomposed.Decomposed, "__init__", make)
    monkeypatch.setattr(triton_decomposed, "plan_decomposed", triton_decomposed.Decomposed)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@interpreted
@pytest.mark.parametrize("tables", ["shared", "per head"])
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
def test_wide_heads_match_float64(shape, tables):
    assert is_wide(*shape[4:], torch.float16, True)
    fused_laws.assert_as_good_as_eager(fused_laws.random_inputs(*shape, tables), torch.float16, shape[3], shape[4])


@interpreted
@pytest.mark.parametrize("tables", ["shared", "per head"])
@pytest.mark.parametrize("shape", [(2, 5, 7, 2, 64, 40), (1, 3, 70, 1, 65, 48), (2, 1, 1, 3, 64, 64)], ids=str)
def test_tables_whose_gradients_do_not_fit_a_program(shape, tables, monkeypatch):
    monkeypatch.setattr(triton_decomposed, "MOST_SUMS", 0)
    monkeypatch.setattr(triton_decomposed, "plan_relative", triton_decomposed.Relative)
    fused_laws.assert_as_good_as_eager(fused_laws.random_inputs(*shape, tables), torch.float16, shape[3], shape[4])


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_wide_heads_in_bfloat16(monkeypatch):
    fused_laws.assert_as_good_as_eager(fused_laws.random_inputs(1, 5, 9, 2, 64, 40), torch.bfloat16, 2, 64)


@interpreted
def test_images_in_chunks_change_nothing(monkeypatch):
    inputs = fused_laws.random_inputs(3, 4, 5, 2, 64, 40)
    whole = fused_laws.output_and_gradients(triton_backend.attend, inputs, torch.float16, 2, 64)
    monkeypatch.setattr(triton_wide, "SCRATCH", 0)
    monkeypatch.setattr(triton_wide, "SMALL_SCRATCH", 0)
    parts = fused_laws.output_and_gradients(triton_backend.attend, inputs, torch.float16, 2, 64)
    for one, other in zip(whole[:2], parts[:2], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole[2:], parts[2:], strict=True):  # sums over the images, in another order
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize("shape", GENERAL_SHAPES, ids=str)
def test_the_general_form_matches_float64(shape):
    decomposed_laws.assert_as_good_as_eager(decomposed_laws.random_inputs(*shape), torch.float16)


@interpreted
def test_biases_of_another_dtype_and_any_strides():
    q, k, v, rows, columns, grad = decomposed_laws.random_inputs(1, 2, 6, 3, 4, 0, 16, 16)
    half = [tensor.half() for tensor in (q, k, v)]
    straight = attend_decomposed(*half, rows.float(), columns.float(), backend="triton")
    turned = [tensor.mT.contiguous().mT for tensor in half]
    assert torch.equal(attend_decomposed(*turned, rows.float(), columns.float(), backend="triton"), straight)
    leaves = rows.float().requires_grad_(), columns.float().requires_grad_()
    attend_decomposed(*half, *leaves, backend="triton").backward(grad.half())
    assert [leaf.grad.dtype for leaf in leaves] == [torch.float32, torch.float32]


@interpreted
def test_windows():
    """A bias that leaves no weight is finite, also where a whole tile of keys is out of sight."""
    qkv, tables = torch.randn(1, 9, 12, 2 * 48).half(), [torch.randn(9, 16).half() for _ in range(2)]
    sizes = {"num_heads": 2, "key_channels": 32, "window": 5, "window_stride": 2}
    found, wanted = (attend_2d(qkv, *tables, **sizes, backend=name) for name in ("triton", "eager"))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_the_operator_is_registered_correctly():
    *inputs, _ = decomposed_laws.random_inputs(1, 2, 5, 2, 3, 1, 16, 16)
    inputs = [tensor.half().requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.aaconv.attend_decomposed, (*inputs, 0.25), rtol=1e-2, atol=1e-2)


@interpreted
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in forward mode
def test_transforms_of_torch_func_take_another_backend():
    """They refuse our operator, or take its tangent for zero; sdpa and eager have all of them."""
    *inputs, _ = decomposed_laws.random_inputs(1, 2, 5, 2, 3, 1, 16, 16)
    q, *rest = (tensor.half() for tensor in inputs)

    def total(q, backend=None):
        return attend_decomposed(q, *rest, backend=backend).float().square().sum()

    leaf = q.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(q), leaf.grad, rtol=1e-2, atol=1e-2)
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.unpack_dual(total(torch.autograd.forward_ad.make_dual(q, q))).tangent
    torch.testing.assert_close(tangent, (leaf.grad.float() * q.float()).sum(), rtol=2e-2, atol=1e-1)
    with pytest.raises(ValueError, match=r"transforms of torch.func .* do not go through the kernels; backend=None"):
        torch.func.grad(lambda q: total(q, "triton"))(q)


@interpreted
def test_gradients_of_the_general_form_can_be_differentiated_again():
    *inputs, _ = decomposed_laws.random_inputs(1, 1, 4, 2, 2, 0, 16, 16)
    leaves = [tensor.half().requires_grad_() for tensor in inputs]
    first = torch.autograd.grad(attend_decomposed(*leaves, backend="triton").sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)
    assert all(one.isfinite().all() for one in second)


def test_dtypes_do_not_share_compiled_kernels(monkeypatch):
    """A plan keeps its kernels, which are compiled for the dtypes of their tensors."""
    monkeypatch.undo()  # the small tiles, which are planned anew for every call
    q, k, v, *_ = decomposed_laws.random_inputs(1, 1, 4, 2, 2, 0, 16, 16)
    halves = [triton_decomposed.plan_of(q.to(one), k, v, 2, 2, 0.25) for one in (torch.float16, torch.bfloat16)]
    assert halves[0] is not halves[1]
    assert halves[0] is triton_decomposed.plan_of(q.half(), k, v, 2, 2, 0.25)
    tables = torch.float32, torch.bfloat16
    plans = {
        id(triton_decomposed.plan_relative(tuple(q.shape), 2, 2, False, dtype, of_tables, None))
        for dtype in (torch.float16, torch.bfloat16)
        for of_tables in tables
    }
    assert len(plans) == 4


@pytest.mark.parametrize(
    ("depth", "parts"),
    [(1, (16, 0)), (16, (16, 0)), (20, (32, 0)), (40, (32, 16)), (64, (64, 0)), (80, (64, 16)), (96, (64, 32))],
)
def test_a_depth_in_two_parts(depth, parts):
    assert triton_decomposed.depth_parts(depth) == parts
    assert sum(parts) >= depth


@pytest.mark.parametrize(("width", "columns"), [(7, 16), (14, 16), (20, 32), (28, 32), (40, 16), (64, 64), (128, 64)])
def test_strips_of_keys_are_narrow_where_wide_ones_would_be_empty(width, columns):
    assert triton_decomposed.key_columns(width) == columns


def test_why_not_names_the_value():
    q, k, v, rows, columns, _ = (tensor.half() for tensor in decomposed_laws.random_inputs(1, 1, 2, 2, 2, 0, 16, 16))
    told = triton_decomposed_backend.why_not(q, k, v, rows, columns)
    assert told is None if INTERPRETED else "device cpu is not cuda" in told


@interpreted
@pytest.mark.parametrize(
    ("height", "width", "leading", "value_depth", "reason"),
    [
        (3, 4, 1, 0, "values without channels"),
        (0, 4, 0, 8, "a map of 0 x 4 has no keys"),
        (3, 0, 2, 8, "a map of 3 x 0 has no keys"),
    ],
)
def test_where_there_is_nothing_to_read_others_compute(height, width, leading, value_depth, reason):
    keys = leading + height * width
    shapes = (5, 16), (keys, 16), (keys, value_depth), (5, height), (5, width)
    inputs = [torch.randn(1, 2, *shape).half().requires_grad_() for shape in shapes]
    out = attend_decomposed(*inputs)
    out.sum().backward()
    torch.testing.assert_close(out, attend_decomposed(*inputs, backend="eager"), atol=2e-3, rtol=2e-3)
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
    with pytest.raises(ValueError, match=f"backend='triton' cannot run: {reason}; backend=None takes"):
        attend_decomposed(*inputs, backend="triton")


@interpreted
def test_a_scale_that_is_no_number_is_named():
    inputs = [torch.randn(1, 2, *shape).half() for shape in ((5, 16), (12, 16), (12, 8), (5, 3), (5, 4))]
    for scale in (torch.tensor(0.5), "0.5"):
        with pytest.raises(ValueError, match="scale must be None or a finite number"):
            attend_decomposed(*inputs, scale=scale, backend="triton")
