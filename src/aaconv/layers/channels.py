"""The sizes of an augmented convolution from its arguments: the one place that rounds and checks them."""

from collections.abc import Sequence
from math import floor, lcm


def attention_channels(
    out_channels: int,
    num_heads: int,
    *,
    key_ratio: float = 0.2,
    value_ratio: float = 0.1,
    min_key_channels_per_head: int = 20,
    min_value_channels_per_head: int = 0,
) -> tuple[int, int]:
    """(d_k, d_v) of a convolution with out_channels: the ratios kappa and upsilon of it, rounded down to whole heads.

    d_k = max(m N_h, N_h floor(kappa F / N_h)) with m = min_key_channels_per_head, and d_v alike with its own minimum.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got num_heads={num_heads}")
    if out_channels < 1:
        raise ValueError(f"out_channels must be at least 1, got out_channels={out_channels}")
    for name, ratio in (("key_ratio", key_ratio), ("value_ratio", value_ratio)):
        if not ratio >= 0:
            raise ValueError(f"{name} must not be negative, got {name}={ratio}")

    def whole_heads(ratio: float, minimum: int) -> int:
        # 0.29 * 100 is 28.999999999999996 in binary: the small term undoes that, and no ratio is meant that finely.
        return num_heads * max(minimum, floor(ratio * out_channels / num_heads + 1e-9))

    return whole_heads(key_ratio, min_key_channels_per_head), whole_heads(value_ratio, min_value_channels_per_head)


def resolve_channels(
    out_channels: int,
    num_heads: int,
    key_channels: int | None,
    value_channels: int | None,
    key_ratio: float | None,
    value_ratio: float | None,
    min_key_channels_per_head: int,
    min_value_channels_per_head: int,
) -> tuple[int, int]:
    """(key_channels, value_channels), checked: given as such, or ratios (None: the default) rounded."""
    rounded = attention_channels(
        out_channels,
        num_heads,
        key_ratio=0.2 if key_ratio is None else key_ratio,
        value_ratio=0.1 if value_ratio is None else value_ratio,
        min_key_channels_per_head=min_key_channels_per_head,
        min_value_channels_per_head=min_value_channels_per_head,
    )
    given = (("key", key_channels, key_ratio, rounded[0]), ("value", value_channels, value_ratio, rounded[1]))
    for name, channels, ratio, from_ratio in given:
        if channels is not None and ratio is not None and channels != from_ratio:
            raise ValueError(
                f"{name}_channels={channels} contradicts {name}_ratio={ratio}, which gives {from_ratio} of "
                f"out_channels={out_channels}; pass only one of them"
            )
    key_channels, value_channels = (rounded if channels is None else channels for _, channels, _, rounded in given)
    for name, channels in (("key", key_channels), ("value", value_channels)):
        if channels % num_heads:
            raise ValueError(
                f"{name}_channels must be divisible by num_heads, got {name}_channels={channels}, "
                f"num_heads={num_heads}; try {channels + -channels % num_heads}"
            )
        if channels < 1:
            raise ValueError(
                f"the attention branch would be empty: {name}_channels={channels} (out_channels={out_channels}, "
                f"num_heads={num_heads}); try {name}_channels={num_heads}, fewer heads, "
                f"or min_{name}_channels_per_head=1"
            )
    if value_channels > out_channels:
        way_out = (
            f"at most value_channels={out_channels - out_channels % num_heads}"
            if num_heads <= out_channels
            else f"at most num_heads={out_channels}"
        )
        raise ValueError(
            f"value_channels={value_channels} is more than out_channels={out_channels}: attention replaces part of the "
            f"convolution's output; {way_out}"
        )
    return key_channels, value_channels


def check_groups(out_channels: int, value_channels: int, num_heads: int, groups: int) -> None:
    """The channels left to the convolution divide into its groups."""
    if groups < 1 or out_channels % groups:
        raise ValueError(f"groups must divide out_channels, got groups={groups}, out_channels={out_channels}")
    if (out_channels - value_channels) % groups:
        raise ValueError(
            f"the {out_channels - value_channels} channels left to the convolution (out_channels={out_channels} less "
            f"value_channels={value_channels}) must be divisible by groups={groups}; "
            f"try value_channels={lcm(num_heads, groups)}"
        )


def in_each_dimension(name: str, value: int | Sequence[int], dimensions: int, least: int) -> tuple[int, ...]:
    """An argument that is one int for all dimensions or one for each, as a tuple."""
    values = (value,) * dimensions if isinstance(value, int) else value
    if not isinstance(values, Sequence) or len(values) != dimensions or min(values) < least:
        wanted = "an int" if dimensions == 1 else f"an int or {dimensions} of them"
        raise ValueError(f"{name} must be {wanted}, at least {least}, got {name}={value!r}")
    return tuple(values)
