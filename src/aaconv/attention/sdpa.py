"""The same equation through one call of torch's fused scaled_dot_product_attention: exact, on every device.

A query is extended by its relative logits, one for each row and one for each column of the map; a key is extended by
the one-hot of its row and of its column. Their inner product is q.k plus exactly the two relative logits, so the fused
kernel needs no bias and nothing of size (HW) x (HW) is ever stored, forward or backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .heads import join_heads, relative_logits, split_heads
from .torch_state import is_forward_mode

QUERIES_AT_ONCE = 256
WEIGHTS_AT_ONCE = {"one thread": 2**18, "several": 2**22}
"""Most that the backward on the CPU takes of a head, and holds: few enough for the cache of one thread. Several threads
wait for each other after every product, and spin as they do: on busy cores 640 small products took nine times the CPU
time of 40 large ones."""


def why_not(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int
) -> str | None:
    """The call itself accepts whatever torch does; only a dtype without a fused kernel is refused."""
    if qkv.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"sdpa computes in float16, bfloat16, float32 or float64, got {qkv.dtype}"
    if qkv.dtype == torch.float64 and qkv.is_cuda:
        return "no fused float64 kernel on CUDA, it would store the maps; use backend='eager' or float32"
    if is_forward_mode() and not _has_own_derivatives(qkv):
        return f"torch's fused kernels have no forward-mode derivative on {qkv.device.type} in {qkv.dtype}"
    return None


def attend(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    height, width = qkv.shape[1:3]
    q, k, v = split_heads(qkv, num_heads, key_channels)
    q = q * q.shape[-1] ** -0.5
    places = torch.empty(height * width, 0, dtype=q.dtype, device=q.device)
    if rel_h is not None and rel_w is not None:
        q = torch.cat([q, *(part.to(q.dtype) for part in relative_logits(q, rel_h, rel_w))], dim=-1)
        places = _rows_and_columns(height, width, k)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    return join_heads(_attend_by_place(q, k, v, places), height, width)


def why_not_decomposed(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> str | None:
    """As why_not."""
    return why_not(q, None, None, num_heads=1, key_channels=1)


def attend_decomposed(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """[batch, heads, queries, depth] ... -> [batch, heads, queries, value depth]; keys before the map have no place."""
    height, width = rows.shape[3], columns.shape[3]
    places = _rows_and_columns(height, width, k)
    if leading := k.shape[2] - height * width:
        places = torch.cat([places.new_zeros(leading, height + width), places])
    return _attend_by_place(torch.cat([q * scale, rows.to(q.dtype), columns.to(q.dtype)], dim=-1), k, v, places)


def _attend_by_place(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
    call = _WithBlockedBackward.apply if _has_own_derivatives(q) else _attend_extended
    return call(q, k, v, places)


def _attend_extended(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
    """Extended queries q [batch, heads, queries, ...], keys k and values v [batch, heads, keys, ...], one-hot places
    [keys, height + width]."""
    value_depth = v.shape[-1]
    k = _extend(k, places)
    # The fused kernels want one depth for q, k and v (CPU), a multiple of 8 (CUDA): zeros change no product.
    depth = max(q.shape[-1], value_depth)
    if q.is_cuda:
        depth += -depth % 8
    q, k, v = (_widen(part, depth) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., :value_depth]


class _WithBlockedBackward(torch.autograd.Function):
    """_attend_extended with derivatives of its own, for the CPU.

    torch's CPU kernel pads the few value channels to the depth of the extended keys, and in the backward three of five
    products are then almost all zeros. Making the weights again, some queries at a time, is faster and needs less. It
    also has neither a second derivative nor one in forward mode: those take the weights of all queries at once.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        # As a view it would keep its padding, and its tangent would have another layout.
        return _attend_extended(q, k, v, places).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        *parts, places = inputs  # which are the same for all
        merged = (
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(parts, in_dims, strict=False)
        )
        return _WithBlockedBackward.apply(*merged, places).unflatten(0, (info.batch_size, -1)), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        q, k, v, places = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in zip((q, k, v), tangents[:3], strict=True))
        keys, weights = _keys_and_weights(q, k, places)
        dlogits = dq @ keys.transpose(-1, -2) + q[..., : k.shape[-1]] @ dk.transpose(-1, -2)
        return _through_softmax(weights, dlogits) @ v + weights @ dv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, places, out = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to have one itself
            return *_differentiable_backward(q, k, v, places, grad), None
        shapes = [part.shape for part in (q, k, v)]
        q, k, v, out, grad = (part.flatten(0, 1) for part in (q, k, v, out, grad))
        queries, pixels, plain_q = q.shape[1], k.shape[1], q[..., : k.shape[-1]].contiguous()
        offset = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        at_once = max(1, min(QUERIES_AT_ONCE, queries))
        threads = torch.get_num_threads()
        room = WEIGHTS_AT_ONCE["one thread" if threads == 1 else "several"]
        heads_at_once = max(1, min(len(q), max(threads, room // (at_once * max(1, pixels)))))
        # Written again and again: fresh memory for every block would cost as much as the products.
        buffers = q.new_empty(2, heads_at_once, at_once, pixels)
        for first in range(0, len(q), heads_at_once):
            heads = slice(first, first + heads_at_once)
            keys, values = _extend(k[heads], places), v[heads].transpose(1, 2)
            for start in range(0, queries, at_once):
                rows = (heads, slice(start, start + at_once))
                weights, dlogits = buffers[:, : len(keys), : q[rows].shape[1]]
                torch.softmax(torch.bmm(q[rows], keys.transpose(1, 2), out=weights), -1, out=weights)
                dv[heads].baddbmm_(weights.transpose(1, 2), grad[rows])
                torch.baddbmm(offset[rows], grad[rows], values, beta=-1, out=dlogits).mul_(weights)
                dq[rows] = torch.bmm(dlogits, keys)
                dk[heads].baddbmm_(dlogits.transpose(1, 2), plain_q[rows])
        return *(part.view(shape) for part, shape in zip((dq, dk, dv), shapes, strict=True)), None


def _differentiable_backward(q: Tensor, k: Tensor, v: Tensor, places: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k and v by torch's operators, nothing in place."""
    keys, weights = _keys_and_weights(q, k, places)
    dlogits = _through_softmax(weights, grad @ v.transpose(-1, -2))
    return dlogits @ keys, dlogits.transpose(-1, -2) @ q[..., : k.shape[-1]], weights.transpose(-1, -2) @ grad


def _keys_and_weights(q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    keys = _extend(k, places)
    return keys, (q @ keys.transpose(-1, -2)).softmax(-1)


def _through_softmax(weights: Tensor, change: Tensor) -> Tensor:
    """The derivative of the softmax along a change of its argument, or of its result: it is symmetric."""
    return weights * (change - (weights * change).sum(-1, keepdim=True))


def _has_own_derivatives(q: Tensor) -> bool:
    """A compiler would unroll the blocks, and torch.jit.trace cannot write such a function down."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and not traced


def _extend(k: Tensor, places: Tensor) -> Tensor:
    """Keys [..., pixels, depth] with the one-hot places of their pixels."""
    return torch.cat([k, places.expand(*k.shape[:-2], -1, -1)], dim=-1)


def _widen(part: Tensor, depth: int) -> Tensor:
    """Zeros up to the depth. By cat: the backward of F.pad gives a compiled graph strides it does not expect."""
    if part.shape[-1] == depth:
        return part
    return torch.cat([part, part.new_zeros(*part.shape[:-1], depth - part.shape[-1])], dim=-1)


def _rows_and_columns(height: int, width: int, like: Tensor) -> Tensor:
    """One-hot of the row beside one-hot of the column of every pixel: [height * width, height + width]."""
    rows = torch.eye(height, dtype=like.dtype, device=like.device)[:, None, :].expand(height, width, height)
    columns = torch.eye(width, dtype=like.dtype, device=like.device)[None, :, :].expand(height, width, width)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)
