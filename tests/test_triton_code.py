"""The kernels as triton compiles them for a Hopper GPU; no GPU is needed for that."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from aaconv.attention import triton_backend  # noqa: E402

POINTERS = {"lse": "*fp32", "delta": "*fp32", "grad_scratch": "*fp32", "grad_tables": "*fp32"}


def ptx(name, shape, dtype):
    """The assembly of a kernel for [batch, height, width, heads, key depth, value depth]."""
    from aaconv.attention import triton_kernels

    batch, height, width, heads, depth, value_depth = shape
    qkv = torch.empty(batch, height, width, heads * (2 * depth + value_depth), dtype=dtype, device="meta")
    tables = torch.empty(2 * (height + width) - 2, depth, dtype=dtype, device="meta")
    problem = triton_backend._Problem(qkv, tables, heads, heads * depth)
    constants = problem.launch_constants(name)
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages", "enable_fp_fusion")}
    kernel = getattr(triton_kernels, name)
    element = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    signature = {
        argument: "constexpr" if argument in constants else POINTERS.get(argument, element)
        for argument in kernel.arg_names
    } | {"first_image_head": "i32"}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
