"""The fused kernels against float64, in triton's interpreter: no GPU needed, small maps only.

They run in processes that test_in_the_interpreter starts. tests/gpu/test_triton_gpu.py holds the compiled kernels to
the same laws. Here they are the packed ones; test_triton_small has those that small maps take in half precision.
"""

from copy import deepcopy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from aaconv.attention import default_backend, eager, triton_backend, triton_plan, triton_tiles
from aaconv.models import create_model
from support.fused_laws import (
    assert_a_batch_is_its_images,
    assert_as_good_as_eager,
    output_and_gradients,
    random_inputs,
    rising_inputs,
)
from support.interpreter import run_interpreted

INTERPRETED = triton_backend.INTERPRETED
PARTS = 6
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes test_in_the_interpreter starts")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers", "packed_kernels"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]

SHAPES = [  # batch, height, width, heads, key depth, value depth
    (1, 1, 1, 1, 20, 1),
    (2, 1, 5, 2, 20, 3),
    (1, 6, 1, 2, 4, 1),
    (2, 3, 5, 2, 20, 6),
    (1, 7, 7, 3, 20, 6),
    (1, 5, 11, 1, 1, 20),
    (1, 9, 8, 2, 20, 1),
    (1, 14, 14, 1, 20, 3),
    (1, 3, 40, 1, 20, 2),
    (1, 17, 3, 1, 32, 32),
    (2, 5, 7, 2, 20, 15),  # values without room for ones beside them
    (1, 2, 3, 2, 61, 2),
    (1, 2, 3, 2, 120, 2),
    (1, 9, 10, 1, 100, 2),  # more relative vectors than are done at a time
]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_match_float64(shape):
    assert_as_good_as_eager(random_inputs(*shape), torch.float32, shape[3], shape[4])


@interpreted
@pytest.mark.parametrize("tables", ["per head", "none"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 2, 20, 6), (1, 7, 7, 3, 20, 6)], ids=str)
def test_tables_per_head_or_none(shape, tables):
    assert_as_good_as_eager(random_inputs(*shape, tables), torch.float32, shape[3], shape[4])


@interpreted
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 2, 20, 3), (2, 8, 8, 2, 20, 8), (1, 8, 9, 1, 20, 16), (1, 3, 5, 2, 53, 2)], ids=str
)
def test_half_precision_matches_float64(shape):
    assert_as_good_as_eager(random_inputs(*shape), torch.float16, shape[3], shape[4])


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("tables", ["shared", "per head", "none"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 2, 20, 3), (1, 7, 8, 8, 20, 6), (1, 8, 9, 1, 20, 16), (1, 3, 17, 3, 12, 2)], ids=str
)
def test_bfloat16_matches_float64(shape, tables):
    assert_as_good_as_eager(random_inputs(*shape, tables), torch.bfloat16, shape[3], shape[4])


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of weights that are done again
@pytest.mark.parametrize("shift", [-300, -60, -40, 40, 60, 300])
def test_bfloat16_with_logits_far_from_zero(shift):
    """A sum of the weights that is too small or too large is done again."""
    qkv, *rest = random_inputs(1, 5, 6, 2, 20, 3)
    qkv[..., :80] *= 0.3
    qkv[..., :40] += abs(shift) ** 0.5 * 20**-0.25
    qkv[..., 40:80] += (shift > 0 or -1) * abs(shift) ** 0.5 * 20**-0.25
    assert_as_good_as_eager((qkv, *rest), torch.bfloat16, 2, 20)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_gradients_of_a_whole_network_in_bfloat16_are_as_near_to_float64_as_eagers(monkeypatch):
    """Errors of the layers could add up where eager's cancel; the parameters after training are what they meet."""
    monkeypatch.setattr(triton_backend, "why_not", lambda *_, **__: None)  # the interpreter was taught bfloat16
    torch.manual_seed(0)
    network = create_model("aa_wrn16_4", pretrained=True, num_classes=100).eval()
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([3, 71])

    def gradients(backend, dtype):
        copy = deepcopy(network).to(torch.float64 if dtype is torch.float64 else torch.float32)
        with default_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            output = copy(images.to(next(copy.parameters()).dtype))
        torch.nn.functional.cross_entropy(output.double(), labels).backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in copy.parameters()])

    exact = gradients("eager", torch.float64)
    fused, eagers = (gradients(backend, torch.bfloat16) for backend in ("triton", "eager"))
    assert (fused - exact).norm() < 1.2 * (eagers - exact).norm()
    assert (fused - exact).norm() < 0.2 * exact.norm()


