"""The loss of a detector at the edges of its rules, by hand."""

import math

import pytest
import torch

from aaconv.detection.loss import BACKGROUND, IGNORED, DetectionLoss, match

OBJECT = torch.tensor([0.0, 0.0, 2.0, 1.0])
ANCHORS = torch.tensor([[0.0, 0.0, width, 1.0] for width in (2, 4, 5, 8)])
"""Which overlap with the object by 1, 1/2, 2/5 and 1/4: all but the last are numbers that the rules name."""
FAR = torch.tensor([90.0, 90.0, 99.0, 99.0])


def test_exactly_half_is_enough_and_exactly_two_fifths_is_too_much_for_the_background():
    found = match(ANCHORS, OBJECT[None, None], torch.tensor([[True]]))
    assert found.tolist() == [[0, 0, IGNORED, BACKGROUND]]


def test_the_nearest_anchor_is_for_an_object_however_little_they_overlap():
    found = match(ANCHORS[2:], OBJECT[None, None], torch.tensor([[True]]))
    assert found.tolist() == [[0, BACKGROUND]]


def test_an_object_that_no_anchor_touches_is_for_none():
    found = match(ANCHORS, torch.stack([FAR, OBJECT])[None], torch.tensor([[True, True]]))
    assert found.tolist() == [[1, 1, IGNORED, BACKGROUND]]
    assert match(ANCHORS, FAR[None, None], torch.tensor([[True]])).tolist() == [[BACKGROUND] * 4]


def test_a_box_that_is_not_there_is_for_no_anchor():
    found = match(ANCHORS, torch.stack([OBJECT, FAR])[None], torch.tensor([[False, True]]))
    assert found.tolist() == [[BACKGROUND] * 4]


def test_the_loss_by_hand():
    """One anchor on its object: code 0, and so a smooth L1 of |delta| - beta / 2, or of delta^2 / (2 beta) below."""
    logits, labels = torch.tensor([[[1.0, -2.0]]]), torch.tensor([[1]])
    deltas = torch.tensor([[[0.5, -0.04, 0.0, 0.0]]])
    class_loss, box_loss = DetectionLoss()(logits, deltas, OBJECT[None], OBJECT[None, None], labels)
    assert box_loss.item() == pytest.approx(1.25 * ((0.5 - 0.05) + 0.04**2 / 0.2))

    def sigmoid(logit):
        return 1 / (1 + math.exp(-logit))

    absent, present = sigmoid(1.0), sigmoid(-2.0)
    focal = 0.75 * absent**2 * -math.log(1 - absent) + 0.25 * (1 - present) ** 2 * -math.log(present)
    assert class_loss.item() == pytest.approx(focal, rel=1e-5)


def test_both_losses_are_over_the_anchors_with_an_object():
    """Four anchors, of which two are for the object, one does not count and one is background."""
    loss, logits, deltas = DetectionLoss(), torch.zeros(1, 4, 1), torch.ones(1, 4, 4)
    arguments = logits, deltas, ANCHORS, OBJECT[None, None], torch.tensor([[0]])
    class_sum, box_sum, number = loss.sums(*arguments)
    assert number == 2
    torch.testing.assert_close(loss(*arguments), (class_sum / 2, box_sum / 2))
    of_an_object, of_background = 0.25 * 0.25 * math.log(2), 0.75 * 0.25 * math.log(2)
    assert class_sum.item() == pytest.approx(2 * of_an_object + of_background)
