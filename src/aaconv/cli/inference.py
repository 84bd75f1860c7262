"""Commands that put a trained network to work: eval, predict, detect."""

import argparse
from typing import Any

from .parsing import add, positive


def add_commands(commands: Any) -> None:
    _add_eval(commands)
    _add_predict(commands)
    _add_detect(commands)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help="a run folder, or a model by name")
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a .safetensors file")
    parser.add_argument("--pretrained", action="store_true", help="of a model: with its own weights, ours or timm's")
    parser.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_eval(commands: Any) -> None:
    evaluate = add(commands, "eval", _eval, "top-1, top-5 and the most confused classes", "runs/demo-aa --data shapes")
    _add_source(evaluate)
    evaluate.add_argument("--data", metavar="NAME", help="a data set; default: what the run itself was evaluated on")
    evaluate.add_argument("--data-dir", metavar="DIR", help="where the data lie")
    evaluate.add_argument("--batch", type=positive, metavar="N", help="images at a time, default: 256")
    evaluate.add_argument("--limit", type=positive, metavar="N", help="so many images of the test set, at random")
    evaluate.add_argument("--detections", metavar="FILE", help="score these detections, a COCO result file, instead")
    evaluate.add_argument("--save-detections", metavar="FILE", help="of a detector: write them as a COCO result file")
    evaluate.add_argument("--worst", type=positive, default=10, metavar="N", help="classes to list, default: 10")


def _add_predict(commands: Any) -> None:
    predict = add(commands, "predict", _predict, "what images show: the likeliest classes", "runs/demo-aa photos/*.jpg")
    _add_source(predict)
    predict.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or quoted patterns")
    predict.add_argument("--top", type=positive, default=5, metavar="N", help="classes an image, default: 5")
    predict.add_argument("--batch", type=positive, default=32, metavar="N", help="images at a time, default: 32")


def _eval(chosen: argparse.Namespace) -> None:
    from ..inference.evaluate import evaluate, print_evaluation

    names = ("weights", "pretrained", "device", "data", "data_dir", "batch", "limit", "detections", "save_detections")
    found = evaluate(chosen.source, **{name: getattr(chosen, name) for name in names})
    print_evaluation(found, worst=chosen.worst, as_json=chosen.json)


def _predict(chosen: argparse.Namespace) -> None:
    from ..inference.predict import print_predictions

    names = ("weights", "pretrained", "device", "batch", "top")
    how = {name: getattr(chosen, name) for name in names}
    print_predictions(chosen.source, chosen.images, as_json=chosen.json, **how)


def _add_detect(commands: Any) -> None:
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
    from ..inference.detect import print_detections

    print_detections(
        chosen.source,
        chosen.images,
        chosen.output,
        threshold=chosen.threshold,
        sheet_file=chosen.sheet,
        weights=chosen.weights,
        device=chosen.device,
    )
