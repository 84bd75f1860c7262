"""A run on the Hugging Face hub: `aaconv push`, and back by timm.create_model("hf-hub:...").

What is written or uploaded was loaded by timm before, and gave the same weights.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from torch import nn

from ..recipes.recipe import START_OPTIONS
from ..runs.load import TrainedModel, load_model, measured
from ..runs.run_folder import CONFIG, check_run, read_config
from ..utils.errors import one_line
from ..utils.files import check_parent, naming_unwritable, resolved
from .model_card import card_text

README = "README.md"


def save(run: str | Path, folder: str | Path, *, weights: str | None = None) -> Path:
    """Write config.json, model.safetensors and README.md, what the hub would hold, into a new folder, all or none."""
    folder = Path(folder)
    loaded = _load(run, weights)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a new folder")
    check_parent(resolved(folder))
    with naming_unwritable(folder), _bundle(loaded, folder.name, resolved(folder).parent) as draft:
        draft.rename(resolved(folder))
    return folder


def push(run: str | Path, repository: str, *, private: bool = False, weights: str | None = None) -> str:
    """Upload a run; the token is the hub's own (huggingface-cli login). Gives the address of the upload."""
    check_repository(repository)
    loaded = _load(run, weights)
    with _bundle(loaded, repository) as draft:
        message = f"Add {Path(run).resolve().name}"
        return upload(draft, repository, message, private, what=str(run), instead="--to DIR writes the folder here")


def check_repository(repository: str) -> None:
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"the repository must be owner/name, got {repository!r}")


def upload(
    folder: Path,
    repository: str,
    message: str,
    private: bool,
    *,
    what: str = "the network",
    instead: str = "aaconv.save_model writes a folder here",
) -> str:
    """Upload all files of the folder; gives the line that says where to. An OSError says what to do `instead`."""
    try:
        uploaded = _upload(folder, repository, message, private)
    except Exception as error:  # the hub's client raises errors of its own, of requests and of httpx
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise OSError(f"{what} was not uploaded to {repository}: {reason}; {instead}") from None
    return f"uploaded {what} to {getattr(uploaded, 'commit_url', uploaded)}"


def _upload(folder: Path, repository: str, message: str, private: bool) -> Any:
    """All files; a README.md that the repository has stays."""
    api = HfApi(library_name="timm", library_version=timm.__version__)
    repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
    if api.file_exists(repo_id=repository, filename=README):
        (folder / README).unlink()
    return api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)


def _load(run: str | Path, weights: str | None) -> TrainedModel:
    check_run(run)
    return measured(load_model(run, weights=weights), weights)


@contextmanager
def _bundle(loaded: TrainedModel, name: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder of what the hub holds, in a temporary one; gone afterwards, unless it was moved."""
    config, card = _config(loaded), card_text(loaded, name)
    with TemporaryDirectory(prefix=f".{name.rpartition('/')[2]}-", dir=parent) as place:
        draft = Path(place) / "hub"
        try:
            timm.models.save_for_hf(_ready(loaded), str(draft), model_config=config, safe_serialization=True)
        except SafetensorError as error:  # not an OSError, even where the disk is full
            raise OSError(f"{name} cannot be written: {error}") from None
        _open_to_others(draft / "model.safetensors")
        (draft / README).write_text(card, encoding="utf-8")
        check_loads(draft, loaded.model)
        yield draft


def _open_to_others(file: Path) -> None:
    """With the mode of any new file: safetensors writes one that nobody else may read."""
    copy = file.with_name(".copy")
    shutil.copyfile(file, copy)
    copy.replace(file)


def check_loads(folder: Path, model: nn.Module) -> None:
    """A ValueError unless timm builds the network out of the folder, with these weights."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            back = timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict()
    except Exception as error:  # whatever a constructor does not like
        raise ValueError(f"timm cannot load what was written, and it is not kept: {one_line(error)}") from None
    ours = model.state_dict()
    if list(back) != list(ours) or not all(torch.equal(ours[key].cpu(), back[key]) for key in ours):
        raise ValueError("timm loads other weights than were written, and they are not kept")


def _config(loaded: TrainedModel) -> dict[str, Any]:
    """The run's own config.json, which timm lays over what it finds in the network."""
    config = read_config(loaded.source)
    if "architecture" not in config:
        raise ValueError(f"{Path(loaded.source) / CONFIG} is not what a run writes")
    own = config.get("model_args")
    if isinstance(own, dict):
        config["model_args"] = {name: value for name, value in own.items() if name not in START_OPTIONS}
    return config


def _ready(loaded: TrainedModel) -> nn.Module:
    """The network with what timm asks of one; a detector has no width of its own."""
    if not hasattr(loaded.model, "num_features"):
        loaded.model.num_features = None  # type: ignore[assignment]
    return loaded.model
