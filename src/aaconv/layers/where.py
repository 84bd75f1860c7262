"""Which convolutions of a network augment takes, and what to take instead of those that it cannot."""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

Where = str | re.Pattern[str] | Iterable[str] | Callable[[str, nn.Conv2d], bool]


def choose(model: nn.Module, where: Where, *, whole: bool, grouped: bool) -> dict[nn.Conv2d, list[str]]:
    """The convolutions that `where` names, each with all the names it has in the model.

    whole: they stay whole, so that their groups do not matter; else `grouped` asks for grouped ones.
    """
    convs = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Conv2d) and not _inside_augmented(model, name)
    }
    matches = _matcher(where, convs)
    chosen: dict[nn.Conv2d, list[str]] = {}
    for name, conv in convs.items():
        if matches(name, conv) or conv in chosen:
            chosen.setdefault(conv, []).append(name)
    if not convs:
        raise ValueError("the model has no Conv2d to augment")
    if not chosen:
        raise ValueError(
            f"where={where!r} matches none of the {len(convs)} convolutions, such as {', '.join([*convs][:4])}"
            f"{_hint(where, convs)}"
        )
    for conv, names in chosen.items():
        if not whole:
            _check_groups(names[0], conv, convs, grouped)
    return chosen


def _matcher(where: Where, convs: dict[str, nn.Conv2d]) -> Callable[[str, nn.Conv2d], bool]:
    if isinstance(where, str):
        return lambda name, conv: fnmatchcase(name, where)
    if isinstance(where, re.Pattern):
        return lambda name, conv: where.fullmatch(name) is not None
    if callable(where):
        return where
    if not isinstance(where, Iterable):
        raise ValueError(f"where must be a glob, a regular expression, names or a callable, got where={where!r}")
    names = set(where)
    for name in sorted(names - convs.keys()):
        near = get_close_matches(name, convs, n=3)
        raise ValueError(
            f"where names {name!r}, which is no convolution of the model; nearest: {', '.join(near) or 'none'}"
        )
    return lambda name, conv: name in names


def put_in(model: nn.Module, chosen: Mapping[nn.Conv2d, list[str]], layers: Mapping[nn.Conv2d, nn.Module]) -> nn.Module:
    """The model with a layer in each place of the convolution that it belongs to; a model that is the convolution
    itself becomes its layer."""
    for conv, names in chosen.items():
        for name in names:
            if not name:
                model = layers[conv]
            else:
                model.set_submodule(name, layers[conv])
    return model


def _hint(where: Where, convs: dict[str, nn.Conv2d]) -> str:
    """For a string that is meant as a regular expression: it is read as a glob."""
    if not isinstance(where, str):
        return ""
    try:
        pattern = re.compile(where)
    except re.error:
        return ""
    found = sum(pattern.fullmatch(name) is not None for name in convs)
    if found:
        return f"; a string is a glob, and where=re.compile({where!r}) matches {found}"
    signs = re.search(r"[\\^$|+()]", where)
    return "; a string is a glob: pass re.compile(...) for a regular expression" if signs else ""


def _inside_augmented(model: nn.Module, name: str) -> bool:
    """Whether the module is a part of a layer that is augmented already, with attention or what it is compared with."""
    parents = name.split(".")[:-1]
    above = (model.get_submodule(".".join(parents[:length])) for length in range(len(parents) + 1))
    return any(getattr(module, "is_augmented", False) is True for module in above)


def _check_groups(name: str, conv: nn.Conv2d, convs: dict[str, nn.Conv2d], grouped: bool) -> None:
    if conv.groups == 1:
        return
    if conv.groups == conv.out_channels:
        raise ValueError(
            f"{name} is a depthwise convolution (groups={conv.groups}): its groups have one channel each, which cannot "
            f"be shared out between convolution and attention (combine='add' adds it); {_instead_of(name, convs)}"
        )
    if not grouped:
        raise ValueError(
            f"{name} is a grouped convolution (groups={conv.groups}): its groups do not see each other, and attention "
            f"would mix them; leave it out of `where`, pass combine='add', or grouped=True to augment it all the same"
        )


def _instead_of(name: str, convs: dict[str, nn.Conv2d]) -> str:
    """The pointwise convolutions nearest to it, or where there are none, others without groups."""
    whole = {other: conv for other, conv in convs.items() if conv.groups == 1}
    pointwise = [other for other, conv in whole.items() if conv.kernel_size == (1, 1)]
    if not whole:
        return "the model has no other convolutions"

    def distance(other: str) -> int:
        """Steps from one to the other through the tree of modules."""
        ours, theirs = name.split("."), other.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        return len(ours) + len(theirs) - 2 * shared

    found = pointwise or [*whole]
    nearest = min(map(distance, found))
    named = [other for other in found if distance(other) == nearest][:2]
    return f"augment {'pointwise' if pointwise else 'other'} convolutions, such as {' or '.join(named)}"
