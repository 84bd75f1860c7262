"""The model card of a run, README.md on the hub: what was trained, how well it does, what it costs, whom to cite."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml
from torch import nn

from ..cost.counting import count
from ..cost.totals import Cost
from ..models import create_without_memory
from ..recipes.recipe import Model
from ..recipes.yaml_file import to_yaml
from ..runs.load import TrainedModel
from ..runs.metrics import metric_rows
from ..utils.metrics import metric_title, telling

TASKS = {"classify": "image-classification", "detect": "object-detection"}
METRICS = {"top-1": "accuracy", "mAP": "mean_average_precision"}
"""What the hub calls them."""
CITATION = """@inproceedings{bello2019attention,
  title = {Attention Augmented Convolutional Networks},
  author = {Bello, Irwan and Zoph, Barret and Vaswani, Ashish and Shlens, Jonathon and Le, Quoc V.},
  booktitle = {IEEE/CVF International Conference on Computer Vision (ICCV)},
  year = {2019}
}"""


IMPORTS = {"classify": "", "detect": "from torchvision.transforms.v2 import functional\n"}
CALLS = {
    "classify": """transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.no_grad():
    probabilities = model(transform(image)[None]).softmax(-1)[0]
names = model.pretrained_cfg.get("label_names") or range(model.num_classes)
print(names[int(probabilities.argmax())], float(probabilities.max()))""",
    "detect": """pixels = functional.pil_to_tensor(image).float() / 255
