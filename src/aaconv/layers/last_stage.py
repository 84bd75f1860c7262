"""Where to put attention when nobody says: the convolutions with windows that give the smallest maps."""

from collections.abc import Sequence

from torch import Tensor, nn

from .augment import example_inputs, map_sizes

Example = Tensor | int | Sequence[int]


def last_stage(model: nn.Module, example: Example) -> list[str]:
    """The names of the convolutions, larger than 1 x 1, whose output is as small as that of the last one: there
    attention costs least, and a pixel stands for most of the image. A ValueError where there are none.

    example: as in augment.
    """
    windows = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and 1 < max(module.kernel_size) <= LARGEST_WINDOW
    }
    if not windows:
        raise ValueError(f"the model has no convolution with a window of 2 to {LARGEST_WINDOW} pixels to augment")
    sizes = {
        conv: out[0] * out[1] for conv, (_, out) in map_sizes(model, example_inputs(model, example), windows).items()
    }
    smallest = min(area for area in sizes.values() if area > 1) if max(sizes.values()) > 1 else 1
    return [name for conv, name in windows.items() if sizes[conv] == smallest]


LARGEST_WINDOW = 11
"""Beyond it a convolution cuts an image into patches."""
