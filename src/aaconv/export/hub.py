"""A run on the Hugging Face hub, through timm's own code: `aaconv push`, and back by timm.create_model("hf-hub:...").

The model card says what was trained, how well it does, what it costs and whom to cite.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
from safetensors import SafetensorError
from timm.models._hub import generate_readme
from torch import nn

from ..cost.counting import count
from ..recipes.yaml_file import to_yaml
from ..runs.load import TrainedModel, load_model, measured
from ..runs.metrics import metric_rows
from ..runs.run_folder import CONFIG, check_run, read_config
from ..utils.files import check_parent, naming_unwritable

TASKS = {"classify": "image-classification", "detect": "object-detection"}
CITATION = """@inproceedings{bello2019attention,
  title = {Attention Augmented Convolutional Networks},
  author = {Bello, Irwan and Zoph, Barret and Vaswani, Ashish and Shlens, Jonathon and Le, Quoc V.},
  booktitle = {IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2019}
}"""


def save(run: str | Path, folder: str | Path, *, weights: str | None = None) -> Path:
    """Write config.json, model.safetensors and README.md, what the hub would hold, into a new folder, all or none."""
    folder = Path(folder)
    loaded = _load(run, weights)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a new folder")
    check_parent(folder.resolve())
    config, card = _config(loaded), card_text(loaded, folder.name)
    with naming_unwritable(folder), TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.resolve().parent) as place:
        draft = Path(place) / "hub"
        try:
            timm.models.save_for_hf(_ready(loaded), draft, model_config=config, safe_serialization=True)
        except SafetensorError as error:  # not an OSError, even where the disk is full
            raise OSError(f"{folder} cannot be written: {error}") from None
        (draft / "README.md").write_text(card, encoding="utf-8")
        draft.rename(folder.resolve())
    return folder


def push(run: str | Path, repository: str, *, private: bool = False, weights: str | None = None) -> str:
    """Upload a run; the token is the hub's own (huggingface-cli login). Gives the address of the upload."""
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"the repository must be owner/name, got {repository!r}")
    loaded = _load(run, weights)
    try:
        uploaded = timm.models.push_to_hf_hub(
            _ready(loaded),
            repository,
            commit_message=f"Add {Path(run).resolve().name}",
            private=private,
            model_config=_config(loaded),
            model_card=card(loaded, repository),
            task_name=TASKS[loaded.task],
            safe_serialization=True,
        )
    except Exception as error:  # the hub's client raises errors of its own, of requests and of httpx
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise OSError(f"{run} was not uploaded to {repository}: {reason}; --to DIR writes the folder here") from None
    return f"uploaded {run} to {getattr(uploaded, 'commit_url', uploaded)}"


def _load(run: str | Path, weights: str | None) -> TrainedModel:
    check_run(run)
    return measured(load_model(run, weights=weights), weights)


def _config(loaded: TrainedModel) -> dict[str, Any]:
    """The run's own config.json, which timm lays over what it finds in the network."""
    config = read_config(loaded.source)
    if "architecture" not in config:
        raise ValueError(f"{Path(loaded.source) / CONFIG} is not what a run writes")
    return config


def _ready(loaded: TrainedModel) -> nn.Module:
    """The network with what timm asks of one; a detector has no width of its own."""
    if not hasattr(loaded.model, "num_features"):
        loaded.model.num_features = None
    return loaded.model


def card_text(loaded: TrainedModel, name: str) -> str:
    """The model card, README.md."""
    return generate_readme(card(loaded, name), name.rpartition("/")[2], task_name=TASKS[loaded.task])


def card(loaded: TrainedModel, name: str) -> dict[str, Any]:
    """The parts of a model card, as timm puts them together; name: owner/name, or that of a folder."""
    recipe, size = loaded.recipe, loaded.size
    cost = count(loaded.model, (size, size))
    data = recipe.data.rstrip("/").rpartition("/")[2]
    public = replace(recipe, data=data, data_dir=None)  # where data lie is nobody else's business
    where = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
    details = {
        "Model": f"{recipe.model.name}{''.join(f', {k}={v}' for k, v in recipe.model.options.items())}",
        "Dataset": data,
        "Image size": f"{size} x {size}",
        "Params": f"{cost.params:,}",
        "GFLOPs": f"{cost.true_gflops:.3f}, as the paper counts {cost.gflops:.3f}",
        "Paper": "https://arxiv.org/abs/1904.09925",
    }
    return {
        "tags": [TASKS[loaded.task], "timm", "aaconv"],
        "description": f"{recipe.summary[:1].upper()}{recipe.summary[1:]}. Trained with aaconv.",
        "details": details,
        "usage": f"{_usage(where, loaded.task)}\n\n## Recipe\n\n```yaml\n{to_yaml(public)}```",
        "comparison": _metrics_text(loaded),
        "citation": CITATION,
    }


def _usage(where: str, task: str) -> str:
    call = "detections = model([image])[0]" if task == "detect" else "logits = model(images)"
    return f'''
```python
import aaconv  # registers the network with timm
import timm

model = timm.create_model("{where}", pretrained=True).eval()
{call}  # normalised as config.json says
```'''


def _metrics_text(loaded: TrainedModel) -> str:
    rows = metric_rows(loaded)
    if not rows:
        return "These weights have no final metrics: the run is not finished, or it evaluated others."

    def written(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    lines = [f"| {name} | {written(ours)} | {written(paper)} |" for name, ours, paper in rows]
    return "\n".join(["", "| metric (%) | this model | the paper |", "| --- | --- | --- |", *lines])
