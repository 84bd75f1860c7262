"""The kernels of local attention in triton's interpreter, against the masked reference; tests/gpu compiles them.

They run in processes that test_in_the_interpreter starts.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aaconv.attention import attend_2d, eager, triton_backend, triton_window, windows
from aaconv.attention.triton_launch import H200
from aaconv.attention.windows import make_window
from support.interpreter import run_interpreted
from support.window_laws import Case, assert_as_good_as_eager, random_case

INTERPRETED = triton_backend.INTERPRETED
PARTS = 3
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes test_in_the_interpreter starts")
pytestmark = [
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed"),
]
SMALL = Case(5, 7, make_window(3), 2, 20, 3)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@interpreted
@pytest.mark.parametrize("seed", range(20))
def test_random_windows_match_float64(seed):
    assert_as_good_as_eager(random_case(seed, most=12), torch.float32)


@interpreted
@pytest.mark.parametrize("seed", range(20, 28))
def test_half_precision_matches_float64(seed):
    assert_as_good_as_eager(random_case(seed, most=12), torch.float16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("seed", range(28, 36))
def test_bfloat16_matches_float64(seed):
    assert_as_good_as_eager(random_case(seed, most=12), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of weights that are done again
@pytest.mark.parametrize("shift", [-300, 300])
def test_bfloat16_with_logits_far_from_zero(shift):
    """A sum of the weights that is too small or too large is done again."""
    qkv, *rest = SMALL.inputs()
    qkv[..., :80] *= 0.3
    qkv[..., :40] += abs(shift) ** 0.5 * 20**-0.25
    qkv[..., 40:80] += (shift > 0 or -1) * abs(shift) ** 0.5 * 20**-0.25
    assert_as_good_as_eager(SMALL, torch.bfloat16, inputs=(qkv, *rest))


@interpreted
def test_scratch_in_chunks_changes_nothing(monkeypatch):
    case = Case(5, 6, make_window(3), 2, 4, 1, batch=3)
    inputs = case.inputs()
    whole = case.run(triton_backend.attend, inputs, torch.float32)
    monkeypatch.setattr(triton_window, "MEMORY", 0)
    monkeypatch.setattr(triton_window, "SMALL_SCRATCH", 0)
    monkeypatch.setattr(triton_backend, "plan_windows", triton_window.WindowPlan)  # not the one that is remembered
    chunked = case.run(triton_backend.attend, inputs, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(whole[:2], chunked[:2], strict=True))
    for one, other in zip(whole[2:], chunked[2:], strict=True):
        torch.testing.assert_close(one, other)


@interpreted
@pytest.mark.parametrize(
    ("tables", "programs", "launches"), [("shared", 1, 1), ("shared", 3, 2), ("per head", 4, 1), ("per head", 1, 2)]
)
def test_several_rows_of_the_map_share_a_part_of_the_tables_gradients(tables, programs, launches, monkeypatch):
    case = Case(7, 3, make_window((4, 3), (2, 1), (2, 1)), 2, 4, 1, tables)
    monkeypatch.setattr(triton_window, "gpu_at", lambda device: H200._replace(multiprocessors=programs))
    for name, value in {"TABLE_PROGRAMS": 1, "TABLE_SHARE": 0, "MEMORY": 0}.items():
        monkeypatch.setattr(triton_window, name, value)
    monkeypatch.setattr(triton_window, "SMALL_SCRATCH", 0 if launches == 2 else 2**26)
    plans = []
    monkeypatch.setattr(
        triton_backend, "plan_windows", lambda *kind: plans.append(triton_window.WindowPlan(*kind)) or plans[-1]
    )
    assert_as_good_as_eager(case, torch.float32)
    assert plans[-1].constants["MANY_ROWS"]
    assert plans[-1].table_programs == max(programs, 2 if tables == "per head" else 1)
    assert len(list(plans[-1].chunks())) == launches


@interpreted
@pytest.mark.parametrize("tables", ["shared", "per head", "none"])
def test_an_empty_batch(tables):
    case = Case(5, 7, make_window(3), 2, 20, 3, tables, batch=0)
    out, *grads = case.run(triton_backend.attend, case.inputs(), torch.float32)
    assert out.shape == (0, 5, 7, 6)
    assert all(not grad.any() for grad in grads)


@interpreted
def test_any_strides_of_the_projection():
    qkv, *tables, _ = (tensor.float() for tensor in SMALL.inputs())
    options = {"num_heads": 2, "key_channels": 40, "window": SMALL.window}
    expected = triton_backend.attend(qkv, *tables, **options)
    wider = torch.zeros(*qkv.shape[:3], qkv.shape[3] + 5)
    wider[..., 5:] = qkv
    for strided in (qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), wider[..., 5:]):
        assert strided.stride() != qkv.stride()
        assert torch.equal(triton_backend.attend(strided, *tables, **options), expected)


@interpreted
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_operator_is_registered_correctly():
    qkv, *tables, _ = (tensor.float().requires_grad_() for tensor in SMALL.inputs())
    arguments = (qkv.detach().flatten(1, 2).requires_grad_(), *tables, 5, 2, 40, list(SMALL.window.numbers))
    torch.library.opcheck(torch.ops.aaconv.attend_2d.default, arguments)


@interpreted
def test_the_operator_and_the_direct_way_to_the_kernels_agree(monkeypatch):
    inputs = SMALL.inputs()
    directly = SMALL.run(triton_backend.attend, inputs, torch.float32)
    monkeypatch.setattr(triton_backend, "someone_looks_on", lambda *tensors: True)
    dispatched = SMALL.run(triton_backend.attend, inputs, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(directly, dispatched, strict=True))


@interpreted
def test_gradients_can_be_differentiated_again():
    second = []
    for attend in (triton_backend.attend, eager.attend):
        leaves = [tensor.float().requires_grad_() for tensor in SMALL.inputs()[:3]]
        out = attend(*leaves, num_heads=2, key_channels=40, window=SMALL.window)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@interpreted
def test_operations_are_linear_in_the_pixels():
    def counted(height, width):
        qkv = torch.zeros(1, height, width, 2 * 43)
        tables = (torch.zeros(5, 20), torch.zeros(5, 20))
        with FlopCounterMode(display=False) as counter:
            triton_backend.attend(qkv, *tables, num_heads=2, key_channels=40, window=SMALL.window)
        return counter.get_total_flops()

    assert counted(5, 7) == 2 * 35 * (9 * 46 + 40 * 6)
    assert counted(10, 7) == 2 * counted(5, 7)


@interpreted
def test_what_the_kernels_cannot_take_goes_through_the_tiles(monkeypatch):
    def refuse(*inputs, **options):
        raise AssertionError("the kernels of windows were taken")

    monkeypatch.setattr(triton_backend, "forward", refuse)
    for case in (Case(40, 2, make_window((33, 1)), 1, 4, 2), Case(4, 4, make_window(3), 1, 65, 2)):
        inputs = [tensor.float() for tensor in case.inputs()[:3]]
        options = {"num_heads": 1, "key_channels": case.depth, "window": case.window}
        torch.testing.assert_close(attend_2d(*inputs, **options), eager.attend(*inputs, **options))


@pytest.mark.parametrize(("window", "shared"), [(1, 1), (7, 1), (7, 7), (8, 3), (13, 1), (13, 5), (32, 1), (32, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_holds_all_columns_that_a_tile_sees(dtype, window, shared):
    numbers = (window, window, shared, shared, 1, 1)
    sizes = 40, 2, 40, True, True, None, numbers
    plan = triton_window.WindowPlan((1, 1600, 86), (0, 86, 1), dtype, 2, dtype, *sizes)
    axis = windows.Axis(window, shared)
    for name, found in plan.cuts.items():
        assert found.tile_rows * found.tile_columns == plan.tiles[name].queries
        for length in (window + 1, 40, 57):
            assert found.key_columns <= plan.constants["LINES_W"]
            for side, most in ((found.tile_columns, found.key_columns), (found.tile_rows, plan.constants["LINES_H"])):
                for first in range(0, length, side):
                    last = min(first + side, length) - 1
                    assert axis.start(last, length) + window - axis.start(first, length) <= most


@pytest.mark.parametrize("shape", [(1, 2896, 2897, 86), (1, 1024, 2048, 1024)], ids=str)
def test_a_map_that_int32_does_not_count_is_refused(shape):
    """Inside an image kernels count in int32, with up to 2 * MOST_LINES relative logits per pixel."""
    _, height, width, channels = shape
    reason = triton_window.why_not(shape, 20, 3, SMALL.window)
    assert reason == f"a map of {height} x {width} with {channels} channels is larger than int32 counts, in windows"
    assert triton_window.why_not((1000, height, width - 2, channels), 20, 3, SMALL.window) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_window_has_more_lines_than_are_counted_with(dtype):
    largest = triton_window.MAX_WINDOW
    for window in ((largest, largest), (largest, 1), (1, largest)):
        for shared in ((1, 1), window, tuple(max(1, side - 1) for side in window)):
            sizes = 40, 2, 40, True, True, None, (*window, *shared, 1, 1)
            plan = triton_window.WindowPlan((1, 1600, 86), (0, 86, 1), dtype, 2, dtype, *sizes)
            assert max(plan.constants["LINES_H"], plan.constants["LINES_W"]) <= triton_window.MOST_LINES


def plan_of(case, backward, dtype=torch.bfloat16):
    """That of a case in bfloat16 on an H200, with an input that has no memory."""
    channels = case.heads * (2 * case.depth + case.value_depth)
    qkv = torch.empty(case.batch, case.height * case.width, channels, dtype=dtype, device="meta")
    sizes = case.height, case.heads, case.heads * case.depth, True, backward, None, case.window.numbers
    dimensions = 3 if case.tables == "per head" else 2
    return triton_window.WindowPlan(qkv.shape, qkv.stride(), dtype, dimensions, torch.float32, *sizes), qkv


def held_by(case, backward):
    """All that a call holds, in multiples of its input: with it, the tables and the gradient of the output."""
    plan, qkv = plan_of(case, backward)
    heads = (case.heads,) if case.tables == "per head" else ()
    tables = [torch.empty(*heads, 2 * side - 1, case.depth, device="meta") for side in case.window.size]
    out, lse = triton_backend._empty_forward(qkv, case.heads, case.heads * case.depth)
    tensors = [qkv, *tables, out, lse]
    tensors += [torch.empty_like(out), *triton_backend._empty_backward(qkv, *tables)] if backward else []
    held = sum(tensor.nbytes for tensor in tensors) + 4 * sum(plan.program.exact.values())
    return (held + qkv.itemsize * sum(plan.program.scratch.values())) / qkv.nbytes


@pytest.mark.parametrize("side", [56, 112])
@pytest.mark.parametrize("window", [7, 13])
@pytest.mark.parametrize(("depth", "value_depth"), [(20, 3), (32, 32)])
def test_a_call_holds_at_most_four_times_its_input(side, window, depth, value_depth):
    case = Case(side, side, make_window(window), 8, depth, value_depth, batch=32)
    assert max(held_by(case, backward) for backward in (False, True)) <= 4


ONE_IMAGE = [  # which is never cut: case, and what its backward holds
    (Case(256, 256, make_window(7), 8, 20, 3, batch=1), 4.51),
    (Case(512, 512, make_window(13), 8, 20, 3, batch=1), 4.86),
    (Case(1024, 64, make_window(32), 8, 64, 64, "per head", batch=1), 4.87),
]


@pytest.mark.parametrize(("case", "most"), ONE_IMAGE, ids=str)
def test_a_batch_of_one_holds_what_an_image_takes(case, most):
    assert held_by(case, backward=False) <= 4
    assert held_by(case, backward=True) == pytest.approx(most, abs=0.01)


TALL = [
    Case(8400, 32, make_window(32), 32, 64, 64, "per head", batch=1),
    Case(65536, 16, make_window(7), 8, 20, 3, "per head", batch=1),
    Case(1024, 64, make_window(32), 8, 64, 64, "per head", batch=1),
    Case(20000, 1, make_window((32, 1)), 1, 64, 1, batch=1),
]


@pytest.mark.parametrize("case", TALL, ids=str)
def test_parts_of_the_tables_gradients_are_a_small_share_of_a_tall_map(case):
    """A sixteenth, or one part for each of the programs that fill the GPU."""
    plan, qkv = plan_of(case, backward=True)
    programs, of_a_part = triton_window.TABLE_PROGRAMS * 132, (2 * sum(case.window.size) - 2) * case.depth
    assert plan.constants["MANY_ROWS"]
    assert programs // 2 < plan.table_programs < case.height * case.heads
    assert plan.program.exact["grad_tables"] == plan.table_programs * of_a_part
    assert 4 * plan.program.exact["grad_tables"] <= max(qkv.nbytes / 16, 4 * (programs + case.heads) * of_a_part)


@pytest.mark.parametrize("tables", ["shared", "per head"])
@pytest.mark.parametrize("side", [56, 112])
@pytest.mark.parametrize("window", [7, 13])
@pytest.mark.parametrize(("depth", "value_depth"), [(20, 3), (32, 32)])
def test_maps_that_were_measured_have_a_program_per_row(side, window, depth, value_depth, tables):
    plan, _ = plan_of(Case(side, side, make_window(window), 8, depth, value_depth, tables, batch=32), backward=True)
    heads = 8 if tables == "per head" else 1
    assert not plan.constants["MANY_ROWS"]
    assert plan.splits == 8 * 132 // (side * heads)
    assert plan.table_programs == side * heads * plan.splits


@pytest.mark.parametrize(
    ("depth", "value_depth", "row"), [(20, 3, 32), (20, 7, 32), (16, 11, 32), (40, 3, 48), (20, 8, 0), (8, 1, 0)]
)
def test_small_heads_have_keys_and_values_in_one_row(depth, value_depth, row):
    """Everything has a place of its own in it; heads that do not fit have two."""
    found = triton_window.layout(depth, value_depth, exact=False)
    assert found["JOINT"] == bool(row)
    if row:
        assert found["KEY"] + found["VALUE"] == found["KEY_STRIDE"] == found["VALUE_STRIDE"] == row
        assert found["KEY"] <= depth
        assert found["VALUE_AT"] == depth + 3 - found["KEY"]
        assert found["VALUE_AT"] + value_depth + 2 <= found["VALUE"]
    assert not triton_window.layout(depth, value_depth, exact=True)["JOINT"]
