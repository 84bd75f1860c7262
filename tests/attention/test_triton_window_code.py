"""The kernels of local attention as triton compiles them for GPUs that are not here."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from aaconv.attention.triton_window import OPTIONS, WindowPlan  # noqa: E402
from support.compiled_kernels import DISASSEMBLER, stack_bytes  # noqa: E402

SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on cards such as the L4 and the 4090, which have the least."""
KERNELS = ["window_pack", "window_forward", "window_backward_queries", "window_backward_keys", "window_backward_tables"]
FLOATS = ("lse", "delta", "grad_tables", "rel_h", "rel_w")
SIZES = ("first_image_head", "height", "width", "image_heads", "chunk", "splits")
STACK = {  # depth of keys and of values, window
    (20, 3, 13): {"window_backward_tables": 336},
    (32, 32, 7): {"window_forward": 96, "window_backward_keys": 32, "window_backward_tables": 16},
    (64, 64, 32): {
        "window_pack": 416,
        "window_forward": 1728,
        "window_backward_queries": 384,
        "window_backward_keys": 720,
        "window_backward_tables": 7200,
    },
}
"""Most bytes a thread that wait in memory, on any GPU: what triton 3.9 needs and up to 24 more, and none where nothing
is said. The tables' kernel has one warp for the sums of both tables, which for the largest heads and windows alone are
more than its 255 registers a thread."""
SHAPES = list(STACK)


def compiled(name, shape, capability, **changed):
    depth, value_depth, window = shape
    channels, numbers = 8 * (2 * depth + value_depth), (window, window, 1, 1, 1, 1)
    sizes = 56, 8, 8 * depth, True, True, None, numbers
    plan = WindowPlan((2, 56 * 56, channels), (0, channels, 1), torch.bfloat16, 2, torch.float32, *sizes)
    launcher = plan._launcher(name, 16)
    kernel, constants = launcher.kernel, launcher.constants | changed

    def kind(argument):
        if argument in constants:
            return "constexpr"
        if argument in SIZES:
            return "i32"
        return "*fp32" if argument in FLOATS else "*bf16"

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): constants[key] for key in kernel.arg_names if key in constants}
    aligned = {(place,): [["tt.divisibility", 16]] for place, of in enumerate(signature.values()) if of[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {option: constants[option] for option in OPTIONS if option in constants}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_fits_the_gpu(name, shape, capability, tmp_path):
    code = compiled(name, shape, capability)
    assert code.metadata.shared <= SHARED_MEMORY
    assert "wgmma" not in code.asm["ptx"]  # which reads beyond operands as small as these
    if DISASSEMBLER.exists():
        assert stack_bytes(code.asm["cubin"], tmp_path) <= STACK[shape].get(name, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_keys_are_copied_sixteen_bytes_at_a_time():
    """What the steps read, asynchronously: smaller pieces would be loaded one by one."""
    for name in ("window_forward", "window_backward_queries", "window_backward_keys"):
        ptx = compiled(name, (20, 3, 13), 90).asm["ptx"]
        assert ptx.count("cp.async.cg.shared.global") > 0
        assert ptx.count("cp.async.ca.shared.global") == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_rows_of_a_map_fit_the_gpu_too(shape, tmp_path):
    code = compiled("window_backward_tables", shape, 89, MANY_ROWS=True)
    assert code.metadata.shared <= SHARED_MEMORY
    assert "wgmma" not in code.asm["ptx"]
    assert "atom" not in code.asm["ptx"]
    if DISASSEMBLER.exists():
        assert stack_bytes(code.asm["cubin"], tmp_path) <= STACK[shape]["window_backward_tables"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("many_rows", [False, True])
def test_parts_of_the_tables_gradients_are_counted_in_int64(many_rows):
    """A tall map whose 32 heads have tables of their own would have more than 2**31 elements of them."""
    code = compiled("window_backward_tables", (64, 64, 32), 90, MANY_ROWS=many_rows, TABLES_PER_HEAD=True)
    assert re.findall(r"tt.addptr %grad_tables, \S+ : !tt.ptr<f32>, (\w+)", code.asm["ttir"]) == ["i64"]
