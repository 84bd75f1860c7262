"""Numbers as they come from files."""

import math
from typing import Any


def is_number(value: Any) -> bool:
    """Is it a finite number that a float holds? Truth is none, and neither is 10 ** 400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 10**300


def is_whole(value: Any) -> bool:
    """Is it a whole number of 64 bits?"""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
