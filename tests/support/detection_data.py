"""Small data sets in COCO's format, for the tests of detection."""

import json

import numpy as np
from PIL import Image

CATEGORIES = [{"id": 3, "name": "car"}, {"id": 7, "name": "train"}, {"id": 90, "name": "toothbrush"}]


def annotation(image_id, box, category_id=3, **more):
    return {"image_id": image_id, "category_id": category_id, "bbox": box, "iscrowd": 0, **more}


def write_split(root, split, images, annotations, *, seed=0, ending="png", categories=None):
    """`images` as {id: (width, height)}, drawn at random into root/split; returns the annotation file."""
    random = np.random.default_rng(seed)
    (root / split).mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    entries = []
    for number, (width, height) in images.items():
        name = f"{number:06d}.{ending}"
        pixels = random.integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / split / name)
        entries.append({"id": number, "file_name": name, "width": width, "height": height})
    numbered = [{"id": i, **entry} for i, entry in enumerate(annotations, 1)]
    content = {"images": entries, "annotations": numbered, "categories": categories or CATEGORIES}
    file = root / "annotations" / f"instances_{split}.json"
    file.write_text(json.dumps(content))
    return file


def make_coco(root, number=6):
    """Training and test images of several sizes, some without objects, some with a crowd."""
    for offset, split in ((1, "train"), (101, "val")):
        images = {offset + i: (40 + 7 * i, 60 - 5 * i) for i in range(number)}
        annotations = []
        for image_id, (width, height) in images.items():
            index = image_id - offset
            if index % 3 < 2:
                annotations.append(annotation(image_id, [2.0, 3.0, width / 2, height / 3], 3))
                annotations.append(annotation(image_id, [width / 2, 1.0, width / 3, height - 5.0], 90))
            if index % 3 == 1:
                annotations.append(annotation(image_id, [0, 0, width, height], 7, iscrowd=1))
        write_split(root, split, images, annotations, seed=offset)
    return root
