"""What the fused kernels are held to, interpreted on the CPU and compiled on a GPU alike."""

import torch

from aaconv.attention import eager, triton_backend


def random_inputs(batch, height, width, heads, depth, value_depth, tables="shared", seed=0, device="cpu"):
    """float64 qkv, rel_h, rel_w and a gradient of the output."""
    torch.manual_seed(seed)
    options = {"dtype": torch.float64, "device": device}
    qkv = torch.randn(batch, height, width, heads * (2 * depth + value_depth), **options)
    lead = {"shared": (), "per head": (heads,)}.get(tables)
    rel_h, rel_w = (
        None if lead is None else torch.randn(*lead, 2 * side - 1, depth, **options) for side in (height, width)
    )
    return qkv, rel_h, rel_w, torch.randn(batch, height, width, heads * value_depth, **options)


def rising_inputs(*shape, rise=40, device="cpu"):
    """As random_inputs, but the logits of the lower half of the map are some 13 * rise (in base 2) above the others."""
    qkv, rel_h, rel_w, grad = random_inputs(*shape, device=device)
    _, height, _, heads, depth, _ = shape
    qkv[..., : heads * depth] = 1 + qkv[..., : heads * depth] / 8
    keys = qkv[..., heads * depth : 2 * heads * depth]
    keys /= 8
    keys[:, : height // 2] -= rise
    keys[:, height // 2 :] += rise
    return qkv, rel_h, rel_w, grad


def output_and_gradients(attend, inputs, dtype, heads, depth):
    *leaves, grad = [None if t is None else t.to(dtype, copy=True) for t in inputs]
    leaves = [None if t is None else t.requires_grad_() for t in leaves]
    out = attend(*leaves, num_heads=heads, key_channels=heads * depth)
    out.backward(grad)
    return [out.detach()] + [t.grad for t in leaves if t is not None]


def assert_as_good_as_eager(inputs, dtype, heads, depth, attend=triton_backend.attend):
    exact = output_and_gradients(eager.attend, inputs, torch.float64, heads, depth)
    reference = output_and_gradients(eager.attend, inputs, dtype, heads, depth)
    fused = output_and_gradients(attend, inputs, dtype, heads, depth)
    largest = max(truth.abs().max() for truth in exact)  # a gradient may be zero: its rounding is that of its terms
    for name, ours, theirs, truth in zip(["out", "qkv", "rel_h", "rel_w"], fused, reference, exact, strict=False):
        assert ours.dtype == dtype
        assert ours.shape == truth.shape
        allowed = 2 * (theirs - truth).abs().max() + torch.finfo(dtype).eps * largest
        assert (ours - truth).abs().max() <= allowed, name


def assert_a_batch_is_its_images(inputs, dtype, heads, depth, parts):
    """Output and gradients of all images at once are those of parts of the batch, the tables' gradients their sum."""
    qkv, *tables, grad = inputs
    whole = output_and_gradients(triton_backend.attend, inputs, dtype, heads, depth)
    pieces = [
        output_and_gradients(triton_backend.attend, [some, *tables, of_some], dtype, heads, depth)
        for some, of_some in zip(qkv.chunk(parts), grad.chunk(parts), strict=True)
    ]
    for together, *apart in zip(whole[:2], *(piece[:2] for piece in pieces), strict=True):
        assert torch.equal(together, torch.cat(apart))
    for together, *apart in zip(whole[2:], *(piece[2:] for piece in pieces), strict=True):
        apart = torch.stack(apart).double()
        assert ((together - apart.sum(0)).abs() <= torch.finfo(dtype).eps * apart.abs().sum(0) + 1e-30).all()
