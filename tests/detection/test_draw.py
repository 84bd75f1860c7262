"""Boxes drawn into pictures."""

import torch

from aaconv.detection import Detections
from aaconv.detection.draw import draw, sheet


def test_pictures_have_boxes_in_the_colours_of_their_classes():
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    found = Detections(
        torch.tensor([[10.0, 10.0, 30.0, 30.0], [10.0, 10.0, 30.0, 30.0], [0.0, 0.0, 60.0, 40.0]]),
        torch.tensor([0.9, 0.8, 0.5]),
        torch.tensor([0, 1, 2]),
    )
    picture = draw(image, found, ["cat", "a_dog", "a name far longer than the picture is wide" * 2], side=240)
    assert picture.size == (240, 160)
    colours = {colour for _, colour in picture.getcolors(100_000)}
    assert len(colours) > 3
    assert picture.getpixel((119, 80)) != (0, 0, 0)  # the right edge of the two boxes
    nothing = draw(image, Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0).long()), [])
    assert nothing.size == (800, 533)
    assert nothing.getcolors() == [(800 * 533, (0, 0, 0))]
    page = sheet([picture, nothing, picture], cell=100)
    assert page.width > 2 * 100
    assert page.getpixel((0, 0)) == (255, 255, 255)
