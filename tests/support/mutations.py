"""Inputs that nobody meant: what a person, a program or a bad disk may have made of a good one. Seeded."""

import copy
import json
import math
import random

HUGE = 10**400
ODD = (None, True, False, 0, -1, 1.5, 2**63, HUGE, math.inf, -math.inf, math.nan, "", "x", "\ud800", "1", [], {}, [[]])
ODD += ([None], [1, 2, 3, 4], {"a": 1}, {"": []}, "../../x", "\0", "x" * 10_000, [1e308] * 3, [HUGE] * 3)

BOMBS = (b"[" * 20_000, b"{" * 20_000, b"9" * 5000, b"&a [*a]", b"!!set ", b"\xff")


DEEP = "deep " * 4
"""Stands for lists in lists in lists, as deep as they can be read."""


def mutate_value(content, dice: random.Random):
    """A copy of what JSON holds, with one to three of its parts changed, removed or doubled."""
    content = json.loads(json.dumps(content))
    for _ in range(dice.randint(1, 3)):
        places = list(_places(content))
        if not places:
            return dice.choice(ODD)
        holder, key = dice.choice(places)
        change = dice.random()
        if change < 0.7:
            holder[key] = copy.deepcopy(dice.choice(ODD))
        elif change < 0.8:
            holder[key] = DEEP
        elif change < 0.9:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            holder[f"{key}x"] = holder.pop(key)
    return content


def _places(value):
    """Every (list or mapping, key) in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items):
        yield value, key
        yield from _places(part)


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """With some bytes changed, inserted, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 5)):
        place = dice.randrange(len(changed) + 1)
        match dice.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([dice.randrange(256)])
            case 1:
                changed[place:place] = bytes(dice.randrange(256) for _ in range(dice.randint(1, 9)))
            case 2:
                del changed[place : place + dice.randint(1, 40)]
            case 3:
                changed[place:place] = changed[max(0, place - 30) : place] * dice.randint(1, 50)
            case 4:
                del changed[place:]
            case 5:
                changed[place:place] = dice.choice(BOMBS)
    return bytes(changed)


def mutate_json(content, dice: random.Random) -> bytes:
    if dice.random() < 0.75:
        return json.dumps(mutate_value(content, dice)).replace(json.dumps(DEEP), "[" * 900 + "]" * 900).encode()
    return mutate_bytes(json.dumps(content).encode(), dice)
