"""Recipes whose network has got another default since runs of them were recorded. They say the former one themselves,
and go on meaning the same network; files from before leave it out."""

from typing import Any

FORMER: dict[str, dict[str, dict[str, Any]]] = {
    name: {"aa_window_resnet50": {"num_heads": 8}} for name in ("imagenette-windows-7", "imagenette-windows-13")
}
"""Recipe -> network -> what it was built with where nothing else was said."""


def options_meant(recipe: str, network: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the network in a file about a recipe of that name, with what older files leave out.

    >>> options_meant("imagenette-windows-7", "aa_window_resnet50", {"window": 7})
    {'window': 7, 'num_heads': 8}
    """
    left_out = FORMER.get(recipe, {}).get(network, {})
    return options | {name: value for name, value in left_out.items() if name not in options}
