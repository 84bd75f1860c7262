"""The sizes of an augmented convolution from its arguments: the one place that rounds and checks them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, lcm

DEFAULT_HEADS = 8
DEFAULT_KEY_RATIO = 0.2
DEFAULT_VALUE_RATIO = 0.1


class RatioWarning(UserWarning):
    """A ratio that was asked for does not decide."""


class Preset(float):
    """A ratio that comes with a network, where nobody asked for it: a minimum overrides it without a warning."""


def attention_channels(
    out_channels: int,
    num_heads: int,
    *,
    key_ratio: float = DEFAULT_KEY_RATIO,
    value_ratio: float = DEFAULT_VALUE_RATIO,
    min_key_channels_per_head: int = 20,
    min_value_channels_per_head: int = 1,
) -> tuple[int, int]:
    """(d_k, d_v) of a convolution with out_channels: the ratios kappa and upsilon of it, rounded down to whole heads.

    d_k = max(m N_h, N_h floor(kappa F / N_h)) with m = min_key_channels_per_head, and d_v alike with its own minimum.

    >>> attention_channels(256, 8)
    (160, 24)
    >>> attention_channels(256, 4, key_ratio=0.5, value_ratio=0.25)
    (128, 64)
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int):
        raise ValueError(f"num_heads must be an int, got num_heads={num_heads!r}")
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got num_heads={num_heads}")
    if out_channels < 1:
        raise ValueError(f"out_channels must be at least 1, got out_channels={out_channels}")
    _check_ratios(key_ratio, value_ratio)
    return (
        num_heads * max(min_key_channels_per_head, _per_head(key_ratio, out_channels, num_heads)),
        num_heads * max(min_value_channels_per_head, _per_head(value_ratio, out_channels, num_heads)),
    )


def _check_ratios(key_ratio: float, value_ratio: float) -> None:
    for name, ratio in (("key_ratio", key_ratio), ("value_ratio", value_ratio)):
        if not ratio >= 0:
            raise ValueError(f"{name} must not be negative, got {name}={ratio}")
        if not isfinite(ratio):
            raise ValueError(f"{name} must be finite, got {name}={ratio}")


def _per_head(ratio: float, out_channels: int, num_heads: int) -> int:
    # 0.29 * 100 is 28.999999999999996 in binary: the small term undoes that, and no ratio is meant that finely.
    return floor(ratio * out_channels / num_heads + 1e-9)


@dataclass(frozen=True)
class Channels:
    """What a layer attends with. `overrides` says of each ratio that was asked for and does not decide what does."""

    num_heads: int
    key_channels: int
    value_channels: int
    overrides: tuple[str, ...] = ()

    def arguments(self) -> dict[str, int]:
        """As AAConv2d takes them."""
        return {
            "num_heads": self.num_heads,
            "key_channels": self.key_channels,
            "value_channels": self.value_channels,
        }

    def warn(self, *, stacklevel: int) -> None:
        for override in self.overrides:
            warnings.warn(override, RatioWarning, stacklevel=stacklevel + 1)


def resolve_channels(
    out_channels: int,
    num_heads: int | None = None,
    key_channels: int | None = None,
    value_channels: int | None = None,
    key_ratio: float | None = None,
    value_ratio: float | None = None,
    min_key_channels_per_head: int = 20,
    min_value_channels_per_head: int = 1,
    groups: int = 1,
    *,
    whole: bool = False,
) -> Channels:
    """AAConv2d's arguments, checked and completed: channels given as such, or ratios (None: the default) rounded.

    whole: the convolution keeps all its channels, so that values take none of them, and groups do not matter.
    """
    groups = 1 if whole else groups
    of_keys = DEFAULT_KEY_RATIO if key_ratio is None else key_ratio
    of_values = DEFAULT_VALUE_RATIO if value_ratio is None else value_ratio
    _check_ratios(of_keys, of_values)
    if num_heads is None:
        num_heads = _default_heads(out_channels, value_channels, of_values)
    rounded = attention_channels(
        out_channels,
        num_heads,
        key_ratio=of_keys,
        value_ratio=of_values,
        min_key_channels_per_head=min_key_channels_per_head,
        min_value_channels_per_head=min_value_channels_per_head,
    )
    rounded = rounded[0], _for_groups(rounded[1], out_channels, num_heads, groups)
    given = (("key", key_channels, key_ratio, rounded[0]), ("value", value_channels, value_ratio, rounded[1]))
    overrides = []
    for name, channels, ratio, from_ratio in given:
        if ratio is None:
            continue
        if channels is not None and channels != from_ratio:
            raise ValueError(
                f"{name}_channels={channels} contradicts {name}_ratio={ratio}, which gives {from_ratio} of "
                f"out_channels={out_channels}; pass only one of them"
            )
        per_head = _per_head(ratio, out_channels, num_heads)
        if channels is None and not isinstance(ratio, Preset) and from_ratio != num_heads * per_head:
            overrides.append(_override(name, ratio, per_head, from_ratio, out_channels, num_heads, groups))
    key_channels, value_channels = (rounded if channels is None else channels for _, channels, _, rounded in given)
    _check_channels(out_channels, num_heads, key_channels, value_channels, whole)
    return Channels(num_heads, key_channels, value_channels, tuple(overrides))


