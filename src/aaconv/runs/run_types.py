"""What the files of a run hold, field by field: a person, or another program, may have changed them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from ..data.transforms import INTERPOLATION, INTERPOLATIONS
from ..recipes.recipe import LARGEST_SIZE
from ..tasks.task import DataInfo
from ..utils.metrics import TITLES
from ..utils.numbers import is_number, is_whole

Row = dict[str, Any]
Fits = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(map(_is_text, value))


def _is_measured(value: Any) -> bool:
    """A number, also one that is not finite; None: it was not measured."""
    return value is None or isinstance(value, float) or is_number(value)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _is_best(value: Any) -> bool:
    return value is None or (_is_mapping(value) and _is_count(value.get("epoch")) and is_number(value.get("value")))


def _are_rows(*needed: str) -> Fits:
    """Is it a list of rows, numbers by name, that all have an epoch and what is needed?"""

    def fits(value: Any) -> bool:
        if not isinstance(value, list) or not all(map(_is_mapping, value)):
            return False
        whole = all(_is_count(row.get("epoch")) and all(map(_is_measured, row.values())) for row in value)
        return whole and all(is_number(row.get(name)) for row in value for name in needed)

    return fits


SUMMARY_FIELDS: dict[str, Fits] = {
    **dict.fromkeys(("epochs", "steps", "parameters", "peak_memory_bytes"), _is_count),
    **dict.fromkeys((*TITLES, "loss", "train_loss"), _is_measured),
    "seconds_per_epoch": is_number,
    "best": _is_best,
    "finished": lambda value: isinstance(value, bool),
}
"""What summary.json may have: older runs lack some."""

STATE_FIELDS: dict[str, Fits] = {
    **dict.fromkeys(("epoch", "step"), _is_count),
    "rows": _are_rows("step", "train_loss"),
    "speed": _are_rows("seconds", "peak_memory_bytes"),
    "seconds": is_number,
    "best": _is_best,
    "sums": lambda value: isinstance(value, list) and bool(value) and all(map(_is_mapping, value)),
    "optimizer": _is_mapping,
    "scaler": _is_mapping,
}
"""What state.json of a checkpoint has, all of it."""


def check_fields(found: dict[str, Any], fields: dict[str, Fits], name: str | Path, *, needed: bool = False) -> None:
    """A ValueError names the first field that is not what a run writes; needed: or that is missing."""
    for field, fits in fields.items():
        if needed and field not in found:
            raise ValueError(f"{name} is not what a run writes: it lacks {field}")
        if field in found and not fits(found[field]):
            raise ValueError(f"{name} is not what a run writes: {field!r} is {str(found[field])[:40]!r}")


def data_info_of(config: dict[str, Any], name: str | Path) -> DataInfo:
    """What the network of a run was built for, out of its config.json."""
    known, classes = config.get("pretrained_cfg"), config.get("label_names")
    if not isinstance(classes, list) or not classes or not all(map(_is_text, classes)):
        raise ValueError(f"{name} is not what a run writes: 'label_names' must be the names of the classes")
    if not _is_mapping(known):
        raise ValueError(f"{name} is not what a run writes: it has no 'pretrained_cfg'")
    size = known.get("input_size")
    if not isinstance(size, list) or not size or not is_whole(size[-1]) or not 1 <= size[-1] <= LARGEST_SIZE:
        raise ValueError(f"{name} is not what a run writes: 'input_size' must end in 1 to {LARGEST_SIZE} pixels")
    for field in ("mean", "std"):
        values = known.get(field)
        if not isinstance(values, list) or len(values) != 3 or not all(map(is_number, values)):
            raise ValueError(f"{name} is not what a run writes: {field!r} must be three numbers")
    if min(known["std"]) <= 0:
        raise ValueError(f"{name} is not what a run writes: 'std' must be above 0")
    crop = known.get("crop_pct")
    if crop is not None and (not is_number(crop) or not 0.01 <= crop <= 1):
        raise ValueError(f"{name} is not what a run writes: 'crop_pct' must be 0.01 to 1")
    interpolation = known.get("interpolation") or INTERPOLATION
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"{name} is not what a run writes: 'interpolation' must be one of {', '.join(INTERPOLATIONS)}")
    return DataInfo(tuple(classes), tuple(known["mean"]), tuple(known["std"]), size[-1])


def category_ids_of(config: dict[str, Any], name: str | Path) -> tuple[int, ...]:
    """COCO's ids of a detector's classes; none where config.json says nothing."""
    ids = config.get("category_ids") or []
    if not isinstance(ids, list) or not all(map(is_whole, ids)):
        raise ValueError(f"{name} is not what a run writes: 'category_ids' must be whole numbers")
    return tuple(ids)
