"""Classes as people read and see them: a name, and a colour."""

import colorsys

from timm.data import ImageNetInfo


def class_title(name: str) -> str:
    """A class as people call it: ImageNet's n01440764 is a tench."""
    if len(name) == 9 and name[0] == "n" and name[1:].isdecimal():
        try:
            return ImageNetInfo("imagenet-22k").label_name_to_description(name).split(",")[0]
        except KeyError:
            return name
    return name.replace("_", " ")


GOLDEN = 0.61803398875


def class_colour(label: int) -> tuple[int, int, int]:
    """Neighbouring labels have colours far apart; bright enough for dark letters on them."""
    red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(label * GOLDEN % 1, 0.66, 0.85))
    return red, green, blue
