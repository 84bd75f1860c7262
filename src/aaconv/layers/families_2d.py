"""Attention modules that are attend_2d: their packed projection is its argument as it stands."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attend_2d, attention_maps
from .accelerated import Accelerated, has_numbers, has_parts, has_tables, resized, with_own_parts
from .convolution import has_hooks
from .pointwise import project_in

SWITCHES = ("use_rel_pos", "use_relative_position_embeddings")
"""What turns relative positions on and off."""
SMALL = (2, 3)
"""The map that a module is tried on."""


class OneMap(Accelerated):
    """An attention whose queries and keys are the pixels of one map."""

    @abstractmethod
    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attend_2d takes: qkv [batch, height, width, 2*dk + dv], rel_h and rel_w."""

    @property
    def key_channels(self) -> int:
        return self.num_heads * self.depth

    @abstractmethod
    def attention_size(self, x: Tensor) -> tuple[int, int]:
        """(height, width) of the map that x is."""

    def attention_maps(self, x: Tensor) -> Tensor:
        """The weights for this input: [batch, num_heads, pixels (i), pixels (j)]."""
        return attention_maps(*self.attention_inputs(x), num_heads=self.num_heads, key_channels=self.key_channels)

    def attend(self, x: Tensor) -> Tensor:
        """The input of the module -> [batch, height, width, dv]."""
        return attend_2d(*self.attention_inputs(x), num_heads=self.num_heads, key_channels=self.key_channels)


class Packed(OneMap):
    """segment-anything, ViTDet and all that descend from them: x [batch, height, width, channels], one qkv.

    The logit is q_i . k_j / sqrt(d) + q_i . (rel_pos_h[iy - jy] + rel_pos_w[ix - jx]): tables turned around, and not
    scaled with the rest.
    """

    returned: int | None = None
    """How many things the module's own forward returns in a tuple (None: a tensor). The first is the output,"""
    returns_weights = False
    """and the second may be the attention weights, wanted or not."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
        tables = has_tables(module, "rel_pos_h", "rel_pos_w") or _switched_off(module) is not None
        return isinstance(heads, int) and has_parts(module, "qkv", "proj") and tables and not hasattr(module, "pool_q")

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        if switch := _switched_off(module):
            return f"relative positions are off: {switch}=False"
        return None

    @property
    def num_heads(self) -> int:
        return self.module.num_heads if hasattr(self.module, "num_heads") else self.module.num_attention_heads

    def takes(self, x: Tensor) -> bool:
        # Whoever watches a module that returns its weights may want them.
        return x.dim() == 4 and not (self.returns_weights and has_hooks(self.module))

    def compute(self, x: Tensor) -> Any:
        out = self.module.proj(self.attend(x))
        if hasattr(self.module, "proj_drop"):
            out = self.module.proj_drop(out)
        return out if self.returned is None else (out, *[None] * (self.returned - 1))

    def attention_size(self, x: Tensor) -> tuple[int, int]:
        return x.shape[1], x.shape[2]

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height, width = self.attention_size(x)
        qkv, (rel_h, rel_w) = self._normed(self.module.qkv(x)), self.tables()
        return qkv, self._as_ours(rel_h, height), self._as_ours(rel_w, width)

    def _as_ours(self, table: Tensor, length: int) -> Tensor:
        return resized(table, length).flip(0) * self.depth**0.5

    def _normed(self, qkv: Tensor) -> Tensor:
        """With the norms of queries and keys, where the module has some."""
        q_norm, k_norm = (getattr(self.module, name, None) or nn.Identity() for name in ("q_norm", "k_norm"))
        if isinstance(q_norm, nn.Identity) and isinstance(k_norm, nn.Identity):
            return qkv
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.depth)).unbind(-3)
        return torch.stack([q_norm(q), k_norm(k), v], dim=-3).flatten(-3)

    def dropout(self) -> float:
        for name in ("attn_drop", "dropout"):
            part = getattr(self.module, name, None)
            if isinstance(part, int | float):
                return part
            if isinstance(part, nn.Dropout):
                return part.p
        return 0.0

    def has_dropout(self) -> bool:
        part = getattr(self.module, "attn_drop", self.module)
        return self.dropout() > 0 and (self.module.training or part.training)

    def notes(self) -> list[str]:
        notes = super().notes()
        if "output_attentions" in self.names:
            notes.append("own forward with output_attentions=True")
        if self.returns_weights:
            notes.append("own forward while it has hooks, which may read the weights")
        return notes

    def note_result(self, result: Any) -> None:
        if isinstance(result, tuple):
            self.returned, self.returns_weights = len(result), any(part is not None for part in result[1:])

    def stand_ins(self) -> dict[str, nn.Module]:
        return {"qkv": nn.Identity(), "proj": nn.Identity()}

    def example(self) -> tuple[Any, ...]:
        return (torch.randn(1, *SMALL, 3 * self.num_heads * self.depth, dtype=torch.float64),)


class Bottleneck(OneMap):
    """timm's BoTNet: x [batch, channels, height, width], tables as ours, scaled with the rest or not."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        position, sizes = getattr(module, "pos_embed", None), ("num_heads", "dim_head_qk", "dim_head_v")
        tables = has_tables(position, "height_rel", "width_rel") and has_numbers(position, "height", "width")
        return tables and has_numbers(module, *sizes) and has_parts(module, "qkv", "pool")

    def takes(self, x: Tensor) -> bool:
        return x.dim() == 4 and tuple(x.shape[2:]) == (self.module.pos_embed.height, self.module.pos_embed.width)

    def compute(self, x: Tensor) -> Tensor:
        return self.module.pool(self.attend(x).permute(0, 3, 1, 2))

    def attention_size(self, x: Tensor) -> tuple[int, int]:
        return x.shape[2], x.shape[3]

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor = 1.0 if self.module.scale_pos_embed else self.depth**0.5
        rel_h, rel_w = (
            resized(table, n) * factor for table, n in zip(self.tables(), self.attention_size(x), strict=True)
        )
        return project_in(self.module.qkv, x), rel_h, rel_w

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.module.pos_embed.height_rel, self.module.pos_embed.width_rel

    def stand_ins(self) -> dict[str, nn.Module]:
        position: Any = with_own_parts(self.module.pos_embed)
        position.height, position.width = SMALL
        for name, length in zip(("height_rel", "width_rel"), SMALL, strict=True):
            setattr(position, name, nn.Parameter(torch.randn(2 * length - 1, self.depth, dtype=torch.float64)))
        return {"qkv": nn.Identity(), "pos_embed": position}

    def example(self) -> tuple[Any, ...]:
        channels = self.num_heads * (2 * self.depth + self.module.dim_head_v)
        return (torch.randn(1, channels, *SMALL, dtype=torch.float64),)


def _switched_off(module: nn.Module) -> str | None:
    """The name of the switch that is off."""
    return next((name for name in SWITCHES if getattr(module, name, None) is False), None)
