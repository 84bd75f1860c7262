"""The paper's equation in float64, pixel pair by pixel pair, independent of the package, with gradients by autograd."""

import torch
from torch import Tensor


def random_inputs(batch, height, width, *, num_heads, key_depth, value_depth, tables="shared", dtype=torch.float64):
    """qkv, rel_h, rel_w with logits of a few units, leaves that want gradients."""
    channels = num_heads * (2 * key_depth + value_depth)
    qkv = torch.randn(batch, height, width, channels, dtype=torch.float64)
    rel_h = rel_w = None
    if tables != "none":
        heads = (num_heads,) if tables == "per-head" else ()
        rel_h = torch.randn(*heads, 2 * height - 1, key_depth, dtype=torch.float64)
        rel_w = torch.randn(*heads, 2 * width - 1, key_depth, dtype=torch.float64)
    # Rounded to the dtype first: then every backend and the reference see the same numbers.
    return tuple(None if t is None else t.to(dtype).requires_grad_() for t in (qkv, rel_h, rel_w))


def direct_attention(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, num_heads: int, key_channels: int
) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv] by loops over the pixels."""
    batch, height, width, channels = qkv.shape
    depth, value_channels = key_channels // num_heads, channels - 2 * key_channels
    q = qkv[..., :key_channels].reshape(batch, height, width, num_heads, depth)
    k = qkv[..., key_channels : 2 * key_channels].reshape(batch, height, width, num_heads, depth)
    v = qkv[..., 2 * key_channels :].reshape(batch, height, width, num_heads, value_channels // num_heads)
    pixels = [(y, x) for y in range(height) for x in range(width)]
    rows = []
    for iy, ix in pixels:
        logits = []
        for jy, jx in pixels:
            key = k[:, jy, jx]
            if rel_h is not None:
                key = key + rel_h[..., jy - iy + height - 1, :] + rel_w[..., jx - ix + width - 1, :]
            logits.append((q[:, iy, ix] * key).sum(-1) / depth**0.5)
        weights = torch.softmax(torch.stack(logits, -1), -1)
        rows.append(torch.einsum("bnj,bjnd->bnd", weights, v.flatten(1, 2)))
    return torch.stack(rows, 1).reshape(batch, height, width, value_channels)


def with_gradients(function, inputs, cotangent) -> dict[str, Tensor]:
    """The output of function(*inputs) and its gradient for every input that is there, by name, in float64."""
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    out.backward(cotangent.to(out.dtype))
    results = {"output": out.detach()}
    results |= {
        f"gradient of {n}": t.grad for n, t in zip(("qkv", "rel_h", "rel_w"), inputs, strict=True) if t is not None
    }
    return {name: t.double() for name, t in results.items()}


def exact_results(inputs, cotangent, num_heads, key_channels) -> dict[str, Tensor]:
    inputs = [None if t is None else t.double() for t in inputs]
    return with_gradients(lambda *a: direct_attention(*a, num_heads, key_channels), inputs, cotangent)


def largest_error(got: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN counts as infinite."""
    return (got - exact).abs().nan_to_num(float("inf"), float("inf")).max().item() if exact.numel() else 0.0
