"""The decomposed kernels as triton compiles them for GPUs that are not here."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from aaconv.attention import triton_decomposed  # noqa: E402

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have on an A100, on cards such as the L4 and the 4090, and on an H100 or H200."""
FLOATS = ("lse", "delta")
KERNELS = [
    "attend_decomposed_forward",
    "attend_decomposed_backward_queries",
    "attend_decomposed_backward_keys",
]
SHAPES = [(64, 64, 64), (80, 64, 64), (128, 14, 14)]  # depth, height, width: SAM-B, SAM-H, BoTNet


def compiled(name, shape, capability, leading=0):
    depth, height, width = shape
    few = SHARED_MEMORY[capability] < 2**17
    sizes = (1, 1, height * width, depth), depth, height, width, leading, 0.1, torch.bfloat16
    launcher = triton_decomposed.Decomposed(*sizes, small_cache=few)._launcher(name)
    kernel = launcher.kernel
    constants = {key: value for key, value in launcher.constants.items() if key in kernel.arg_names}
    options = {key: value for key, value in launcher.constants.items() if key not in kernel.arg_names}
    scalars = re.compile(r"\w+_[bhn]|heads|queries|height|width|of_a_strip")

    def kind(argument):
        if argument in constants or argument == "scale":
            return "constexpr" if argument in constants else "fp32"
        if scalars.fullmatch(argument):
            return "i32"
        return "*fp32" if argument in FLOATS else "*bf16"

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_fits_the_gpu(name, shape, capability):
    code = compiled(name, shape, capability)
    assert code.metadata.shared <= SHARED_MEMORY[capability]
    assert ("wgmma" in code.asm["ptx"]) == (capability == 90)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("depth", [64, 80])
@pytest.mark.parametrize("name", KERNELS)
def test_leading_keys_compile(name, depth):
    """The interpreter does not mind a variable whose shape a loop changes."""
    assert compiled(name, (depth, 14, 14), 90, leading=1).metadata.shared <= SHARED_MEMORY[90]


def test_no_tile_has_one_stage():
    """With a depth in two parts, triton 3.6 then reads beyond its shared memory."""
    for depth, height, width in SHAPES:
        for few in (True, False):
            sizes = (1, 1, height * width, depth), depth, height, width, 0, 0.1, torch.bfloat16
            assert min(tile.stages for tile in triton_decomposed.Decomposed(*sizes, few).tiles.values()) > 1
