"""Pictures of what a detector found: boxes with class names and scores."""

import colorsys
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from .postprocess import Detections

LONGER_SIDE = 800  # smaller images are enlarged, so that names can be read
GOLDEN = 0.61803398875


def class_colour(label: int) -> tuple[int, int, int]:
    """Neighbouring labels have colours far apart; bright enough for dark letters on them."""
    rgb = colorsys.hls_to_rgb(label * GOLDEN % 1, 0.66, 0.85)
    return tuple(round(255 * value) for value in rgb)


def draw(image: Tensor, found: Detections, classes: Sequence[str], side: int = LONGER_SIDE) -> Image.Image:
    """The image uint8 [3, height, width], at least `side` pixels long, with its detections, the best on top."""
    picture = to_pil_image(image)
    scale = max(1.0, side / max(picture.size))
    picture = picture.resize([max(1, round(scale * length)) for length in picture.size], Image.Resampling.BICUBIC)
    pen, unit = ImageDraw.Draw(picture), max(picture.size) / 400
    font = ImageFont.load_default(size=round(max(10, 8 * unit)))
    for box, label, score in reversed(
        list(zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True))
    ):
        colour = class_colour(label)
        x0, y0, x1, y1 = (scale * number for number in box)
        pen.rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=colour, width=max(2, round(unit)))
        text = f"{classes[label].replace('_', ' ')} {100 * score:.0f}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        width, height, air = right - left, bottom - top, max(2, round(unit))
        # Above the box where there is room, else inside it; never beyond the picture.
        y = y0 - height - 2 * air if y0 >= height + 2 * air else y0
        x = max(0, min(x0, picture.width - width - 2 * air))
        pen.rectangle((x, y, x + width + 2 * air, y + height + 2 * air), fill=colour)
        pen.text((x + air - left, y + air - top), text, fill=(20, 20, 20), font=font)
    return picture


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
