"""Tiny-ImageNet as its archive unpacks, with three classes of four images each, and two to evaluate on."""

import hashlib
import random

import numpy as np
from PIL import Image

from aaconv.data import tiny_imagenet

WNIDS = ("n02124075", "n01443537", "n04067472")
FOLDER = "tiny-imagenet-200"


def make_tiny_imagenet(root):
    """Below `root`; the labels are in another order than the images, and one of these is grey."""
    folder, random_pixels = root / FOLDER, np.random.default_rng(0)

    def save(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_pixels.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(path, "JPEG")

    rows = []
    for label, name in enumerate(WNIDS):
        for number in range(4):
            save(folder / "train" / name / "images" / f"{name}_{number}.JPEG")
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        for number in range(2):
            file = f"val_{2 * label + number}.JPEG"
            save(folder / "val" / "images" / file)
            rows.append(f"{file}\t{name}\t0\t0\t62\t62\n")
    Image.new("L", (64, 64), 90).save(folder / "train" / WNIDS[0] / "images" / f"{WNIDS[0]}_0.JPEG")
    random.Random(0).shuffle(rows)
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text("n01443537\tgoldfish\n")
    return root


def expect(root, patch):
    """Let the reader take these few images for all there are."""
    known = {"train": as_md5sum(root / FOLDER, "train", ".JPEG"), "test": as_md5sum(root / FOLDER, "val")}
    for name, value in (("CLASSES", 3), ("TRAIN", 4), ("VAL", 2), ("MD5", known)):
        patch.setattr(tiny_imagenet, name, value)


def as_md5sum(folder, part, ending=""):
    """What `find PART -type f | LC_ALL=C sort | xargs md5sum | md5sum` prints in the folder."""
    files = [path for path in (folder / part).rglob("*") if path.is_file() and path.name.endswith(ending)]
    lines = {path.relative_to(folder).as_posix(): hashlib.md5(path.read_bytes()).hexdigest() for path in files}
    return hashlib.md5("".join(f"{lines[path]}  {path}\n" for path in sorted(lines)).encode()).hexdigest()
