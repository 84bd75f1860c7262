"""Run every fused kernel forward and backward on a few odd shapes, for compute-sanitizer:

    PYTHONPATH=src compute-sanitizer --tool memcheck --error-exitcode 1 python3 tools/run_kernels.py
    PYTHONPATH=src compute-sanitizer --tool racecheck --error-exitcode 1 python3 tools/run_kernels.py

Without it the kernels are compiled and held against the reference, which takes a minute or two the first time: do that
before, so that the tools do not wait for compilers. PYTORCH_NO_CUDA_MEMORY_CACHING=1 lets memcheck see the end of every
tensor, not only that of torch's pools.
"""

import argparse

import torch

from aaconv.attention import attend_2d, attend_decomposed
from aaconv.attention.windows import make_window

PACKED = [  # batch, height, width, heads, depth of keys and of values
    (2, 14, 14, 8, 20, 3),
    (1, 7, 9, 2, 20, 3),
    (1, 33, 5, 1, 12, 6),
]
WIDE = [
    (1, 14, 14, 2, 64, 64),
    (1, 5, 33, 2, 80, 80),
    (1, 20, 3, 1, 112, 33),
    (1, 3, 70, 1, 65, 128),  # tables whose gradients torch sums
]
GENERAL = [  # batch, heads, queries, height and width of the keys' map, keys before it, depth of keys and of values
    (1, 2, 70, 9, 7, 1, 64, 64),
    (1, 1, 9, 2, 70, 3, 48, 128),
    (2, 1, 5, 4, 9, 16, 33, 40),
]
WINDOWS = [  # as PACKED, and windows
    (2, 14, 14, 8, 20, 3, make_window(7)),
    (1, 17, 9, 2, 33, 8, make_window((8, 5), (4, 1), (1, 2))),
    (1, 33, 20, 1, 64, 64, make_window((32, 5))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda; cpu needs TRITON_INTERPRET=1")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    device = torch.device((chosen := parser.parse_args()).device)
    dtypes = [getattr(torch, name) for name in chosen.dtypes]
    torch.manual_seed(0)
    for shape in PACKED:
        for dtype in dtypes:
            run(shape, dtype, packed_inputs(shape, dtype, device), attend_packed(shape))
    halves = [dtype for dtype in dtypes if dtype != torch.float32]
    for shape in WIDE:
        for dtype in halves:
            run(shape, dtype, packed_inputs(shape, dtype, device), attend_packed(shape))
    for shape in GENERAL:
        for dtype in halves:
            run(shape, dtype, general_inputs(shape, dtype, device), attend_decomposed)
    for *shape, window in WINDOWS:
        for dtype in dtypes:
            run(shape, dtype, packed_inputs(shape, dtype, device, window), attend_packed(shape, window))


def packed_inputs(shape, dtype, device, window=None):
    batch, height, width, heads, depth, value_depth = shape
    qkv = torch.randn(batch, height, width, heads * (2 * depth + value_depth), dtype=dtype, device=device)
    sides = (height, width) if window is None else window.size
    return qkv, *(torch.randn(2 * side - 1, depth, dtype=dtype, device=device) for side in sides)


def attend_packed(shape, window=None):
    sizes = {"num_heads": shape[3], "key_channels": shape[3] * shape[4], "window": window}
    return lambda *inputs, backend: attend_2d(*inputs, **sizes, backend=backend)


def general_inputs(shape, dtype, device):
    batch, heads, queries, height, width, leading, depth, value_depth = shape
    keys = leading + height * width
    sizes = (queries, depth), (keys, depth), (keys, value_depth), (queries, height), (queries, width)
    return [torch.randn(batch, heads, *size, dtype=dtype, device=device) for size in sizes]


def run(shape, dtype, inputs, attend) -> None:
    """Forward and backward by the kernels, and how far from the reference in float64."""
    found = [tensor.double().cpu() for tensor in output_and_gradients(inputs, attend, "triton")]
    wanted = output_and_gradients([tensor.double().cpu() for tensor in inputs], attend, "eager")
    errors = [((one - other).norm() / (other.norm() + 1e-9)).item() for one, other in zip(found, wanted, strict=True)]
    allowed = {torch.bfloat16: 0.02, torch.float16: 0.003}.get(dtype, 1e-4)
    print(f"{attend_name(inputs)} {shape} {dtype}: relative error {max(errors):.1e}", flush=True)
    if not max(errors) <= allowed:
        raise SystemExit(f"more than {allowed}: output and gradients {errors}")


def output_and_gradients(inputs, attend, backend):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*leaves, backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def attend_name(inputs) -> str:
    return "attend_2d" if len(inputs) == 3 else "attend_decomposed"


if __name__ == "__main__":
    main()