@interpreted
@pytest.mark.parametrize("layout", ["channels_first", "sliced", "expanded"])
def test_any_strides_of_the_projection(layout):
    batch, height, width, heads, depth, value_depth = 2, 2, 5, 1, 20, 3
    qkv, rel_h, rel_w, _ = (t.float() for t in random_inputs(batch, height, width, heads, depth, value_depth))
    if layout == "channels_first":
        strided = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    elif layout == "sliced":
        strided = torch.zeros(batch, height + 1, width + 2, qkv.shape[3] + 3)[:, 1:, 2:, 3:]
        strided.copy_(qkv)
    else:
        qkv = qkv[:1].expand(batch, -1, -1, -1).contiguous()
        strided = qkv[:1].expand(batch, -1, -1, -1)
    assert strided.stride() != qkv.stride()
    sizes = {"num_heads": heads, "key_channels": heads * depth}
    expected = triton_backend.attend(qkv, rel_h, rel_w, **sizes)
    assert torch.equal(triton_backend.attend(strided, rel_h, rel_w, **sizes), expected)
    leaf = strided.detach().requires_grad_()
    triton_backend.attend(leaf, rel_h, rel_w, **sizes).square().sum().backward()
    dense = qkv.clone().requires_grad_()
    triton_backend.attend(dense, rel_h, rel_w, **sizes).square().sum().backward()
    assert torch.equal(leaf.grad, dense.grad)


@interpreted
def test_float32_tables_with_a_half_precision_projection():
    inputs = random_inputs(1, 3, 4, 2, 20, 3)
    qkv, rel_h, rel_w, grad = inputs[0].half(), inputs[1].float(), inputs[2].float(), inputs[3].half()
    rel_h.requires_grad_()
    triton_backend.attend(qkv, rel_h, rel_w, num_heads=2, key_channels=40).backward(grad)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 2, 20)[2]
    assert rel_h.grad.dtype == torch.float32
    torch.testing.assert_close(rel_h.grad.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # slots beyond the map's edge may overflow: they are not stored
def test_large_logits_stay_finite():
    """Logits of thousands: the log-sum-exp is then good to some 1e-4, and so are the weights remade from it."""
    qkv, rel_h, rel_w, grad = random_inputs(1, 3, 5, 1, 20, 3)
    inputs = (qkv * torch.tensor([30.0] * 40 + [1.0] * 3, dtype=torch.float64), rel_h * 30, rel_w * 30, grad)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 1, 20)
    fused = output_and_gradients(triton_backend.attend, inputs, torch.float32, 1, 20)
    for ours, truth in zip(fused, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=1e-3)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first attempt overflows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_may_rise_far_above_those_of_the_first_keys(dtype):
    assert_as_good_as_eager(rising_inputs(1, 9, 8, 1, 20, 3), dtype, 1, 20)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first attempt overflows
@pytest.mark.parametrize("value_depth", [3, 16])  # with and without ones beside the values
def test_weights_may_overflow_float16_but_not_float32(value_depth):
    assert_as_good_as_eager(rising_inputs(1, 9, 4, 1, 20, value_depth, rise=2), torch.float16, 1, 20)


@interpreted
def test_float32_loses_no_digit_where_the_largest_logit_comes_late():
    """25 powers of two above the first ones: to take off those and no more would leave numbers with fewer places."""
    inputs = rising_inputs(1, 6, 5, 1, 20, 3, rise=2)
    ways = [(eager, torch.float64), (eager, torch.float32), (triton_backend, torch.float32)]
    exact, reference, fused = (output_and_gradients(way.attend, inputs, dtype, 1, 20) for way, dtype in ways)
    for ours, theirs, truth in zip(fused, reference, exact, strict=True):
        assert (ours - truth).abs().max() <= (theirs - truth).abs().max()


@interpreted
def test_small_weights_count_beside_a_large_one_in_half_precision():
    """The first key has nearly all of the weight; the others, 2**-17 of it each, are a tenth of a percent together."""
    qkv, rel_h, rel_w, grad = random_inputs(1, 12, 12, 1, 20, 1)
    qkv[..., :40] = 0
    qkv[..., :20] = 1
    qkv[0, 0, 0, 20:40] = 17 * 0.6931 / 20**0.5
    qkv[..., 40] = 3
    qkv[0, 0, 0, 40] = 0
    inputs = (qkv, rel_h * 0, rel_w * 0, grad)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, 1, 20)[0]
    assert exact.min() > 2e-3
    fused = output_and_gradients(triton_backend.attend, inputs, torch.float16, 1, 20)[0]
    torch.testing.assert_close(fused.double(), exact, rtol=0.02, atol=0)


