"""What is in image files, by a trained detector: `aaconv detect RUN IMAGE... -o DIR`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..data.detection_transforms import resize
from ..data.images import UnreadableImage, find_images, read_photograph
from ..data.transforms import Normalize
from ..detection.coco_results import (
    FILE_NAME,
    Result,
    to_results,
    write_results,
)
from ..detection.draw import draw, sheet
from ..detection.postprocess import Detections, PostprocessSettings
from ..runs.load import load_model
from ..runs.run_folder import CONFIG, check_run, read_config
from ..runs.run_types import category_ids_of
from ..utils.device import pick_device
from ..utils.files import check_writable, naming_unwritable, replacing
from ..utils.terminal import plural
from .checks import not_finite


def find_in_image(loaded: Any, pixels: torch.Tensor, settings: PostprocessSettings) -> Detections:
    """The objects in an image uint8 [3, height, width], in its pixels: its longer side as long as in training."""
    like = next(loaded.model.parameters())
    (resized,) = resize(loaded.size, pixels)
    image = Normalize(loaded.mean, loaded.std).to(like.device)(resized[None].to(like.device))[0].to(like.dtype)
    try:
        found = loaded.model.detect([image], settings)[0]
    except FloatingPointError:
        raise not_finite(loaded, "a score of the network") from None
    scale = found.boxes.new_tensor([pixels.shape[2] / image.shape[2], pixels.shape[1] / image.shape[1]] * 2)
    return Detections((found.boxes * scale).cpu(), found.scores.cpu(), found.labels.cpu())


def detect_files(
    loaded: Any,
    files: Iterable[Path],
    output: str | Path,
    *,
    threshold: float = 0.3,
    category_ids: tuple[int, ...] | None = None,
    sheet_file: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Draw what is in the files into `output`, as NAME.png, and write it as COCO's results into detections.json there.

    The image_id of a result is the number that the name of its file is, else its place among the files, from 1 on;
    "file_name" says which it is. Images that cannot be read are left out; when all is done, `say` gets a line about the
    others, and an OSError names the first.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be 0 or more and less than 1, got {threshold}")
    classes = loaded.classes or [f"class {label}" for label in range(loaded.model.num_classes)]
    category_ids = category_ids or tuple(range(1, len(classes) + 1))
    files, output = list(files), Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file, not a folder for the pictures; name another")
    if not output.exists() and output.suffix in (".json", ".csv", ".png", ".jpg"):
        raise ValueError(f"{output} is to be a folder for the pictures and {FILE_NAME}; leave out {output.suffix}")
    with naming_unwritable(output):
        output.mkdir(parents=True, exist_ok=True)
    if sheet_file is not None:
        check_writable(sheet_file)
    results: list[Result] = []
    unreadable: list[UnreadableImage] = []
    pictures = []
    names = picture_names(files)
    for place, (file, name) in enumerate(zip(files, names, strict=True), 1):
        try:
            pixels = read_photograph(file)
        except UnreadableImage as image:
            unreadable.append(image)
            continue
        found = find_in_image(loaded, pixels, PostprocessSettings(threshold=threshold))
        picture = draw(pixels, found, classes)
        with replacing(output / name) as draft:
            picture.save(draft)
        pictures += [picture] if sheet_file is not None else []
        image_id = int(file.stem) if file.stem.isdecimal() else place
        results += [one | {"file_name": file.name} for one in to_results(found, image_id, category_ids)]
    write_results(output / FILE_NAME, results)
    if pictures and sheet_file is not None:
        with replacing(sheet_file) as draft:
            sheet(pictures).save(draft)
    read = len(files) - len(unreadable)
    say(f"found {plural(len(results), 'object')} in {plural(read, 'image')}; see {output}, {output / FILE_NAME}")
    if unreadable:
        first = unreadable[0]
        number = f"{len(unreadable)} of {plural(len(files), 'image')}"
        raise OSError(f"{number} could not be read; the first is {first.name}: {first.reason}")
    return results


def picture_names(files: list[Path]) -> list[str]:
    """NAME.png for each file; files of the same name get a number behind it."""
    names, taken = [], set()
    for file in files:
        name, number = f"{file.stem}.png", 1
        while name in taken:
            number += 1
            name = f"{file.stem}-{number}.png"
        taken.add(name)
        names.append(name)
    return names


def print_detections(
    source: str | Path,
    images: Iterable[str],
    output: str | Path,
    *,
    weights: str | None = None,
    device: str | None = None,
    sheet_file: str | Path | None = None,
    **options: Any,
) -> None:
    """Find objects in image files, draw them into the folder `output`, and say how many there are."""
    if sheet_file is not None and Path(sheet_file).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"the sheet must end in .png, .jpg or .webp, got {str(sheet_file)!r}")
    check_run(source, "train one: aaconv train detection-demo")
    files = find_images(images)
    loaded = load_model(source, weights=weights, device=pick_device(device))
    if loaded.task != "detect":
        raise ValueError(f"{source} is a run of a classifier, which finds no objects; `aaconv predict` names images")
    category_ids = category_ids_of(read_config(source), Path(source) / CONFIG)
    detect_files(loaded, files, output, category_ids=category_ids, sheet_file=sheet_file, say=print, **options)
