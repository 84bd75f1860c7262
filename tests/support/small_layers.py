"""Layers small enough for loops, with every option."""

from aaconv import AAConv2d

SMALL = {"num_heads": 4, "value_ratio": 0.25, "min_key_channels_per_head": 3}
VARIANTS = {
    "plain": {},
    "strided": {"stride": 2},
    "downsampled": {"downsample": True},
    "strided and downsampled": {"stride": 2, "downsample": True},
    "downsampled twice": {"downsample": 2},
    "attention only": {"value_ratio": 1.0},
    "per-head tables": {"share_heads": False},
    "no position": {"position": "none"},
    "sinusoidal": {"position": "sinusoidal"},
    "coordconv": {"position": "coordconv"},
    "attention bias": {"attention_bias": True},
}


def small(**options):
    return AAConv2d(6, 16, **{"kernel_size": 3, **SMALL, **options})
