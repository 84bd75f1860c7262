"""The code of boxes against anchors: torchvision's to the bit, and its own inverse."""

import math

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder

from aaconv.detection.boxes import LARGEST, decode, encode

THEIRS = BoxCoder((1.0, 1.0, 1.0, 1.0))


def random_boxes(*shape):
    corner, size = torch.rand(*shape, 2) * 100, torch.rand(*shape, 2) * 50 + 0.5
    return torch.cat([corner, corner + size], dim=-1)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 5)])
def test_codes_are_torchvisions(shape):
    boxes, anchors = random_boxes(*shape), random_boxes(*shape)
    codes = encode(boxes, anchors)
    assert torch.equal(codes.flatten(0, -2), THEIRS.encode_single(boxes.flatten(0, -2), anchors.flatten(0, -2)))
    wild = codes * 3
    assert torch.equal(
        decode(wild, anchors).flatten(0, -2), THEIRS.decode_single(wild.view(-1, 4), anchors.view(-1, 4))
    )
    assert torch.allclose(decode(codes, anchors), boxes, atol=1e-4)


def test_an_anchor_is_its_own_code_of_zeros():
    anchors = random_boxes(3)
    assert torch.equal(encode(anchors, anchors), torch.zeros(3, 4))
    assert torch.allclose(decode(torch.zeros(3, 4), anchors), anchors, atol=1e-5)


def test_a_code_that_is_too_large_stays_finite():
    box = decode(torch.tensor([0.0, 0.0, 1e9, math.inf]), torch.tensor([0.0, 0.0, 2.0, 4.0]))
    assert torch.allclose(box[2:] - box[:2], torch.tensor([2.0, 4.0]) * math.exp(LARGEST))
