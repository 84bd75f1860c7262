"""Commands that put a trained network to work: eval, predict, detect."""

import argparse

from .parsing import Parser, positive
from .source import add_augment, add_device, add_json, add_source, add_weights, augmentation

IMAGES = "files, folders or quoted patterns"


def add_commands(commands: Parser) -> None:
    _add_eval(commands)
    _add_predict(commands)
    _add_detect(commands)


def _add_eval(commands: Parser) -> None:
    about = "evaluate a network: accuracy and confused classes, or mAP"
    evaluate = commands.add("eval", _eval, about, "runs/demo-aa --data shapes")
    add_source(evaluate)
    evaluate.add_argument("--data", metavar="NAME", help="a data set; default: the one the run was evaluated on")
    evaluate.add_argument("--data-dir", metavar="DIR", help="where the data set is")
    evaluate.add_argument("--batch", type=positive, metavar="N", help="batch size, default: 256")
    evaluate.add_argument("--limit", type=positive, metavar="N", help="evaluate N random images of the test set")
    evaluate.add_argument("--detections", metavar="FILE", help="score these detections (COCO result format) instead")
    evaluate.add_argument("--save-detections", metavar="FILE", help="of a detector: write them in COCO result format")
    evaluate.add_argument("--worst", type=positive, default=10, metavar="N", help="classes to list, default: 10")
    add_weights(evaluate)
    add_device(evaluate)
    add_json(evaluate)


def _add_predict(commands: Parser) -> None:
    predict = commands.add("predict", _predict, "classify images", "runs/demo-aa photos/*.jpg")
    add_source(predict)
    predict.add_argument("images", nargs="+", metavar="IMAGE", help=IMAGES)
    predict.add_argument("--top", type=positive, default=5, metavar="N", help="classes per image, default: 5")
    predict.add_argument("--batch", type=positive, default=32, metavar="N", help="batch size, default: 32")
    predict.add_argument("-o", "--output", metavar="FILE", help="write a .csv or .json file instead")
    add_weights(predict)
    add_augment(predict)
    add_device(predict)
    add_json(predict)


def _add_detect(commands: Parser) -> None:
    about = "find objects in images; draw and write their boxes"
    detect = commands.add("detect", _detect, about, "runs/detection-demo photos/*.jpg -o found")
    detect.add_argument("source", metavar="RUN", help="run folder of a detector")
    detect.add_argument("images", nargs="+", metavar="IMAGE", help=IMAGES)
    detect.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for pictures and detections.json")
    detect.add_argument("--threshold", type=score, default=0.3, metavar="SCORE", help="lowest score, default: 0.3")
    detect.add_argument("--sheet", metavar="FILE", help="also one sheet of all pictures: .png, .jpg or .webp")
    detect.add_argument("--weights", metavar="WHICH", help="last, best or ema; or a .safetensors file")
    add_device(detect)


def score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, 1 excluded, got {text!r}")
    return value


def _eval(chosen: argparse.Namespace) -> None:
    from ..inference.evaluate import evaluate, print_evaluation

    names = ("weights", "pretrained", "device", "data", "data_dir", "batch", "limit", "detections", "save_detections")
    found = evaluate(chosen.source, **{name: getattr(chosen, name) for name in names})
    print_evaluation(found, worst=chosen.worst, as_json=chosen.json)


def _predict(chosen: argparse.Namespace) -> None:
    from ..inference.predict import print_predictions

    names = ("weights", "pretrained", "device", "batch", "top")
    how = {name: getattr(chosen, name) for name in names} | {"augment": augmentation(chosen)}
    print_predictions(chosen.source, chosen.images, as_json=chosen.json, file=chosen.output, **how)


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
