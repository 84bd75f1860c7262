"""How attention learns where a pixel is: the four encodings the paper compares.

Each encoding is a small class with the same three facts: the channels it appends to the attention's input
(`extra_channels`), whether the layer keeps relative tables (`has_tables`), and `encode`, which marks an input
[batch, channels, height, width] with positions.
"""

import torch
from torch import Tensor


class NoPosition:
    """Nothing: attention is then equivariant to any permutation of the pixels."""

    extra_channels = 0
    has_tables = False

    def encode(self, x: Tensor) -> Tensor:
        return x


class RelativePosition(NoPosition):
    """Learned tables r^H, r^W of row and column distances (the paper's choice): the logits carry them."""

    has_tables = True


class SinusoidalPosition(NoPosition):
    """2-D sine waves added to the input: the first half of the channels tells the row, the second the column.

    The waves are those of "Attention Is All You Need", as the Image Transformer extends them to two dimensions.
    """

    def encode(self, x: Tensor) -> Tensor:
        channels, height, width = x.shape[1:]
        row_channels = (channels + 1) // 2
        rows = self._waves(height, row_channels, x)[:, :, None].expand(row_channels, height, width)
        columns = self._waves(width, channels - row_channels, x)[:, None, :].expand(-1, height, width)
        return x + torch.cat([rows, columns]).to(x.dtype)

    @staticmethod
    def _waves(length: int, channels: int, like: Tensor) -> Tensor:
        """[channels, length]: sines, then cosines, with wavelengths from 2 pi to 10000 * 2 pi pixels."""
        pairs = (channels + 1) // 2
        frequency = 10000 ** (-torch.arange(pairs, device=like.device, dtype=torch.float32) / max(pairs, 1))
        angle = frequency[:, None] * torch.arange(length, device=like.device, dtype=torch.float32)
        return torch.cat([angle.sin(), angle.cos()])[:channels]


class CoordConvPosition(NoPosition):
    """Three channels appended to the input: column and row from -1 to 1, and their distance from the middle."""

    extra_channels = 3

    def encode(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        row = self._coordinate(height, x)[:, None].expand(height, width)
        column = self._coordinate(width, x)[None, :].expand(height, width)
        coordinates = torch.stack([column, row, (column.square() + row.square()).sqrt()])
        return torch.cat([x, coordinates.to(x.dtype).expand(batch, -1, -1, -1)], dim=1)

    @staticmethod
    def _coordinate(length: int, like: Tensor) -> Tensor:
        """From -1 to 1 in equal steps; 0 for a single pixel."""
        doubled = 2 * torch.arange(length, device=like.device, dtype=torch.float32) - (length - 1)
        return doubled / max(length - 1, 1)


POSITIONS = {
    "relative": RelativePosition,
    "none": NoPosition,
    "sinusoidal": SinusoidalPosition,
    "coordconv": CoordConvPosition,
}


def make_position(name: str) -> NoPosition:
    if name not in POSITIONS:
        raise ValueError(f"position must be one of {', '.join(POSITIONS)}, got position={name!r}")
    return POSITIONS[name]()