@interpreted
def test_scratch_in_chunks_changes_nothing(monkeypatch):
    inputs = random_inputs(2, 5, 6, 2, 4, 1)
    whole = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 4)
    monkeypatch.setattr(triton_plan, "SCRATCH", 0)
    monkeypatch.setattr(triton_plan, "SMALL_SCRATCH", 0)
    monkeypatch.setattr(triton_backend, "plan_for", triton_plan.Plan)  # not the one that is remembered
    chunked = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of weights that are done again
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_packed_together(heads, dtype):
    inputs = random_inputs(2, 3, 2, heads, 4, 3)
    exact = output_and_gradients(eager.attend, inputs, torch.float64, heads, 4)
    fused = output_and_gradients(triton_backend.attend, inputs, dtype, heads, 4)
    for one, other in zip(fused, exact, strict=True):
        assert (one.double() - other).norm() <= (1e-6 if dtype == torch.float32 else 3e-3) * other.norm()


@interpreted
@pytest.mark.parametrize(("height", "width"), [(3, 17), (12, 12)])
def test_rows_of_keys_packed_together(height, width, monkeypatch):
    inputs = random_inputs(2, height, width, 2, 20, 3)
    one_by_one = output_and_gradients(triton_backend.attend, inputs, torch.float16, 2, 20)
    monkeypatch.setitem(triton_tiles.TILES, "pack", lambda of: triton_tiles.Tile(64, 0, 1, 1))
    plans = []
    monkeypatch.setattr(triton_backend, "plan_for", lambda *kind: plans.append(triton_plan.Plan(*kind)) or plans[-1])
    together = output_and_gradients(triton_backend.attend, inputs, torch.float16, 2, 20)
    assert [plan.key_lines for plan in plans] == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, together, strict=True))


@interpreted
@pytest.mark.parametrize("tables", ["shared", "per head"])
def test_tables_gradients_summed_in_two_steps(tables, monkeypatch):
    inputs = random_inputs(6, 2, 3, 2, 4, 1, tables)
    at_once = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 4)
    monkeypatch.setattr(triton_plan, "SUMMED_AT_ONCE", 3)
    monkeypatch.setattr(triton_backend, "plan_for", triton_plan.Plan)
    for one, other in zip(
        at_once, output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 4), strict=True
    ):
        torch.testing.assert_close(one, other)


@interpreted
@pytest.mark.parametrize(
    ("outer", "rows", "numbers"), [(1, 0, 5), (1, 1, 129), (3, 33, 20), (2, 64, 128), (1, 255, 300)]
)
def test_rows_are_summed(outer, rows, numbers):
    one = triton_plan.Sum(outer, rows, numbers)
    parts, sums = torch.randn(outer, rows, numbers), torch.full((outer, numbers), torch.nan)
    [step] = triton_plan.sum_steps([one])
    step.launcher([parts, sums], step.scalars)
    torch.testing.assert_close(sums.double(), parts.double().sum(1), rtol=0, atol=1e-5)


@interpreted
def test_a_batch_is_its_images():
    assert_a_batch_is_its_images(random_inputs(6, 5, 9, 2, 20, 3), torch.float16, 2, 20, parts=3)


@interpreted
def test_an_empty_batch():
    inputs = random_inputs(0, 3, 4, 2, 20, 3)
    out, grad_qkv, grad_h, grad_w = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 20)
    assert out.shape == (0, 3, 4, 6)
    assert grad_qkv.shape == (0, 3, 4, 86)
    assert not grad_h.any()
    assert not grad_w.any()


@interpreted
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("tables", ["shared", "per head", "none"])
def test_operator_is_registered_correctly(tables):
    qkv, rel_h, rel_w, _ = random_inputs(1, 2, 3, 2, 20, 3, tables)
    tables = [None if table is None else table.float().requires_grad_() for table in (rel_h, rel_w)]
    arguments = (qkv.float().flatten(1, 2).requires_grad_(), *tables, 2, 2, 40)
    torch.library.opcheck(torch.ops.aaconv.attend_2d.default, arguments)


@interpreted
@pytest.mark.parametrize("tables", ["shared", "per head", "none"])
def test_the_operator_and_the_direct_way_to_the_kernels_agree(tables, monkeypatch):
    inputs = random_inputs(2, 3, 5, 2, 20, 6, tables)
    directly = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 20)
    monkeypatch.setattr(triton_backend, "someone_looks_on", lambda *tensors: True)
    dispatched = output_and_gradients(triton_backend.attend, inputs, torch.float32, 2, 20)
    assert all(torch.equal(one, other) for one, other in zip(directly, dispatched, strict=True))


