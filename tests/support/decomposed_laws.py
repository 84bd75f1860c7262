"""What the decomposed kernels are held to, interpreted on the CPU and compiled on a GPU alike."""

import torch

from aaconv.attention import eager, triton_decomposed_backend

GENERAL_SHAPES = [  # batch, heads, queries, height and width of the keys' map, leading keys, depth, value depth
    (1, 1, 1, 1, 1, 0, 16, 16),
    (2, 3, 7, 5, 3, 0, 8, 5),
    (1, 2, 12, 3, 4, 1, 20, 40),
    (2, 1, 5, 1, 9, 2, 80, 96),
    (1, 2, 70, 9, 7, 16, 64, 33),
    (1, 1, 9, 2, 70, 3, 48, 128),
]


def random_inputs(batch, heads, queries, height, width, leading, depth, value_depth, device="cpu"):
    """float64 q, k, v, rows, columns and a gradient of the output."""
    keys, like = leading + height * width, {"dtype": torch.float64, "device": device}
    lengths = (queries, depth), (keys, depth), (keys, value_depth), (queries, height), (queries, width)
    inputs = [torch.randn(batch, heads, *length, **like) for length in lengths]
    return [*inputs, torch.randn(batch, heads, queries, value_depth, **like)]


def output_and_gradients(attend, inputs, dtype):
    *leaves, grad = (tensor.to(dtype, copy=True) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in leaves]
    out = attend(*leaves, leaves[0].shape[3] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_as_good_as_eager(inputs, dtype, attend=triton_decomposed_backend.attend):
    """Output and all five gradients are at most twice as far from float64 as eager's in the same dtype."""
    rounded = [tensor.to(dtype).double() for tensor in inputs]
    exact = output_and_gradients(eager.attend_decomposed, rounded, torch.float64)
    ours, theirs = (output_and_gradients(one, rounded, dtype) for one in (attend, eager.attend_decomposed))
    largest = max(wanted.abs().max() for wanted in exact)  # a gradient may be zero: its rounding is that of its terms
    for name, one, other, wanted in zip(("out", "q", "k", "v", "rows", "columns"), ours, theirs, exact, strict=True):
        assert one.dtype == dtype
        allowed = 2 * (other - wanted).abs().max() + torch.finfo(dtype).eps * largest
        assert (one - wanted).abs().max() <= allowed, name
