"""The command that looks for objects: detect."""

import argparse
from typing import Any

from .parsing import add


def add_commands(commands: Any) -> None:
    detect = add(
        commands,
        "detect",
        _detect,
        "find objects in images: drawn boxes with names and scores, and COCO's result format",
        "runs/detection-demo photos/*.jpg -o found",
    )
    detect.add_argument("source", metavar="RUN", help="folder of a run of a detector")
    detect.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or quoted patterns")
    detect.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for pictures and detections.json")
    detect.add_argument("--threshold", type=score, default=0.3, metavar="SCORE", help="the lowest score, default: 0.3")
    detect.add_argument("--sheet", metavar="FILE", help="all pictures on one page, too: a .png, .jpg or .webp file")
    detect.add_argument("--weights", metavar="WHICH", help="last, best or ema; or a .safetensors file")
    detect.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu; default: a GPU if there is one")


def score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, 1 excluded, got {text!r}")
    return value


def _detect(chosen: argparse.Namespace) -> None:
    from ..detect import print_detections

    print_detections(
        chosen.source,
        chosen.images,
        chosen.output,
        threshold=chosen.threshold,
        sheet_file=chosen.sheet,
        weights=chosen.weights,
        device=chosen.device,
    )