@interpreted
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("tables", ["shared", "none"])
def test_gradients_can_be_differentiated_again(tables, dispatched, monkeypatch):
    monkeypatch.setattr(triton_backend, "someone_looks_on", lambda *tensors: dispatched)
    inputs = [t for t in random_inputs(1, 3, 4, 2, 5, 3, tables)[:3] if t is not None]
    second = []
    for attend in (triton_backend.attend, eager.attend):
        leaves = [t.float().requires_grad_() for t in inputs]
        out = attend(*(leaves if len(leaves) == 3 else (leaves[0], None, None)), num_heads=2, key_channels=10)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@interpreted
def test_compiles_in_one_graph():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(qkv, rel_h, rel_w, *, num_heads, key_channels):
        assert triton_backend.why_not(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels) is None
        return triton_backend.attend(qkv * 1.0, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels) * 1.0

    assert_as_good_as_eager(random_inputs(1, 3, 5, 2, 20, 3), torch.float32, 2, 20, attend=compiled)


@interpreted
def test_exports():
    class Attention(torch.nn.Module):
        def forward(self, qkv, rel_h, rel_w):
            return triton_backend.attend(qkv, rel_h, rel_w, num_heads=2, key_channels=40)

    arguments = tuple(t.float() for t in random_inputs(1, 3, 4, 2, 20, 3)[:3])
    program = torch.export.export(Attention(), arguments)
    assert torch.equal(program.module()(*arguments), Attention()(*arguments))


@pytest.mark.parametrize("recorded", [True, False])
def test_compilers_see_operators_that_need_no_python_for_autograd(recorded):
    """attend_2d is implemented in Python for autograd; what a compiled graph calls again and again is not."""
    qkv = torch.empty(1, 3, 4, 86, device="meta")

    def attend(qkv):
        return triton_backend.attend(qkv, None, None, num_heads=2, key_channels=40)

    def gradient(qkv):
        return torch.autograd.grad(attend(qkv).sum(), qkv)

    traced = make_fx(gradient if recorded else attend)(qkv.requires_grad_(recorded))
    called = [str(node.target) for node in traced.graph.nodes if "aaconv" in str(node.target)]
    assert called == ["aaconv.attend_2d_forward.default", *["aaconv.attend_2d_backward.default"] * recorded]
    for name in called:
        operator = name.removesuffix(".default").replace(".", "::")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutogradCUDA")


def test_why_not_names_the_value(monkeypatch):
    def reason(shape, dtype=torch.float32, heads=2, key_channels=40):
        qkv = torch.empty(shape, dtype=dtype)
        return triton_backend.why_not(qkv, None, None, num_heads=heads, key_channels=key_channels)

    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    assert "device cpu" in reason((1, 3, 3, 86))
    monkeypatch.setattr(triton_backend, "INTERPRETED", True)
    assert "float64" in reason((1, 3, 3, 86), torch.float64)
    assert "bfloat16" in reason((1, 3, 3, 86), torch.bfloat16)
    assert "160 channels" in reason((1, 3, 3, 650), key_channels=320)
    assert "3 x 200" in reason((1, 3, 200, 86))
    assert "shared memory" in reason((1, 40, 8, 602), key_channels=200)
    assert reason((1, 32, 32, 602), key_channels=200) is None
    assert reason((1, 3, 3, 86)) is None


def test_flops_are_those_of_the_definition():
    """On the meta device: two products of a map's pixels with themselves, and the relative logits."""
    batch, height, width, heads, depth, value_depth = 2, 3, 5, 2, 20, 3
    qkv = torch.empty(batch, height, width, heads * (2 * depth + value_depth), device="meta", requires_grad=True)
    tables = [torch.empty(2 * side - 1, depth, device="meta") for side in (height, width)]
    with FlopCounterMode(display=False) as counter:
        out = triton_backend.attend(qkv, *tables, num_heads=heads, key_channels=heads * depth)
    pixels = height * width
    products = 2 * batch * heads * pixels * pixels * (depth + value_depth)
    relative = 2 * batch * heads * pixels * (height + width) * depth
    assert counter.get_total_flops() == products + relative
    assert out.shape == (batch, height, width, heads * value_depth)
    assert out.is_contiguous()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (products + relative)