found = model([functional.normalize(pixels, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])])[0]
names = model.pretrained_cfg.get("label_names") or range(model.num_classes)
for box, score, label in zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist()):
    print(names[label], score, box)""",
}


def card_text(loaded: TrainedModel, name: str) -> str:
    """The model card in Markdown; name: owner/name on the hub, or that of a folder."""
    recipe, size = loaded.run_recipe, loaded.size
    data = recipe.data.rstrip("/").rpartition("/")[2]
    network = Model(recipe.model.name, recipe.model.network_options)
    public = replace(recipe, data=data, data_dir=None, model=network)  # where files lie is nobody else's business
    where = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
    details = _network_details(network, data, size, count(loaded.model, (size, size)))
    sections = {
        "Model Details": _list(details),
        "Model Usage": _code("python", _usage(where, loaded.task)),
        "Recipe": _code("yaml", to_yaml(public)),
        "Model Comparison": _metrics_text(loaded),
        "Citation": _code("bibtex", CITATION),
    }
    metrics = {title: ours for title, ours, _ in metric_rows(recipe, loaded.metrics or {}) if ours is not None}
    summary = f"{escape(f'{recipe.summary[:1].upper()}{recipe.summary[1:]}')}. Trained with aaconv."
    return _card(name, _front_matter(loaded.task, data, name, metrics), summary, sections)


def shipped_card(name: str, facts: Mapping[str, Any]) -> str:
    """The model card of weights in the package, NAME.TAG, from the JSON file beside them."""
    network, size = Model(facts["architecture"], facts.get("options", {})), facts["input_size"][-1]
    model = create_without_memory(network.name, num_classes=facts["num_classes"], **network.options)
    details = _network_details(network, facts["data"], size, count(model, (size, size)))
    details["Storage"] = f"matrices in {facts.get('dtype', 'float16')}, sha256 {facts['sha256']}"
    training = {
        "Recipe": f"{facts['recipe']}, seed {facts['seed']}, {facts['epochs']} epochs",
        "Changed": ", ".join(f"{key}={value}" for key, value in facts["overrides"].items()) or "nothing",
        "Device": facts["device"] or "unknown",
        "Commit": facts["commit"] or "unknown",
    }
    metrics = {metric_title(key): value for key, value in telling(facts).items()}
    sections = {
        "Model Details": _list(details),
        "Model Usage": _code("python", _usage(name, "classify")),
        "Training": _list(training),
        "Evaluation": _evaluation(facts, metrics),
        "Citation": _code("bibtex", CITATION),
    }
    return _card(name, _front_matter("classify", facts["data"], name, metrics), "Trained with aaconv.", sections)


def _evaluation(facts: Mapping[str, Any], metrics: dict[str, float]) -> str:
    chosen = {"best": "those of the best epoch, chosen by these very images", "ema": "the average", "last": "the last"}
    weights = chosen.get(facts["weights"], facts["weights"])
    where = f"The file, in float32, on all {facts['images']:,} test images of {facts['data']}. Weights: {weights}."
    rows = [f"| {title} | {value:.2f} |" for title, value in metrics.items()]
    table = ["| metric (%) | this file |", "| --- | --- |", *rows]
    return "\n".join([escape(where), "How they were chosen among runs: docs/results.md.", "", *table])


def augmented_card(model: nn.Module, config: dict[str, Any], name: str) -> str:
    """The model card of a network that augment has changed: how it was made, and how to load it."""
    where = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
    arguments = config["model_args"]
    details = {
        "Model": f"{arguments['base']}, attention augmented",
        "Classes": f"{config['num_classes']:,}",
        "Params": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "Paper": "https://arxiv.org/abs/1904.09925",
    }
    known = {"tags": [TASKS["classify"], "timm", "aaconv"], "pipeline_tag": TASKS["classify"], "library_name": "timm"}
    sections = {
        "Model Details": _list(details),
        "Model Usage": _code("python", _usage(where, "classify")),
        "Augmentation": _code("json", json.dumps(arguments, indent=2, ensure_ascii=False)),
        "Citation": _code("bibtex", CITATION),
    }
    return _card(name, known, "", sections)


def escape(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _card(name: str, front: dict[str, Any], summary: str, sections: dict[str, str]) -> str:
    front_matter = f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---"
    head = [front_matter, f"# Model card for {escape(name.rpartition('/')[2])}", *([summary] if summary else [])]
    return "\n\n".join([*head, *(f"## {title}\n\n{text}" for title, text in sections.items())]) + "\n"


def _network_details(network: Model, data: str, size: int, cost: Cost) -> dict[str, str]:
    return {
        "Model": f"{network.name}{''.join(f', {k}={v}' for k, v in network.options.items())}",
        "Dataset": data,
        "Image size": f"{size} x {size}",
        "Params": f"{cost.params:,}",
        "GFLOPs": f"{cost.true_gflops:.3f}, as the paper counts {cost.gflops:.3f}",
        "Paper": "https://arxiv.org/abs/1904.09925",
    }


def _list(details: dict[str, str]) -> str:
    return "\n".join(f"- **{title}:** {escape(text)}" for title, text in details.items())


def _front_matter(task: str, data: str, name: str, metrics: dict[str, float]) -> dict[str, Any]:
    """With the metrics, by their titles, as the hub reads evaluation results."""
    known: dict[str, Any] = {
        "tags": [TASKS[task], "timm", "aaconv"],
        "pipeline_tag": TASKS[task],
        "library_name": "timm",
        "license": "apache-2.0",
        "datasets": [data.lower()],
    }
    if metrics:
        rows = [
            {"type": METRICS.get(title, title), "name": f"{title} (%)", "value": round(value, 4)}
            for title, value in metrics.items()
        ]
        result = {"task": {"type": TASKS[task]}, "dataset": {"name": data, "type": data.lower()}, "metrics": rows}
        known["model-index"] = [{"name": name.rpartition("/")[2], "results": [result]}]
    return known


def _code(language: str, text: str) -> str:
    """A fenced block, its fence longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _usage(where: str, task: str) -> str:
    return f"""import aaconv  # registers the network with timm
import timm
import torch
from PIL import Image
{IMPORTS[task]}
model = timm.create_model({json.dumps(where, ensure_ascii=False)}, pretrained=True).eval()
image = Image.new("RGB", (640, 480))  # or Image.open("photo.jpg").convert("RGB")
{CALLS[task]}"""


def _metrics_text(loaded: TrainedModel) -> str:
    rows = metric_rows(loaded.run_recipe, loaded.metrics)
    if not rows:
        return "These weights have no final metrics: the run is not finished, or it evaluated others."

    def written(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    lines = [f"| {name} | {written(ours)} | {written(paper)} |" for name, ours, paper in rows]
    return "\n".join(["| metric (%) | this model | the paper |", "| --- | --- | --- |", *lines])
