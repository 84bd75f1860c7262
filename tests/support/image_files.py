"""Folders of images for tests."""

import torch
from PIL import Image


def save_images(root, number):
    """Noise, in root/train, of two classes."""
    for index in range(number):
        path = root / "train" / f"class{index % 2}" / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(256, (20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        Image.fromarray(noise.numpy()).save(path)
    return root
