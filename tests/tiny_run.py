"""A finished training run in seconds, for what reads run folders."""

from dataclasses import replace

from aaconv import recipes
from aaconv.train import train


def make_run(folder, recipe="demo-aa", **changes):
    """Two epochs of a few steps on shapes."""
    short = {"epochs": 2, "train_limit": 128, "eval_limit": 64, "batch": 32}
    train(replace(recipes.get(recipe), **(short | changes)), folder, device="cpu")
    return folder
