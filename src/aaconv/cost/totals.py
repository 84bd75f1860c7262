"""What a network costs on one image, as plain numbers: what counting gives, and what is kept of it."""

from dataclasses import dataclass

TOTALS = ("params", "flops", "true_flops", "map_bytes")


@dataclass(frozen=True)
class LayerCost:
    """One module's own cost, without that of the modules inside it."""

    name: str
    kind: str
    output: tuple[int, ...] | None
    params: int
    flops: int
    true_flops: int
    map_bytes: int


@dataclass(frozen=True)
class AttentionCost:
    """The attention branch of one AAConv2d: pooling, projections, tables and the attention itself, no convolution."""

    name: str
    num_heads: int
    key_channels: int
    value_channels: int
    height: int
    width: int
    params: int
    flops: int
    true_flops: int
    map_bytes: int


@dataclass(frozen=True)
class Totals:
    """What one image of `size` (height, width) costs, and the attention branches of that.

    flops: as the paper counts; true_flops: with the batched products; map_bytes: of all attention maps together, as
    training stores them; largest_map: of the layer that has most.
    """

    model: str
    size: tuple[int, int]
    params: int
    flops: int
    true_flops: int
    map_bytes: int
    largest_map: int
    attention: list[AttentionCost]

    @property
    def gflops(self) -> float:
        return self.flops / 1e9

    @property
    def true_gflops(self) -> float:
        return self.true_flops / 1e9

    def summary(self) -> dict:
        return {"model": self.model, "size": list(self.size), **{total: getattr(self, total) for total in TOTALS}}


@dataclass(frozen=True)
class Cost(Totals):
    """The same with the layers that it is the sum of."""

    layers: list[LayerCost]