def _default_heads(out_channels: int, value_channels: int | None, value_ratio: float) -> int:
    """The paper's number, or where the ratio leaves its heads without a channel each, so few that at least half of the
    channels stay convolutional."""
    if value_channels is not None or _per_head(value_ratio, out_channels, DEFAULT_HEADS) >= 1:
        return DEFAULT_HEADS
    return max(1, min(DEFAULT_HEADS, out_channels // 2))


def _for_groups(value_channels: int, out_channels: int, num_heads: int, groups: int) -> int:
    """So many value channels, or a few more, that groups divide what is left to the convolution, if anything is."""
    more = value_channels + -value_channels % lcm(num_heads, max(1, groups))
    return more if more < out_channels else value_channels


def _override(
    name: str, ratio: float, per_head: int, taken: int, out_channels: int, num_heads: int, groups: int
) -> str:
    """What decides instead of the ratio, and the way out."""
    asked = f"{name}_ratio={ratio} of {out_channels} channels is {num_heads * per_head} in {num_heads} heads"
    if name == "value" and per_head and groups > 1:
        return f"{asked}, which groups={groups} do not divide: value_channels={taken}; pass value_channels instead"
    minimum, whole = taken // num_heads, floor(ratio * out_channels)
    fewer = minimum == 1 and whole > 0  # then one channel is all that a head can have, and there are too many heads
    way_out = f"num_heads={whole}" if fewer else f"min_{name}_channels_per_head={max(1, per_head)}"
    return (
        f"{asked}, below the minimum of {minimum} per head: {name}_channels={taken}; pass {way_out} or {name}_channels"
    )


def _check_channels(out_channels: int, num_heads: int, key_channels: int, value_channels: int, whole: bool) -> None:
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
    if value_channels > out_channels and not whole:
        way_out = (
            f"at most value_channels={out_channels - out_channels % num_heads}"
            if num_heads <= out_channels
            else f"at most num_heads={out_channels}"
        )
        raise ValueError(
            f"value_channels={value_channels} is more than out_channels={out_channels}: attention replaces part of the "
            f"convolution's output; {way_out}"
        )


def check_groups(out_channels: int, value_channels: int, num_heads: int, groups: int) -> None:
    """The channels left to the convolution divide into its groups."""
    if groups < 1 or out_channels % groups:
        raise ValueError(f"groups must divide out_channels, got groups={groups}, out_channels={out_channels}")
    left = out_channels - value_channels
    if left % groups:
        fits = lcm(num_heads, groups)
        way_out = (
            f"try value_channels={fits}"
            if fits < out_channels
            else f"no number does with num_heads={num_heads}; augment a convolution with fewer groups, such as a 1x1"
        )
        raise ValueError(
            f"the {left} channels left to the convolution (out_channels={out_channels} less "
            f"value_channels={value_channels}) must be divisible by groups={groups}; {way_out}"
        )


def in_each_dimension(name: str, value: int | Sequence[int], dimensions: int, least: int) -> tuple[int, ...]:
    """An argument that is one int for all dimensions or one for each, as a tuple."""
    values = (value,) * dimensions if isinstance(value, int) else value
    if not isinstance(values, Sequence) or len(values) != dimensions or min(values) < least:
        wanted = "an int" if dimensions == 1 else f"an int or {dimensions} of them"
        raise ValueError(f"{name} must be {wanted}, at least {least}, got {name}={value!r}")
    return tuple(values)


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """The value itself, or a ValueError that lists those there are."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {name}={value!r}")
    return value
