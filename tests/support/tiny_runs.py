"""Runs for tests: one that is really trained, in two seconds, and ones that are only written down."""

from safetensors.torch import load_file, save_file

from aaconv import recipes
from aaconv.runs import run_folder
from aaconv.training.trainer import train

TINY = {"epochs": 1, "batch": 16, "train_limit": 32, "eval_limit": 48}


def train_tiny(folder, name="demo-plain", **changes):
    """The folder of a finished run of a recipe on `shapes`."""
    train(recipes.override(recipes.get(name), TINY | changes), folder, device="cpu")
    return folder


def write_epochs(folder, name, accuracies, **changes):
    """A run folder with a recipe and metrics, as it is while a run goes on; None: no evaluation in that epoch."""
    folder.mkdir(parents=True)
    recipes.save(recipes.override(recipes.get(name), changes), folder / run_folder.RECIPE)
    rows = [
        {"epoch": epoch, "step": 10 * epoch, "lr": 0.1, "train_loss": 3 / epoch, "train_top1": 10.0 + epoch}
        | {"loss": None if top1 is None else 4 / epoch, "top1": top1, "top5": top1}
        for epoch, top1 in enumerate(accuracies, 1)
    ]
    run_folder.write_rows(folder / run_folder.METRICS, rows, list(rows[0]))
    return folder


def break_weights(run, file, factor=1e30):
    """Write the last weights of a run with matrices so large that the network gives no finite numbers."""
    tensors = load_file(run / run_folder.WEIGHTS["last"])
    save_file({name: factor * one if one.dim() > 1 else one for name, one in tensors.items()}, file)
    return file
