"""A file of weights that a network starts from: read, and checked against what timm has taken from it.

timm loads without a word about what is missing where the number of classes is another, and for features_only.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..recipes.recipe import Model
from ..utils.weights import Tensors, read_weights
from ..utils.weights_folder import own_file, short_sha256

NORM_OF_THE_HEAD = "fc_norm"
"""What timm's transformers have before the classifier where they average over the image."""


def file_of(model: Model) -> str | Path | None:
    """The file that a network starts from: the one that is named, or one that a person has put where files of
    pretrained weights are looked for."""
    overlay = model.options.get("pretrained_cfg_overlay")
    if overlay is None and model.options.get("pretrained"):
        return own_file(model.base)
    if not isinstance(overlay, dict):
        return None
    if "sha256" in overlay and "file" not in overlay:
        wanted = overlay["sha256"]
        raise ValueError(f"the recipe starts from weights with the sha256 {wanted}; name a file with --pretrained FILE")
    return overlay.get("file")


def with_weights(model: Model, file: str | Path) -> dict[str, Any]:
    """The keywords of a network, with the tensors of the file in the place of its name: timm itself would run what a
    pickle asks for."""
    tensors = read_weights(file)
    if not tensors:
        raise ValueError(f"{file} holds no tensors; name another file with --pretrained FILE")
    overlay = model.options.get("pretrained_cfg_overlay") or {}
    wanted = overlay.get("sha256")
    if wanted is not None and (found := short_sha256(file)) != wanted:
        raise ValueError(
            f"{file} is not what it was: its sha256 begins with {found}, the recipe's with {wanted}; name the file "
            "again with --pretrained FILE"
        )
    others = {name: value for name, value in overlay.items() if name not in ("file", "sha256")}
    return model.options | {"pretrained_cfg_overlay": others | {"state_dict": tensors}}


@dataclass(frozen=True)
class Load:
    """The tensors of a network that weights were loaded into, by name, and the names that got none."""

    tensors: Tensors
    missing: set[str]
    head: tuple[str, ...]


@contextmanager
def watching_loads() -> Iterator[list[Load]]:
    """Within it, every state dict that a network loads: behind timm's filters, which know files with other names. What
    timm would say of tensors that are left over is not said: those of a head are, and `check_loaded` finds the rest."""
    loads: list[Load] = []
    load = nn.Module.load_state_dict

    def watched(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        result = load(self, *arguments, **keywords)
        # As objects: features_only keeps them under other names.
        loads.append(Load(self.state_dict(keep_vars=True), set(result.missing_keys), _head_of(self)))
        return result

    builder = logging.getLogger("timm.models._builder")
    builder.addFilter(_is_not_about_the_rest)
    nn.Module.load_state_dict = watched  # type: ignore[method-assign]
    try:
        yield loads
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]
        builder.removeFilter(_is_not_about_the_rest)


def _is_not_about_the_rest(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Unexpected keys")


def check_loaded(network: nn.Module, loads: list[Load], file: str | Path, base: str) -> None:
    """A ValueError where tensors of the network came from no file; those of the head may, it is for other classes."""
    used = {id(tensor) for tensor in network.state_dict(keep_vars=True).values()}
    for one in loads:
        needed = [name for name, tensor in one.tensors.items() if id(tensor) in used and _counts(name, tensor, one)]
        missing = [name for name in needed if name in one.missing]
        if missing:
            has = f"it has {len(needed) - len(missing)} of the {len(needed)} tensors before the head, not {missing[0]}"
            raise ValueError(misfit(file, base, has))


def misfit(file: str | Path, base: str, why: str) -> str:
    return f"{file} does not fit {base}: {why}; name a file of {base}'s own weights with --pretrained FILE"


def _counts(name: str, tensor: Tensor, load: Load) -> bool:
    """Whole numbers are counters and tables that follow from the shape."""
    return tensor.is_floating_point() and name.partition(".")[0] not in load.head


def _head_of(model: nn.Module) -> tuple[str, ...]:
    """The parts of a network with what timm calls its classifiers: head of head.fc."""
    names = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = (names,) if isinstance(names, str) else names
    return (NORM_OF_THE_HEAD, *(name.partition(".")[0] for name in names))
