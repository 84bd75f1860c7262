"""The model card of a run, README.md on the hub: what was trained, how well it does, what it costs, whom to cite."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import yaml

from ..cost.counting import count
from ..recipes.yaml_file import to_yaml
from ..runs.load import TrainedModel
from ..runs.metrics import metric_rows

TASKS = {"classify": "image-classification", "detect": "object-detection"}
CITATION = """@inproceedings{bello2019attention,
  title = {Attention Augmented Convolutional Networks},
  author = {Bello, Irwan and Zoph, Barret and Vaswani, Ashish and Shlens, Jonathon and Le, Quoc V.},
  booktitle = {IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2019}
}"""


def card_text(loaded: TrainedModel, name: str) -> str:
    """The model card in Markdown; name: owner/name on the hub, or that of a folder."""
    recipe, size = loaded.run_recipe, loaded.size
    data = recipe.data.rstrip("/").rpartition("/")[2]
    public = replace(recipe, data=data, data_dir=None)  # where data lie is nobody else's business
    where = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
    cost = count(loaded.model, (size, size))
    details = {
        "Model": f"{recipe.model.name}{''.join(f', {k}={v}' for k, v in recipe.model.options.items())}",
        "Dataset": data,
        "Image size": f"{size} x {size}",
        "Params": f"{cost.params:,}",
        "GFLOPs": f"{cost.true_gflops:.3f}, as the paper counts {cost.gflops:.3f}",
        "Paper": "https://arxiv.org/abs/1904.09925",
    }
    sections = {
        "Model Details": "\n".join(f"- **{title}:** {escape(text)}" for title, text in details.items()),
        "Model Usage": _code("python", _usage(where, loaded.task)),
        "Recipe": _code("yaml", to_yaml(public)),
        "Model Comparison": _metrics_text(loaded),
        "Citation": _code("bibtex", CITATION),
    }
    summary = f"{recipe.summary[:1].upper()}{recipe.summary[1:]}"
    title = f"# Model card for {escape(name.rpartition('/')[2])}"
    head = [_front_matter(loaded.task, data), title, f"{escape(summary)}. Trained with aaconv."]
    return "\n\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections.items())]) + "\n"


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _front_matter(task: str, data: str) -> str:
    known: dict[str, Any] = {
        "tags": [TASKS[task], "timm", "aaconv"],
        "pipeline_tag": TASKS[task],
        "library_name": "timm",
        "license": "apache-2.0",
        "datasets": [data.lower()],
    }
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---"


def _code(language: str, text: str) -> str:
    """A fenced block, its fence longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _usage(where: str, task: str) -> str:
    call = "detections = model([image])[0]" if task == "detect" else "logits = model(images)"
    return f"""import aaconv  # registers the network with timm
import timm

model = timm.create_model({json.dumps(where, ensure_ascii=False)}, pretrained=True).eval()
{call}  # normalised as config.json says"""


def _metrics_text(loaded: TrainedModel) -> str:
    rows = metric_rows(loaded.run_recipe, loaded.metrics)
    if not rows:
        return "These weights have no final metrics: the run is not finished, or it evaluated others."

    def written(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    lines = [f"| {name} | {written(ours)} | {written(paper)} |" for name, ours, paper in rows]
    return "\n".join(["| metric (%) | this model | the paper |", "| --- | --- | --- |", *lines])
