"""The command finetune: from a folder of class folders to a trained network, its report, page and ONNX file."""

import argparse
import os
from pathlib import Path

from .parsing import Parser
from .recipe_options import add_options, given
from .source import add_device
from .train import add_start, start_of


def add_commands(commands: Parser) -> None:
    about = "fine-tune a network, attention added, on a folder"
    finetune = commands.add("finetune", _finetune, about, "resnet50 photos --epochs 10")
    finetune.usage = """\
aaconv finetune MODEL DATA [--augment WHERE] [--run DIR]
                       [--FIELD VALUE ...] [option ...]"""
    finetune.add_argument("network", metavar="MODEL", help="a name of timm's, or a file of weights called after one")
    finetune.add_argument("images", metavar="DATA", help="a folder with one folder per class, or a data set's name")
    add_start(finetune, "default: the convolutions of the last stage; none: no attention")
    finetune.add_argument("--scratch", action="store_true", help="start without pretrained weights")
    finetune.add_argument("--run", dest="folder", metavar="DIR", help="folder for the run, default: runs/NAME-seedN")
    add_device(finetune)
    finetune.add_argument("--no-pages", action="store_true", help="no report.html, explore.html and model.onnx")
    finetune.add_argument("--dry-run", action="store_true", help="print the recipe, and stop")
    add_options(finetune, without=("model", "data", "task"))


def _finetune(chosen: argparse.Namespace) -> None:
    from dataclasses import replace

    from ..recipes.yaml_file import to_yaml
    from ..training import launch
    from ..training.finetune import LAST_STAGE, finetune_recipe

    if chosen.scratch and chosen.pretrained is not None:
        raise ValueError("--scratch starts without weights, --pretrained with some: leave out one")
    start = start_of(chosen)
    if chosen.augment is None:
        start = replace(start, where=LAST_STAGE)
    if chosen.pretrained is None:
        start = replace(start, pretrained=not chosen.scratch)
    recipe = finetune_recipe(chosen.network, chosen.images, start, given(chosen), device=chosen.device)
    if chosen.dry_run:
        print(to_yaml(recipe), end="")
        return
    run = Path(chosen.folder) if chosen.folder else launch.free_folder(recipe)
    launch.start(run, recipe, device=chosen.device, tensorboard=chosen.tensorboard, track=chosen.track)
    if os.environ.get("RANK", "0") == "0" and not chosen.no_pages:
        from ..export.finished import finish

        finish(run, device=chosen.device)
