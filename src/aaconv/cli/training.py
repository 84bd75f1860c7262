"""Commands of training and after it: recipes, train, eval, predict, record."""

import argparse
from pathlib import Path
from typing import Any

from .parsing import add, positive


def add_commands(commands: Any) -> None:
    _add_recipes(commands)
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)

    record = add(commands, "record", _record, "keep the results of finished runs for `aaconv table`", "runs/*-seed0")
    record.add_argument("runs", nargs="+", metavar="RUN", help="folder of a finished run")
    record.add_argument("--results", default="results", metavar="DIR", help="where to keep them, default: results")


def _add_recipes(commands: Any) -> None:
    recipes = add(commands, "recipes", _recipes, "list the recipes, or show one", "show cifar100-small-aa")
    recipes.add_argument("pattern", nargs="?", default="*", help="a wildcard pattern, a part of the name, or `show`")
    recipes.add_argument("name", nargs="?", help="with `show`: the recipe to show, field by field")
    recipes.add_argument("--json", action="store_true", help="print JSON")


def _add_train(commands: Any) -> None:
    from ..recipes.overrides import add_options

    example = "cifar100-small-aa --epochs 30 --lr 0.1 --model.num-heads 4 --seed 3"
    train = add(commands, "train", _train, "train a recipe into a run folder, or go on with a run", example)
    train.usage = "aaconv train [RECIPE | --from FILE | --resume RUN] [--run DIR] [--FIELD VALUE ...] [option ...]"
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name; `aaconv recipes` lists them")
    train.add_argument(
        "--from", dest="source", metavar="FILE", help="take the recipe from a YAML file, as in RUN/recipe.yaml"
    )
    train.add_argument("--resume", metavar="RUN", help="go on with a run that was interrupted")
    # torchrun takes --run for one of its own options, wherever it stands: --run-dir is the name for its command line.
    train.add_argument(
        *("--run", "--run-dir"),
        dest="folder",
        metavar="DIR",
        help="folder for the run, default: runs/NAME-seedN, numbered; after torchrun write --run-dir",
    )
    train.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu; default: a GPU if there is one")
    train.add_argument("--tensorboard", action="store_true", help="write events for TensorBoard, into RUN/tensorboard")
    train.add_argument("--record", action="store_true", help="record the result for `aaconv table` at the end")
    train.add_argument("--dry-run", action="store_true", help="print the recipe with all changes, and stop")
    add_options(train)


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


def _recipes(chosen: argparse.Namespace) -> None:
    from ..recipes.listing import print_recipe, print_recipes

    if chosen.pattern == "show":
        if chosen.name is None:
            raise ValueError("which recipe? aaconv recipes show NAME")
        print_recipe(chosen.name, as_json=chosen.json)
    elif chosen.name is not None:
        raise ValueError(f"one pattern at a time, got {chosen.pattern!r} and {chosen.name!r}; quote it: 'cifar100-*'")
    else:
        print_recipes(chosen.pattern, as_json=chosen.json)


def _train(chosen: argparse.Namespace) -> None:
    from .. import launch
    from ..recipes.files import to_yaml
    from ..recipes.overrides import given

    changes = given(chosen)
    how = {"device": chosen.device, "tensorboard": chosen.tensorboard, "record": chosen.record}
    if chosen.resume is not None:
        others = {
            "a recipe": chosen.recipe,
            "--from": chosen.source,
            "--run": chosen.folder,
            "--dry-run": chosen.dry_run,
        }
        launch.check_unchanged(changes, others)
        launch.start(Path(chosen.resume), None, **how)
        return
    recipe = launch.choose(chosen.recipe, chosen.source, changes, chosen.device)
    if chosen.dry_run:
        print(to_yaml(recipe), end="")
        return
    launch.start(Path(chosen.folder) if chosen.folder else launch.free_folder(recipe), recipe, **how)


def _eval(chosen: argparse.Namespace) -> None:
    from ..evaluate import evaluate, print_evaluation

    names = ("weights", "pretrained", "device", "data", "data_dir", "batch", "limit", "detections", "save_detections")
    found = evaluate(chosen.source, **{name: getattr(chosen, name) for name in names})
    print_evaluation(found, worst=chosen.worst, as_json=chosen.json)


def _predict(chosen: argparse.Namespace) -> None:
    from ..predict import print_predictions

    names = ("weights", "pretrained", "device", "batch", "top")
    how = {name: getattr(chosen, name) for name in names}
    print_predictions(chosen.source, chosen.images, as_json=chosen.json, **how)


def _record(chosen: argparse.Namespace) -> None:
    from ..record import record_result

    for run in chosen.runs:
        print(f"recorded {run} in {record_result(run, chosen.results)}")
