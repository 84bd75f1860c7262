"""Networks that training starts from: by a name, with weights, and with attention put into them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.weights_folder import own_file, short_sha256
from .recipe import Model

AUGMENTED = "augmented"
"""The registered name of networks with attention put into them; aaconv.models.augmented."""
DETECTOR = "augmented_retinanet"
"""The same of detectors; aaconv.models.augmented_retinanet."""


@dataclass(frozen=True)
class Start:
    """What a network begins as. pretrained: True for its own weights, or a file; where: the convolutions to augment, a
    glob or names, None for none; attention: keywords of augment."""

    pretrained: bool | str = False
    where: str | tuple[str, ...] | None = None
    attention: dict[str, Any] = field(default_factory=dict)


def start_from(model: Model, start: Start) -> Model:
    """The model of a recipe with this start; attention is added behind closed gates unless combine says otherwise."""
    name, options = model.name, dict(model.options)
    if start.pretrained:
        file = own_file(model.base) if start.pretrained is True else Path(start.pretrained)
        options["pretrained"] = True
        if file is not None:
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file} with weights")
            options["pretrained_cfg_overlay"] = {"file": str(file.resolve()), "sha256": short_sha256(file)}
    if start.where is None:
        if start.attention:
            raise ValueError(f"{', '.join(start.attention)}: options of attention need --augment WHERE")
        return Model(name, options)
    if options.get("augmentations"):
        raise ValueError("the network is augmented already; leave out --augment, or name another with --model")
    where = start.where if isinstance(start.where, str) else list(start.where)
    usual = {} if "instead" in start.attention else {"combine": "add"}
    augmentations = [{"where": where, **usual, **start.attention}]
    if name in (AUGMENTED, DETECTOR):
        return Model(name, options | {"augmentations": augmentations})
    return Model(AUGMENTED, {"base": name, **options, "augmentations": augmentations})
