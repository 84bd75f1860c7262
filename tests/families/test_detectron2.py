"""accelerate against detectron2's own ViTDet: output and all gradients, in float64."""

import pytest
import torch

from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import assert_accelerates, drawn

vit = pytest.importorskip(
    "detectron2.modeling.backbone.vit", reason="detectron2 is not installed; install it from its repository"
)


@pytest.mark.parametrize("size", [(5, 5), (3, 7), (8, 2), (1, 1)], ids=str)
def test_attention(size):
    module = drawn(vit.Attention(12, num_heads=3, use_rel_pos=True, input_size=(5, 4)))
    assert_accelerates(module, torch.randn(2, *size, 12, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Importing from timm.models.layers")
def test_a_block_with_windows():
    module = vit.Block(12, 3, use_rel_pos=True, window_size=3, input_size=(5, 5))
    assert_accelerates(drawn(module), torch.randn(2, 5, 7, 12, dtype=torch.float64))


def test_the_pooling_attention_of_its_mvit_is_left_alone():
    mvit = pytest.importorskip("detectron2.modeling.backbone.mvit")
    report = accelerate(mvit.MultiScaleAttention(12, 12, 3, use_rel_pos=True, input_size=(4, 4)))
    assert report.kept[0].reason.startswith("unknown form")
