"""Images as a network sees them: from files, arrays or tensors, cut to its size."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from ..data.images import UnreadableImage, find_images, read_photograph
from ..data.transforms import INTERPOLATION, eval_transform


def each_image(images: Any) -> list[Any]:
    """One image or several, as a list: files, folders or patterns of them, each once; PIL images, arrays, tensors."""
    alone = isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 0) == 3
    found: list[Any] = []
    files: set[Path] = set()
    for image in [images] if alone else images:
        if isinstance(image, str | Path):
            new = [path for path in find_images(image) if path not in files]
            files.update(new)
            found += new
        else:
            found.append(image)
    return found


def load_image(source: Any) -> Tensor:
    """uint8 [3, H, W] of a file, a PIL image, or an array [H, W, 3] or [3, H, W] of bytes or of numbers from 0 to 1."""
    if isinstance(source, str | Path):
        return _from_file(Path(source))
    if isinstance(source, Image.Image):
        return pil_to_tensor(source.convert("RGB"))
    pixels = torch.as_tensor(np.asarray(source) if not isinstance(source, Tensor) else source.detach().cpu())
    if pixels.dim() != 3 or 3 not in (pixels.shape[0], pixels.shape[-1]):
        raise ValueError(f"an image must be [height, width, 3] or [3, height, width], got shape {list(pixels.shape)}")
    if pixels.shape[0] != 3:
        pixels = pixels.permute(2, 0, 1)
    if pixels.dtype == torch.uint8:
        return pixels.contiguous()
    if not pixels.is_floating_point() or not bool((pixels >= 0).all() and (pixels <= 1).all()):
        raise ValueError(f"an image must be bytes, or numbers from 0 to 1 before normalising, got {pixels.dtype}")
    return (pixels * 255).round().to(torch.uint8).contiguous()


def _from_file(path: Path) -> Tensor:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name image files")
    if not path.exists():
        raise FileNotFoundError(f"there is no image {path}")
    try:
        return read_photograph(path)
    except UnreadableImage as image:
        raise ValueError(f"{path} cannot be read: {image.reason}") from None


def fit(image: Tensor, size: int, crop: float, interpolation: str = INTERPOLATION) -> Tensor:
    """The image as networks are evaluated on it, size x size; one of that size stays as it is."""
    return image if tuple(image.shape[-2:]) == (size, size) else eval_transform(size, crop, interpolation)(image)


def normalise(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 [3, height, width] -> float32, as the network takes it."""
    means, stds = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, std))
    return (image.float() / 255 - means) / stds


def png(image: Tensor) -> str:
    """uint8 [3, height, width] as a data URL, lossless."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
