"""What we use of timm that it keeps in modules with a leading underscore, and gives no public name.

decode_arch_def, resolve_bn_args, round_channels (timm.models._efficientnet_builder): without them the stages of MnasNet
would have to be spelled out block by block.
feature_take_indices (timm.models._features): how timm's own networks read the `indices` of forward_intermediates.
"""

from timm.models._efficientnet_builder import decode_arch_def, resolve_bn_args, round_channels
from timm.models._features import feature_take_indices

__all__ = ["decode_arch_def", "feature_take_indices", "resolve_bn_args", "round_channels"]
