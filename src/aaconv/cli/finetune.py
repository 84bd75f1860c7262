"""The command finetune: from a folder of class folders to a trained network, its report, page and ONNX file."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .parsing import Parser
from .recipe_options import add_options, given
from .source import add_device
from .train import add_start, start_of

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe


def add_commands(commands: Parser) -> None:
    about = "fine-tune a network, attention added, on a folder"
    finetune = commands.add("finetune", _finetune, about, "resnet50 photos --epochs 10")
    finetune.usage = """\
aaconv finetune [MODEL DATA | --resume RUN] [--augment WHERE] [--run DIR]
                       [--FIELD VALUE ...] [option ...]"""
    name = "a name of timm's, or a file of weights called after one"
    finetune.add_argument("network", nargs="?", metavar="MODEL", help=name)
    data = "a folder with one folder per class, or a data set's name"
    finetune.add_argument("images", nargs="?", metavar="DATA", help=data)
    finetune.add_argument("--resume", metavar="RUN", help="resume a run that was interrupted, instead of MODEL DATA")
    add_start(finetune, "default: the convolutions of the last stage; none: no attention")
    finetune.add_argument("--scratch", action="store_true", help="start without pretrained weights")
    finetune.add_argument("--run", dest="folder", metavar="DIR", help="folder for the run, default: runs/NAME-seedN")
    add_device(finetune)
    finetune.add_argument("--no-pages", action="store_true", help="no report.html, explore.html and model.onnx")
    finetune.add_argument("--dry-run", action="store_true", help="print the recipe, and stop")
    add_options(finetune, without=("model", "data", "task"))


def _finetune(chosen: argparse.Namespace) -> None:
    from ..recipes.yaml_file import to_yaml
    from ..training import launch
    from ..training.trainer import Stopped

    how = {"device": chosen.device, "tensorboard": chosen.tensorboard, "track": chosen.track}
    writes_pages = os.environ.get("RANK", "0") == "0" and not chosen.no_pages
    if chosen.resume is not None:
        options = ("pretrained", "augment", "scratch", "dry_run")
        others = {f"--{name.replace('_', '-')}": getattr(chosen, name) for name in options}
        others |= {"MODEL": chosen.network, "--augment.OPTION": chosen.attention, "--run": chosen.folder}
        launch.check_unchanged(given(chosen), others)
        run, recipe = Path(chosen.resume), None
    else:
        recipe = _recipe(chosen)
        if chosen.dry_run:
            print(to_yaml(recipe), end="")
            return
        run = Path(chosen.folder) if chosen.folder else launch.free_folder(recipe)
    try:
        launch.start(run, recipe, **how)
    except Stopped:
        if writes_pages:
            print(f"aaconv: or with: aaconv finetune --resume {run}, which writes its pages, too", file=sys.stderr)
        raise
    if writes_pages:
        from ..export.finished import finish

        finish(run, device=chosen.device)


def _recipe(chosen: argparse.Namespace) -> "Recipe":
    from ..training.finetune import LAST_STAGE, finetune_recipe

    if chosen.images is None:
        raise ValueError("name a network and a folder of images, such as resnet50 photos, or a run with --resume")
    if chosen.scratch and chosen.pretrained is not None:
        raise ValueError("--scratch starts without weights, --pretrained with some: leave out one")
    start = start_of(chosen)
    if chosen.augment is None:
        start = replace(start, where=LAST_STAGE)
    if chosen.pretrained is None:
        start = replace(start, pretrained=not chosen.scratch)
    return finetune_recipe(chosen.network, chosen.images, start, given(chosen), device=chosen.device)
