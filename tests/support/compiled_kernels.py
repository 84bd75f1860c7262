"""What a compiled kernel takes of a GPU, without one."""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aaconv.attention import triton_backend

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
"""Triton brings it, not on every platform."""
POINTERS = dict.fromkeys(("lse", "grad_tables", "rel_h", "rel_w"), "*fp32")


def stack_bytes(cubin, folder):
    """Bytes per thread of what has no place in registers."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(cubin)
    usage = subprocess.run([DISASSEMBLER, "-res-usage", binary], capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr)
    return int(stack)


def plan(shape, dtype, backward=True):
    """For [batch, height, width, heads, key depth, value depth]."""
    batch, height, width, heads, depth, value_depth = shape
    qkv = torch.empty(batch, height * width, heads * (2 * depth + value_depth), dtype=dtype, device="meta")
    rel_h, rel_w = (torch.empty(2 * side - 1, depth, device="meta") for side in (height, width))
    return triton_backend._prepare(qkv, rel_h, rel_w, height, heads, heads * depth, backward=backward)[0]


def code(name, shape, dtype, capability=90):
    """What triton makes of a kernel, by stage in its `asm`; for aligned pointers, as torch's are."""
    from aaconv.attention import triton_kernels, triton_small_kernels

    chosen = plan(shape, dtype, backward=name != "attend_small_forward")
    assert chosen.is_small == ("small" in name)
    kernel = getattr(triton_small_kernels if chosen.is_small else triton_kernels, name)
    constants = chosen.launch_constants(name, kernel.arg_names)
    options = {option: constants.pop(option) for option in constants.keys() - set(kernel.arg_names)}
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    signature = {
        argument: "constexpr" if argument in constants else POINTERS.get(argument, element)
        for argument in kernel.arg_names
    } | {"first_image_head": "i32"}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def accesses_of_pixels(assembly):
    """(bytes, the line that asked for them) of all that a kernel loads from or stores to pixels of `qkv`, the output
    or their gradients: what is inlined into a line that says how far these are apart."""
    folder = Path(triton_backend.__file__).parent
    files = {number: name for number, name in re.findall(r'\.file\s+(\d+) .*?(triton_\w+\.py)"', assembly)}
    found, line = [], ""
    for text in assembly.splitlines():
        if ".loc" in text:
            called = re.search(r"inlined_at (\d+) (\d+)|@\[ (triton_\w+\.py):(\d+)", text)  # triton 3.9 or 3.6
            name = called and (called[3] or files.get(called[1]))  # else triton's own library
            line = (folder / name).read_text().splitlines()[int(called[4] or called[2]) - 1].strip() if name else ""
        access = re.search(r"\b(?:ld|st)\.global[\w.]*?(?:\.v(\d))?\.b(\d+)", text)
        if access and re.search(r"_pixels\(.*(STRIDE_P|GRAD_W|HEADS \* DV|\bplace\b)", line):
            found.append((int(access[1] or 1) * int(access[2]) // 8, line))
    return found
