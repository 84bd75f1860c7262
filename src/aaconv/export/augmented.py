"""A network that `augment` has changed, as a folder or on the Hugging Face hub: aaconv.save_model, aaconv.push_model.

Back by aaconv.load_model(FOLDER), or timm.create_model("local-dir:FOLDER", pretrained=True) where aaconv is imported.
What is written was loaded before, and gave the same weights and the same output to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..models.augmented import NAME
from ..models.weights import options_of
from ..runs.run_folder import CONFIG, WEIGHTS, write_json, write_weights
from ..utils.files import check_parent, naming_unwritable, resolved
from .hub import README, check_loads, check_repository, upload
from .model_card import augmented_card

KEPT = ("input_size", "mean", "std", "crop_pct", "interpolation", "pool_size", "first_conv", "classifier")
"""What of the base's pretrained_cfg holds for the augmented network, too."""


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    base: str | None = None,
    options: dict[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> Path:
    """Write config.json, model.safetensors and README.md of an augmented network into a new folder, all or none.

    base: the name it was built by before it was augmented, timm's, or torchvision/NAME; networks of timm know it.
    options: the keywords that it was built with; the numbers of classes and of input channels are known.
    classes: their names.

    >>> from aaconv import augment
    >>> model, _ = augment(timm.create_model("test_resnet"), 32, where="layer4.0.conv1", combine="add")
    >>> with TemporaryDirectory() as place:
    ...     sorted(file.name for file in save_model(model, Path(place) / "network").iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a new folder")
    check_parent(resolved(folder))
    with (
        naming_unwritable(folder),
        _bundle(model, folder.name, base, options, classes, resolved(folder).parent) as draft,
    ):
        draft.rename(resolved(folder))
    return folder


def push_model(
    model: nn.Module,
    repository: str,
    *,
    base: str | None = None,
    options: dict[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    private: bool = False,
) -> str:
    """Upload an augmented network to owner/name on the hub; the other arguments are save_model's.

    >>> push_model(nn.Sequential(), "network")
    Traceback (most recent call last):
    ValueError: the repository must be owner/name, got 'network'
    """
    check_repository(repository)
    with _bundle(model, repository, base, options, classes) as draft:
        return upload(draft, repository, f"Add {repository.rpartition('/')[2]}", private)


@contextmanager
def _bundle(
    model: nn.Module,
    name: str,
    base: str | None,
    options: dict[str, Any] | None,
    classes: Sequence[str] | None,
    parent: Path | None = None,
) -> Iterator[Path]:
    """A folder of what the hub holds, in a temporary one; gone afterwards, unless it was moved."""
    config = _config(model, base, options or {}, classes)
    with TemporaryDirectory(prefix=f".{name.rpartition('/')[2]}-", dir=parent) as place:
        draft = Path(place) / "hub"
        draft.mkdir()
        write_json(draft / CONFIG, config)
        write_weights(draft / WEIGHTS["last"], model.state_dict())
        (draft / README).write_text(augmented_card(model, config, name), encoding="utf-8")
        _check_same(draft, model, config)
        yield draft


def _config(
    model: nn.Module, base: str | None, options: dict[str, Any], classes: Sequence[str] | None
) -> dict[str, Any]:
    """config.json in timm's layout; the network is `augmented`, which builds the base and augments it again."""
    augmentations = getattr(model, "augmentations", None)
    if hasattr(model, "anchors"):
        raise ValueError("the model is a detector, which is saved with its run: aaconv push RUN --to FOLDER")
    if not augmentations:
        raise ValueError("the model was not changed by aaconv.augment: timm.models.save_for_hf saves others")
    known = getattr(model, "pretrained_cfg", None) or {}
    built = getattr(model, "augmented_from", None) or _built_by_timm(model, augmentations)
    base = base or built.pop("base", None)
    if base is None:
        raise ValueError("the model does not know its name: pass base='NAME' of timm, or base='torchvision/NAME'")
    images = augmentations[0]["example"][0]
    kept = {key: known[key] for key in KEPT if known.get(key) is not None}
    kept = {"input_size": images[1:]} | kept | {"num_classes": _number_of_classes(model, images)}
    if classes is not None and len(classes) != kept["num_classes"]:
        raise ValueError(f"{len(classes)} names of classes, but the network tells {kept['num_classes']} apart")
    return {
        "architecture": NAME,
        "num_classes": kept["num_classes"],
        "num_features": getattr(model, "num_features", None),
        "model_args": {"base": base, **built, **options, "augmentations": list(augmentations)},
        "pretrained_cfg": kept,
        **({"label_names": list(classes)} if classes is not None else {}),
    }


def _built_by_timm(model: nn.Module, augmentations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The base, and those of its keywords that the network itself tells."""
    known = getattr(model, "pretrained_cfg", None) or {}
    if not known.get("architecture"):
        return {}
    channels = augmentations[0]["example"][0][1]
    tag = f".{known['tag']}" if options_of(known) else ""  # which brings the options
    return {"base": known["architecture"] + tag, **({"in_chans": channels} if channels != 3 else {})}


def _number_of_classes(model: nn.Module, shape: Sequence[int]) -> int:
    logits = _output(model, shape)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError(
            "only networks that give logits [batch, classes] can be saved so; augment and save its backbone"
        )
    return logits.shape[1]


def _output(model: nn.Module, shape: Sequence[int]) -> Any:
    """On random images, the same every time, in eval mode and on the CPU."""
    model = copy.deepcopy(model).cpu().eval()
    like = next(model.parameters())
    images = torch.randn(1, *shape[1:], generator=torch.Generator().manual_seed(0)).to(like.dtype)
    with torch.no_grad():
        return model(images)


def _check_same(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """A ValueError unless the folder gives the network back."""
    hint = f"if the network is {config['model_args']['base']} with other keywords, pass them as options={{...}}"
    try:
        check_loads(folder, model)
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from None
    back = timm.create_model(f"local-dir:{folder}", pretrained=True).to(next(model.parameters()).dtype)
    shape = config["model_args"]["augmentations"][0]["example"][0]
    if not torch.equal(_output(back, shape), _output(model, shape)):
        raise ValueError(f"the network that timm builds of what was written computes something else; {hint}")
