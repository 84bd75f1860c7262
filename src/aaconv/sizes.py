"""How many channels the attention of an augmented convolution has: the one place that rounds."""

from math import floor


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
    for name, ratio in (("key_ratio", key_ratio), ("value_ratio", value_ratio)):
        if not ratio >= 0:
            raise ValueError(f"{name} must not be negative, got {name}={ratio}")

    def whole_heads(ratio: float, minimum: int) -> int:
        # 0.29 * 100 is 28.999999999999996 in binary: the small term undoes that, and no ratio is meant that finely.
        return num_heads * max(minimum, floor(ratio * out_channels / num_heads + 1e-9))

    return whole_heads(key_ratio, min_key_channels_per_head), whole_heads(value_ratio, min_value_channels_per_head)
