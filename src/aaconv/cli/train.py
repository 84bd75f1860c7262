"""Commands of training: train, record."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .parsing import Parser, one_of
from .recipe_options import add_options, given, parse_pairs
from .source import add_device

if TYPE_CHECKING:
    from ..recipes.pretrained import Start

TRACKERS = ("trackio", "wandb")


def add_commands(commands: Parser) -> None:
    _add_train(commands)

    about = "keep the results of finished runs for `aaconv table`"
    record = commands.add("record", _record, about, "runs/*-seed0")
    record.add_argument("runs", nargs="+", metavar="RUN", help="folder of a finished run")
    record.add_argument("--results", default="results", metavar="DIR", help="where to keep them, default: results")


def _add_train(commands: Parser) -> None:
    example = "cifar100-small-aa --epochs 30 --model.num-heads 4"
    train = commands.add("train", _train, "train a recipe into a run folder, or resume a run", example)
    train.usage = """\
aaconv train [RECIPE | --from FILE | --resume RUN] [--run DIR]
                    [--FIELD VALUE ...] [option ...]"""
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name; `aaconv recipes` lists them")
    train.add_argument("--from", dest="source", metavar="FILE", help="a recipe in a YAML file, such as RUN/recipe.yaml")
    train.add_argument("--resume", metavar="RUN", help="resume a run that was interrupted")
    # torchrun takes --run for one of its own options, wherever it stands: --run-dir is the name for its command line.
    train.add_argument(
        *("--run", "--run-dir"),
        dest="folder",
        metavar="DIR",
        help="folder for the run, default: runs/NAME-seedN, numbered; after torchrun write --run-dir",
    )
    add_device(train)
    add_start(train, "of the network, e.g. 'layer4.*.conv2'")
    train.add_argument("--record", action="store_true", help="record the result for `aaconv table` at the end")
    train.add_argument("--dry-run", action="store_true", help="print the recipe with all changes, and stop")
    add_options(train)


def add_start(parser: Parser, where: str) -> None:
    """What the network starts from, and who watches."""
    parser.add_argument(
        "--pretrained",
        nargs="?",
        const=True,
        metavar="FILE",
        help="start from the network's pretrained weights, or from those of a file",
    )
    parser.add_argument("--augment", metavar="WHERE", help=f"add attention to these convolutions; {where}")
    parser.add_argument(
        "--augment.OPTION",
        dest="attention",
        action="append",
        default=[],
        metavar="VALUE",
        help="a keyword of augment: --augment.qk-norm true --augment.combine concat",
    )
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard events into RUN/tensorboard")
    parser.add_argument("--track", **one_of("tracker", TRACKERS), help="also report to trackio or wandb, if installed")


def start_of(chosen: argparse.Namespace) -> "Start":
    """What the options of add_start ask for."""
    from ..recipes.pretrained import Start

    where = None if chosen.augment in (None, "none") else chosen.augment
    return Start(chosen.pretrained or False, where, parse_pairs(chosen.attention))


def _train(chosen: argparse.Namespace) -> None:
    from .. import recipes

    if chosen.recipe is not None:
        recipes.get(chosen.recipe)  # a wrong name is reported before torch is imported
    from ..recipes.yaml_file import to_yaml
    from ..training import launch

    changes = given(chosen)
    how = {"device": chosen.device, "tensorboard": chosen.tensorboard, "track": chosen.track, "record": chosen.record}
    if chosen.resume is not None:
        others = {
            "a recipe": chosen.recipe,
            "--from": chosen.source,
            "--run": chosen.folder,
            "--dry-run": chosen.dry_run,
            "--pretrained": chosen.pretrained,
            "--augment": chosen.augment or chosen.attention,
        }
        launch.check_unchanged(changes, others)
        launch.start(Path(chosen.resume), None, **how)
        return
    recipe = launch.choose(chosen.recipe, chosen.source, changes, chosen.device, start_of(chosen))
    if chosen.dry_run:
        print(to_yaml(recipe), end="")
        return
    launch.start(Path(chosen.folder) if chosen.folder else launch.free_folder(recipe), recipe, **how)


def _record(chosen: argparse.Namespace) -> None:
    from ..runs.record import record_result

    for run in chosen.runs:
        print(f"recorded {run} in {record_result(run, chosen.results)}")
