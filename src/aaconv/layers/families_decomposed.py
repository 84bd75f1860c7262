"""Attention modules whose queries and keys are of different maps, through attend_decomposed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attend_decomposed
from .accelerated import Accelerated, has_numbers, has_parts, has_tables


class Halo(Accelerated):
    """timm's HaloNet: the queries of a block, the keys of the block and its surroundings.

    x [batch, channels, height, width]. The logit is q_i . k_j / sqrt(d) + q_i . (height_rel[jy - iy] + width_rel[jx -
    ix]), where j counts from the corner of the window and i from that of the block; positions scaled, too, or not.
    """

    operator = "attend_decomposed"

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        tables = has_tables(getattr(module, "pos_embed", None), "height_rel", "width_rel")
        sizes = "num_heads", "dim_head_qk", "dim_head_v", "block_size", "block_size_ds", "block_stride", "halo_size"
        return tables and has_numbers(module, *sizes, "win_size") and has_parts(module, "q", "kv", "pool")

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.module.pos_embed.height_rel, self.module.pos_embed.width_rel

    def takes(self, x: Tensor) -> bool:
        return x.dim() == 4 and all(length % self.module.block_size == 0 for length in x.shape[2:])

    def compute(self, x: Tensor) -> Tensor:
        module, side = self.module, self.module.block_size_ds
        blocks = [length // module.block_size for length in x.shape[2:]]
        out = attend_decomposed(*self.attention_inputs(x), scale=module.scale)
        # [batch * heads, blocks, queries, depth] -> [batch, channels, height, width]
        out = out.unflatten(2, (side, side)).unflatten(1, blocks).permute(0, 5, 1, 3, 2, 4)
        return module.pool(out.reshape(len(x), -1, blocks[0] * side, blocks[1] * side))

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, rows and columns as attend_decomposed takes them: [batch * heads, blocks, ...]."""
        module, side = self.module, self.module.block_size_ds
        q = self._in_blocks(module.q(x), [length // module.block_size for length in x.shape[2:]])
        k, v = self._in_windows(module.kv(x)).split([self.depth, module.dim_head_v], dim=-1)
        distance = torch.arange(module.win_size, device=x.device) - torch.arange(side, device=x.device)[:, None]
        index = distance + module.win_size - 1
        rows, columns = relative_logits(q, (side, side), *(table[index] for table in self.tables()))
        if module.scale_pos_embed:
            rows, columns = rows * module.scale, columns * module.scale
        return q, k, v, rows, columns

    def _in_blocks(self, q: Tensor, blocks: list[int]) -> Tensor:
        """[batch, channels, height, width] -> [batch * heads, blocks, queries of one, depth]."""
        side = self.module.block_size_ds
        q = q.reshape(-1, self.depth, blocks[0], side, blocks[1], side)
        return q.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)

    def _in_windows(self, kv: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch * heads, blocks, keys of one, both depths]; beyond the edge are
        zeros, which take part."""
        module, halo = self.module, self.module.halo_size
        windows = F.pad(kv, [halo, halo, halo, halo])
        for axis in (2, 3):
            windows = windows.unfold(axis, module.win_size, module.block_size)
        windows = windows.reshape(-1, self.depth + module.dim_head_v, *windows.shape[2:])
        return windows.permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(1, 2)

    def stand_ins(self) -> dict[str, nn.Module]:
        module, heads = self.module, self.num_heads
        both = heads * (self.depth + module.dim_head_v)
        q = nn.Conv2d(4, heads * self.depth, 1, module.block_stride, dtype=torch.float64)
        return {"q": q, "kv": nn.Conv2d(4, both, 1, dtype=torch.float64)}

    def example(self) -> tuple[Any, ...]:
        side = self.module.block_size
        return (torch.randn(1, 4, side, 2 * side, dtype=torch.float64),)


class MultiScale(Accelerated):
    """timm's MViTv2: queries and keys are pooled, each in its own way; a class token, if there is one, has no place.

    x [batch, pixels, channels] and the size of its map -> the output and the size of the pooled queries.
    """

    operator = "attend_decomposed"
    inputs = 2

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        switches = all(hasattr(module, name) for name in ("has_cls_token", "residual_pooling", "pool_q", "pool_k"))
        tables = has_tables(module, "rel_pos_h", "rel_pos_w")
        return switches and tables and has_numbers(module, "num_heads", "dim_out") and has_parts(module, "qkv", "proj")

    def compute(self, x: Tensor, feat_size: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        q, k, v, q_size, k_size = self._projected(x, feat_size)
        out = attend_decomposed(*self._operands(q, k, v, q_size, k_size), scale=self.module.scale)
        if self.module.residual_pooling:
            out = out + q
        return self.module.proj(out.transpose(1, 2).flatten(2)), q_size

    def attention_inputs(
        self, x: Tensor, feat_size: Sequence[int]
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Sequence[int], Sequence[int]]:
        """q, k, v, rows and columns as attend_decomposed takes them, and the sizes of the maps of queries and keys."""
        q, k, v, q_size, k_size = self._projected(x, feat_size)
        return self._operands(q, k, v, q_size, k_size), q_size, k_size

    def _projected(
        self, x: Tensor, feat_size: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]]:
        """q, k and v, pooled, and the sizes of the maps of queries and keys."""
        module = self.module
        q, k, v = module.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, q_size = self._pooled(q, module.pool_q, module.norm_q, feat_size)
        k, k_size = self._pooled(k, module.pool_k, module.norm_k, feat_size)
        v, _ = self._pooled(v, module.pool_v, module.norm_v, feat_size)
        return q, k, v, q_size, k_size

    def _operands(
        self, q: Tensor, k: Tensor, v: Tensor, q_size: Sequence[int], k_size: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (part.to(_dtype_of_products(part)) for part in (q, k, v))
        token = int(self.module.has_cls_token)
        index = (_distances(*lengths, q.device) for lengths in zip(q_size, k_size, strict=True))
        by_place = (table[distances] for table, distances in zip(self.tables(), index, strict=True))
        bias = relative_logits(q[:, :, token:], q_size, *by_place)
        rows, columns = (F.pad(part, (0, 0, token, 0)) for part in bias)
        return q, k, v, rows, columns

    def _pooled(
        self, part: Tensor, pool: nn.Module | None, norm: nn.Module | None, size: Sequence[int]
    ) -> tuple[Tensor, Sequence[int]]:
        """[batch, heads, pixels, depth] after pooling and norm, with the size of its map."""
        if pool is not None:
            token, pixels = part.split([n := int(self.module.has_cls_token), part.shape[2] - n], dim=2)
            pooled = pool(pixels.reshape(-1, *size, pixels.shape[-1]).permute(0, 3, 1, 2).contiguous())
            size = [*pooled.shape[2:]]
            pixels = pooled.flatten(2).transpose(1, 2).unflatten(0, (-1, self.num_heads))
            part = torch.cat([token, pixels], dim=2) if n else pixels
        return (part if norm is None else norm(part)), size

    def stand_ins(self) -> dict[str, nn.Module]:
        return {"qkv": nn.Identity(), "proj": nn.Identity()}

    def example(self) -> tuple[Any, ...]:
        known = (self.tables()[0].shape[0] + 1) // 2
        size = [min(known, 4), min(known, 6)]
        pixels = size[0] * size[1] + int(self.module.has_cls_token)
        return torch.randn(1, pixels, 3 * self.module.dim_out, dtype=torch.float64), size


def relative_logits(q: Tensor, size: Sequence[int], by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
    """What queries of a map [batch, heads, queries, depth] give to the rows and to the columns of keys.

    by_row [query rows, key rows, depth] -> [batch, heads, queries, key rows]; columns alike.
    """
    q = q.unflatten(2, tuple(size))
    rows = torch.einsum("bnyxd,yvd->bnyxv", q, by_row.to(q.dtype))
    columns = torch.einsum("bnyxd,xud->bnyxu", q, by_column.to(q.dtype))
    return rows.flatten(2, 3), columns.flatten(2, 3)


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Rows of MViTv2's table for every query and key of an axis: distances in steps of the finer map."""
    query_step, key_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    place = torch.arange(queries, device=device)[:, None] * query_step
    return (place - torch.arange(keys, device=device) * key_step + (keys - 1) * key_step).long()


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """What autocast would compute a product of x in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
