"""The decomposed kernels as triton compiles them for GPUs that are not here."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from aaconv.attention import triton_decomposed, triton_relative_kernels  # noqa: E402
from aaconv.attention.triton_launch import H200, Gpu  # noqa: E402
from support.compiled_kernels import DISASSEMBLER, stack_bytes  # noqa: E402

GPUS = {80: Gpu(8, 0, 163 * 1024, 108), 89: Gpu(8, 9, 99 * 1024, 128), 90: H200}
"""An A100, cards with 99 KiB of shared memory such as the L4 and the 4090, and an H100 or H200."""
FLOATS = ("lse", "delta", "rel_h", "rel_w", "part_h", "part_w")
SIZES = ("heads", "queries", "height", "width", "of_a_strip", "groups", "splits")
STRIDES = re.compile(r"(?!rel_|part_)\w+_[bhn]")
KERNELS = [
    "attend_decomposed_forward",
    "attend_decomposed_backward_queries",
    "attend_decomposed_backward_keys",
]
SHAPES = [(64, 64, 64), (80, 64, 64), (64, 14, 14), (128, 14, 14)]  # depth, height, width of SAM and BoTNet


def compiled(name, shape, capability, leading=0):
    depth, height, width = shape
    sizes = (1, 1, height * width, depth), depth, height, width, leading, 0.1, torch.bfloat16
    launcher = triton_decomposed.Decomposed(*sizes, GPUS[capability])._launcher(name)
    return compiled_kernel(launcher.kernel, launcher.constants, capability)


def compiled_kernel(kernel, constants, capability):
    options = {key: value for key, value in constants.items() if key not in kernel.arg_names}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}

    def kind(argument):
        if argument in constants or argument == "scale":
            return "constexpr" if argument in constants else "fp32"
        if argument in FLOATS:
            return "*fp32"
        return "i32" if STRIDES.fullmatch(argument) or argument in SIZES else "*bf16"

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    # As in a call: addresses and strides are multiples of 16. Without knowing that triton copies nothing ahead, and the
    # kernel has a third of its shared memory.
    known = [name for name in kernel.arg_names if signature[name][0] == "*" or STRIDES.fullmatch(name)]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in known}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def relative_constants(shape, monkeypatch):
    """Of the kernels that make relative logits and their gradients, by name."""
    depth, height, width = shape
    q = torch.empty(1, 2, height * width, depth, dtype=torch.bfloat16, device="meta")
    tables = [torch.empty(2 * side - 1, depth, device="meta") for side in (height, width)]
    plan, found = triton_decomposed.Relative(q.shape, height, width, False, q.dtype, torch.float32, None), {}
    monkeypatch.setattr(plan, "_launch", lambda name, programs, constants, *_: found.update({name: constants}))
    plan.gradients(q, *tables, *plan.logits(q, *tables, 0.1), q, 0.1)
    return {name: plan.parts | constants for name, constants in found.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_fits_the_gpu(name, shape, capability, tmp_path):
    """Of the registers' 1020 bytes a thread, some values may wait in memory."""
    code = compiled(name, shape, capability)
    assert code.metadata.shared <= GPUS[capability].shared_memory
    assert ("wgmma" in code.asm["ptx"]) == (capability == 90)
    assert "cp.async" in code.asm["ptx"]  # tiles are copied ahead: without, the kernel measured here is another one
    if DISASSEMBLER.exists():
        assert stack_bytes(code.asm["cubin"], tmp_path) <= 128


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("shape", "capability"),
    [
        ((64, 64, 64), 90),
        ((80, 64, 64), 90),
        ((128, 64, 64), 90),
        ((112, 128, 3), 90),
        ((128, 14, 14), 89),
        ((96, 28, 28), 89),
        ((96, 28, 28), 80),
    ],
    ids=str,
)
def test_relative_logits_fit_the_gpu(shape, capability, monkeypatch, tmp_path):
    """The largest that are summed by a program."""
    monkeypatch.setattr(triton_decomposed, "gpu_at", lambda index: GPUS[capability])
    found = relative_constants(shape, monkeypatch)
    for name in ("relative_logits", "relative_logits_backward"):
        kernel = getattr(triton_relative_kernels, name)
        chosen = {key: value for key, value in found[name].items() if key in (*kernel.arg_names, "num_warps")}
        code = compiled_kernel(kernel, chosen, capability)
        assert code.metadata.shared <= GPUS[capability].shared_memory
        if DISASSEMBLER.exists():
            assert stack_bytes(code.asm["cubin"], tmp_path) <= 480


@pytest.mark.parametrize(
    ("shape", "capability", "fits"),
    [
        ((64, 64, 64), 90, True),
        ((128, 64, 64), 90, True),
        ((128, 128, 64), 90, False),
        ((64, 14, 128), 90, False),
        ((128, 128, 128), 90, False),
        ((64, 64, 64), 89, False),
        ((64, 14, 14), 89, True),
    ],
    ids=str,
)
def test_tables_whose_gradients_no_program_can_hold_are_summed_by_torch(shape, capability, fits, monkeypatch):
    monkeypatch.setattr(triton_decomposed, "gpu_at", lambda index: GPUS[capability])
    assert ("relative_logits_backward" in relative_constants(shape, monkeypatch)) == fits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("depth", [64, 80])
@pytest.mark.parametrize("name", KERNELS)
def test_leading_keys_compile(name, depth):
    """The interpreter does not mind a variable whose shape a loop changes."""
    assert compiled(name, (depth, 14, 14), 90, leading=1).metadata.shared <= H200.shared_memory


def test_no_tile_has_one_stage():
    """With a depth in two parts, triton 3.6 then reads beyond its shared memory."""
    for depth, height, width in SHAPES:
        for gpu in GPUS.values():
            sizes = (1, 1, height * width, depth), depth, height, width, 0, 0.1, torch.bfloat16
            assert min(tile.stages for tile in triton_decomposed.Decomposed(*sizes, gpu).tiles.values()) > 1
