"""accelerate against segment-anything's own image encoder: output and all gradients, in float64."""

import pytest
import torch

from support.accelerated_laws import assert_accelerates, drawn

encoder = pytest.importorskip(
    "segment_anything.modeling.image_encoder",
    reason="segment-anything is not installed; install it from its repository",
)


@pytest.mark.parametrize("size", [(5, 5), (3, 7), (8, 2), (1, 1)], ids=str)
def test_attention(size):
    module = drawn(encoder.Attention(12, num_heads=3, use_rel_pos=True, input_size=(5, 4)))
    assert_accelerates(module, torch.randn(2, *size, 12, dtype=torch.float64))


def test_a_whole_encoder():
    """Windows of 3 x 3 in a map of 5 x 5."""
    sizes = {"img_size": 20, "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3, "out_chans": 8}
    model = encoder.ImageEncoderViT(**sizes, use_rel_pos=True, window_size=3, global_attn_indexes=(1,))
    assert_accelerates(drawn(model), torch.randn(2, 3, 20, 20, dtype=torch.float64), modules=3)
