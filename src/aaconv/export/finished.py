"""What a fine-tuned network is handed over with: its accuracy on the test images, a report, a page, an ONNX file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from ..data import Dataset, open_dataset
from ..data.class_names import class_title
from ..explore import write_page
from ..explore.capture import has_attention
from ..inference.evaluate import evaluate_model
from ..runs.load import TrainedModel, load_model
from ..runs.report import write_report
from ..runs.run_folder import check_finished
from ..tasks.data import open_data
from ..utils.device import pick_device
from .network import PACKAGES, export

PAGE, REPORT, NETWORK = "explore.html", "report.html", "model.onnx"
IMAGES = 6
"""On the page."""


def finish(run: str | Path, *, device: str | None = None, say: Callable[[str], None] = print) -> None:
    """Write explore.html, report.html and model.onnx into the folder of a finished run, of its best weights."""
    run = Path(run)
    check_finished(run)
    _say_test(run, pick_device(device), say)
    loaded = load_model(run, weights="best")
    page = _write_page(loaded, run / PAGE, say)
    say(f"wrote {write_report([run], run / REPORT, explorer=page)}")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        say(f"no {NETWORK}: it needs {', '.join(missing)}: pip install aaconv[export]")
    else:
        # Of a fixed size: to trace a large network for all sizes takes minutes, and `aaconv export` does it.
        export(loaded, run / NETWORK, fixed=True, say=lambda line: say(line) if line.startswith("wrote") else None)


def _say_test(run: Path, device: torch.device, say: Callable[[str], None]) -> None:
    """How good it is on images that nothing was chosen by, where there are any."""
    loaded = load_model(run, weights="best", device=device)
    recipe = loaded.run_recipe
    if not recipe.holdout:
        return
    try:
        test = open_dataset(recipe.data, recipe.data_dir, "test")
    except (FileNotFoundError, ValueError):
        say("there are no test images: the accuracy above is of the images that the best epoch was chosen by")
        return
    found = evaluate_model(loaded, test, device=device)
    say(f"test images: top-1 {found.metrics['top1']:.2f} % of {found.images:,}, by the weights of the best epoch")


def _write_page(loaded: TrainedModel, path: Path, say: Callable[[str], None]) -> Path | None:
    if not any(map(has_attention, loaded.model.modules())):
        say("no page: the network has no attention")
        return None
    dataset = open_data(loaded.run_recipe)[1]
    chosen = _spread(dataset)
    images, labels = zip(*(dataset[index] for index in chosen), strict=True)
    names = [class_title(dataset.classes[label]) for label in labels]
    say(str(write_page(loaded, list(images), path, names=names)))
    return path


def _spread(dataset: Dataset) -> list[int]:
    """Images at even distances."""
    number = min(IMAGES, len(dataset))
    return [index * len(dataset) // number for index in range(number)]
