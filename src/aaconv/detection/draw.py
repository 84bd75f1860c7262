"""Pictures of what a detector found: boxes with class names and scores."""

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from ..data.class_names import class_colour
from .postprocess import Detections

LONGER_SIDE = 800  # smaller images are enlarged, so that names can be read

Rectangle = tuple[float, float, float, float]


def draw(image: Tensor, found: Detections, classes: Sequence[str], side: int = LONGER_SIDE) -> Image.Image:
    """The image uint8 [3, height, width], at least `side` pixels long, with its detections, the best on top."""
    picture = to_pil_image(image)
    scale = max(1.0, side / max(picture.size))
    picture = picture.resize([max(1, round(scale * length)) for length in picture.size], Image.Resampling.BICUBIC)
    pen, line = ImageDraw.Draw(picture), max(2, round(max(picture.size) / 270))
    font = ImageFont.load_default(size=max(10, round(max(picture.size) / 38)))
    boxes = [[scale * number for number in box] for box in found.boxes.tolist()]
    labels = found.labels.tolist()
    for (x0, y0, x1, y1), label in zip(reversed(boxes), reversed(labels), strict=True):
        pen.rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=class_colour(label), width=line)
    taken: list[Rectangle] = []
    for box, label, score in zip(boxes, labels, found.scores.tolist(), strict=True):
        text = f"{classes[label].replace('_', ' ')} {100 * score:.0f} %"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        place = _label_place(box, (right - left + 2 * line, bottom - top + 2 * line), picture.size, taken)
        taken.append(place)
        pen.rectangle(place, fill=class_colour(label))
        pen.text((place[0] + line - left, place[1] + line - top), text, fill=(20, 20, 20), font=font)
    return picture


def _label_place(
    box: Sequence[float], size: tuple[float, float], picture: tuple[int, int], taken: Sequence[Rectangle]
) -> Rectangle:
    """Above the box, below it, or inside it at its top: the first that is on the picture and hides no other label."""
    width, height = size
    x = max(0.0, min(box[0], picture[0] - width))
    places = [(x, y, x + width, y + height) for y in (box[1] - height, box[3], box[1])]
    for place in places:
        inside = place[1] >= 0 and place[3] <= picture[1]
        if inside and not any(_overlap(place, other) for other in taken):
            return place
    return places[0] if places[0][1] >= 0 else places[2]


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def sheet(
    pictures: Sequence[Image.Image], *, columns: int | None = None, cell: int = 480, gap: int = 12
) -> Image.Image:
    """All pictures on one white page, in rows, each as large as its cell allows."""
    columns = columns or min(len(pictures), max(2, math.ceil(math.sqrt(1.3 * len(pictures)))))
    small = [picture.copy() for picture in pictures]
    for picture in small:
        picture.thumbnail((cell, cell), Image.Resampling.LANCZOS)
    rows = [small[start : start + columns] for start in range(0, len(small), columns)]
    heights = [max(picture.height for picture in row) for row in rows]
    width, height = columns * (cell + gap) + gap, sum(heights) + gap * (len(rows) + 1)
    page = Image.new("RGB", (width, height), "white")
    y = gap
    for row, tall in zip(rows, heights, strict=True):
        for column, picture in enumerate(row):
            x = gap + column * (cell + gap) + (cell - picture.width) // 2
            page.paste(picture, (x, y + (tall - picture.height) // 2))
        y += tall + gap
    return page
