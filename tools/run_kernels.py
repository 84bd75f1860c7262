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
from aaconv.attention.triton_backend import why_not_here
from aaconv.attention.windows import make_window
from aaconv.layers.kept_weights import kept_weights
from aaconv.layers.pooling import average, resize
from aaconv.layers.resampling import can_resample

PACKED = [  # batch, height, width, heads, depth of keys and of values
    (2, 14, 14, 8, 20, 3),
    (1, 7, 9, 2, 20, 3),
    (1, 33, 5, 1, 12, 6),
]
SMALL = [  # so many heads that an H200's backward is that of small maps, too
    (17, 7, 9, 8, 20, 6),
    (17, 14, 14, 8, 20, 3),
    (9, 16, 11, 16, 24, 14),
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


MAPS = [(2, 24, 9, 7), (1, 136, 14, 14)]  # batch, channels, height and width
WEIGHTS = [(24, 40, 3, 1), (7, 61, 1, 5)]  # input and output channels, side of the convolution, channels of the values
ATTEND_2D = {"packed": PACKED, "small": SMALL, "wide": WIDE}
FAMILIES = ("packed", "small", "wide", "general", "windows", "maps", "weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda; cpu needs TRITON_INTERPRET=1")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--only", nargs="+", choices=FAMILIES, default=FAMILIES, help="families of kernels; default: all"
    )
    chosen = parser.parse_args()
    torch.manual_seed(0)
    for name in chosen.dtypes:
        for family in chosen.only:
            run_family(family, getattr(torch, name), torch.device(chosen.device))


def run_family(family, dtype, device) -> None:
    if family in ("wide", "general") and dtype == torch.float32:
        return  # float32 is not among what they take
    if family in ATTEND_2D:
        for shape in ATTEND_2D[family]:
            run(shape, packed_inputs(shape, dtype, device), attend_packed(shape))
    elif family == "general":
        for shape in GENERAL:
            run(shape, general_inputs(shape, dtype, device), attend_decomposed)
    elif family == "windows":
        for *shape, window in WINDOWS:
            run(shape, packed_inputs(shape, dtype, device, window), attend_packed(shape, window))
    elif family == "maps":
        for shape in MAPS:
            x = torch.randn(shape, dtype=dtype, device=device).to(memory_format=torch.channels_last)
            size = 2 * shape[2] + 1, 2 * shape[3]
            check_kernels_run(family, x, can_resample(x) and can_resample(x, size))
            run(shape, [x], lambda x, backend: average(x, (3, 3), (2, 2)))
            run(shape, [x], lambda x, backend, size=size: resize(x, size))
    else:
        for shape in WEIGHTS:
            copy_weights(shape, dtype, device)


def check_kernels_run(family, like, taken=True) -> None:
    """The functions of layers would leave it to torch, and say nothing."""
    reason = why_not_here(like) or (None if taken else "torch would do it")
    if reason is not None:
        raise SystemExit(f"--only {family}: no kernel takes {like.dtype} on {like.device}: {reason}")


def copy_weights(shape, dtype, device) -> None:
    """The three weights of a layer from float32, as a layer without gradients casts them."""
    channels, out_channels, side, value_channels = shape
    sizes = (out_channels, channels, side), (3 * value_channels, channels, 1), (value_channels, value_channels, 1)
    conv, *projections = (torch.randn(*size, size[-1], device=device) for size in sizes)
    check_kernels_run("weights", conv.to(dtype))
    weights = conv.to(memory_format=torch.channels_last), *projections
    kept = kept_weights(torch.nn.Module(), weights, value_channels, dtype)
    if kept is None:
        raise SystemExit(f"--only weights: no kernel takes weights of {shape}")
    found = kept.conv[:out_channels], kept.qkv.t(), kept.project.t()
    same = all(
        torch.equal(one.flatten(1), other.flatten(1).to(dtype)) for one, other in zip(found, weights, strict=True)
    )
    print(f"weights {shape} {dtype}: {'the same' if same else 'others'}", flush=True)
    if not same or kept.conv[out_channels:].any():
        raise SystemExit("weights differ from what torch casts them to")


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


def run(shape, inputs, attend) -> None:
    """Forward and backward by the kernels, and how far from the reference in float64, on the CPU."""
    dtype = inputs[0].dtype
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
    return {1: "map", 3: "attend_2d"}.get(len(inputs), "attend_decomposed")


if __name__ == "__main__":
    main()
