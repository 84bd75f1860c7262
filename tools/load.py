"""How much the package bears: many images, many steps, many runs, many pictures. A line for each, in minutes.

    make load
    python tools/load.py images --number 200000     # opening a folder of them, and the first batch
    python tools/load.py steps --number 2000        # resident memory while training, with and without data workers
    python tools/load.py report --number 500        # the page about so many runs
    python tools/load.py page --number 50           # the explorer's page of so many images

Without a part it runs them all, each in a process of its own: memory is that of the process, in MiB above what it has
when the package is imported. Needs Linux.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

CLASSES = 100
NUMBERS = {"images": 200_000, "steps": 2_000, "report": 500, "page": 50}
EXPERIMENTS = 100
"""Different ones among the runs of a report; the others are their seeds."""


def resident() -> float:
    """MiB that this process and those that it has started hold, what they share counted once; no files."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = 0
    for process in ("self", *children):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        found = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        total += found["Pss_Anon"] + found["SwapPss"]
    return total / 1024


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def make_images(root: Path, number: int, side: int = 40) -> Path:
    """A folder of train and val images, one file for each class and links to it: made in seconds."""
    for split, total in (("train", number), ("val", number // 20)):
        for label in range(CLASSES):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            first = folder / f"{folder.name}_0.jpg"
            Image.new("RGB", (side + 8, side), (label, 2 * label, 90)).save(first)
            for index in range(1, max(1, total // CLASSES)):
                os.link(first, folder / f"{folder.name}_{index}.jpg")
    return root


def load_images(number: int) -> None:
    from aaconv.data import make_loader, open_dataset

    seconds: dict[str, float] = {}
    with TemporaryDirectory() as place:
        root = make_images(Path(place), number)
        before, highest = resident(), peak()
        with clock(seconds, "training images"):
            train = open_dataset(f"folder/{root}", split="train")
        with clock(seconds, "test images"):
            open_dataset(f"folder/{root}", split="test")
        with clock(seconds, "first batch"):
            next(iter(make_loader(train, 64, train=True, size=32, workers=0).batches()))
        times = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(
            f"images: {len(train):,} opened: {times}; memory {resident() - before:+.0f}, peak {peak() - highest:+.0f}"
        )


def load_steps(number: int) -> None:
    from aaconv import recipes

    with TemporaryDirectory() as place:
        images = make_images(Path(place) / "images", 20_000)
        kept = {"train_limit": 800, "eval_limit": 16}
        of_workers = {"data": f"folder/{images}", "size": 32, "workers": 2, "train_limit": 3_200, "eval_limit": 16}
        for name, changes in (("in memory", kept), ("2 data workers", of_workers)):
            recipe = recipes.override(recipes.get("demo-aa"), {"batch": 16, "epochs": 10**6, **changes})
            seen = memory_of_steps(recipe, Path(place) / name, number)
            marks = [seen[int(part * (len(seen) - 1))] for part in (0.1, 0.5, 1)]
            grown = ", ".join(f"{value - marks[0]:+.1f}" for value in marks[1:])
            print(f"steps: {number:,}, images {name}: {marks[0]:.0f} MiB after a tenth, then {grown}")


def memory_of_steps(recipe, run: Path, number: int) -> list[float]:
    """MiB after each epoch of a training run, workers included, until it has made so many steps."""
    import torch

    from aaconv.training.trainer import Trainer
    from aaconv.utils.distributed import World

    trainer, seen = Trainer(recipe, run, World(torch.device("cpu"))), []
    while trainer.steps < number:
        trainer.train_epoch()
        trainer.finish_epoch()
        seen.append(resident())
    return seen


def make_runs(root: Path, number: int) -> list[Path]:
    """Run folders: two that are trained, and copies of them with other learning rates and seeds."""
    from aaconv import recipes
    from aaconv.training.trainer import train

    short, made = {"epochs": 3, "batch": 16, "train_limit": 32, "eval_limit": 48}, []
    originals = [root / "demo-aa", root / "demo-plain"]
    with redirect_stdout(None):
        for path in originals:
            train(recipes.override(recipes.get(path.name), short), path, device="cpu")
    for index in range(number):
        source, run = originals[index % 2], root / f"run-{index:04d}"
        shutil.copytree(source, run, copy_function=os.link, ignore=shutil.ignore_patterns("recipe.yaml", "checkpoints"))
        changes = {"lr": 0.001 * (1 + index % EXPERIMENTS), "seed": index // EXPERIMENTS}
        recipes.save(recipes.override(recipes.load(source / "recipe.yaml"), changes), run / "recipe.yaml")
        made.append(run)
    return made


def load_report(number: int) -> None:
    from aaconv.runs.report import write_report

    seconds: dict[str, float] = {}
    with TemporaryDirectory() as place:
        runs, page = make_runs(Path(place), number), Path(place) / "report.html"
        before = peak()
        with clock(seconds, "written"):
            write_report(runs, page)
        size, more = page.stat().st_size / 1e6, peak() - before
        print(f"report: {number} runs in {seconds['written']:.1f} s, {size:.2f} MB; peak memory {more:+.0f}")


def load_page(number: int) -> None:
    from aaconv.explore import write_page

    seconds: dict[str, float] = {}
    with TemporaryDirectory() as place:
        images = [Image.effect_noise((224, 224), 60).convert("RGB") for _ in range(number)]
        for model in ("aa_small", "aa_resnet50"):
            with clock(seconds, model):
                try:
                    said = str(write_page(model, images, Path(place) / f"{model}.html"))
                except ValueError as error:
                    said = str(error)
            print(f"page: {model}: {said.replace(f'{place}/', '')}, {seconds[model]:.1f} s")


PARTS = {"images": load_images, "steps": load_steps, "report": load_report, "page": load_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all of them")
    parser.add_argument("--number", type=int, help="of images, steps, runs or pictures")
    args = parser.parse_args()
    if args.part is None:
        for part in PARTS:
            subprocess.run([sys.executable, __file__, part], check=True)
        return
    import aaconv.data
    import aaconv.training.trainer  # noqa: F401

    PARTS[args.part](args.number or NUMBERS[args.part])


if __name__ == "__main__":
    main()
