"""Recipes that are meant to do harm, or that nobody meant: one line, at once."""

import sys
import time

import pytest

from aaconv import recipes
from aaconv.recipes.yaml_file import LARGEST, MOST_VALUES, from_yaml, parse_yaml, to_yaml
from support.training_runs import TINY

GOOD = to_yaml(TINY)


def bomb(levels, width=9):
    """A list of lists of lists..., each level of which names the one before nine times."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n    ".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD.replace("drop_rate: 0.1", bomb(9)), f"has more than {MOST_VALUES:,} values, most of them by aliases"),
        (f"summary:\n    {bomb(9)}\nname: x", f"has more than {MOST_VALUES:,} values"),
        (GOOD.replace("drop_rate: 0.1", "a: &a [*a]"), "nested too deeply, or contains itself"),
        (GOOD.replace("drop_rate: 0.1", "a: &a {b: [*a]}"), "nested too deeply, or contains itself"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("x: !!timestamp x", "has a value that YAML cannot read"),
        ("x: !!int x", "has a value that YAML cannot read"),
        ("x: !!python/object/apply:os.system [ls]", "is not YAML"),
        (GOOD.replace("lr: 0.02", f"lr: 1{'0' * 400}"), "lr must fit 64 bits, got a number of 1329"),
        (GOOD.replace("seed: 0", f"seed: {2**63}"), "seed must fit 64 bits, got a number of 64"),
        (f"seed: 1{'0' * 5000}", "has a value that YAML cannot read"),
        ("# " + "x" * LARGEST, "letters, a recipe at most"),
        (GOOD.replace("drop_rate: 0.1", "when: 2001-12-14"), "options must be a mapping of names to texts, numbers"),
        (GOOD.replace("drop_rate: 0.1", "raw: !!binary YWJj"), "options must be a mapping of names to texts, numbers"),
        (GOOD.replace("drop_rate: 0.1", "some: !!set {a, b}"), "options must be a mapping of names to texts, numbers"),
        (GOOD.replace("drop_rate: 0.1", "1: 2"), "options must be a mapping of names to texts, numbers"),
        (GOOD.replace("drop_rate: 0.1", f"n: {10**30}"), "options must be a mapping of names to texts, numbers"),
    ],
    ids=lambda text: text[:30].replace("\n", " "),
)
def test_bad_yaml_is_one_line_at_once(text, reason):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"recipe\.yaml") as error:
        from_yaml(text, "recipe.yaml")
    assert time.monotonic() - start < 5
    assert reason in " ".join(str(error.value).split())
    assert len(str(error.value)) < 400


def test_depth_is_bounded_whatever_the_interpreter_allows():
    """The compiler raises the interpreter's limit for the rest of a process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        test_bad_yaml_is_one_line_at_once("[" * 50_000, "nested too deeply")
        test_bad_yaml_is_one_line_at_once("a: " + "[" * 49_000 + "]" * 49_000, "nested too deeply")
    finally:
        sys.setrecursionlimit(limit)


def test_a_few_aliases_are_as_good_as_their_values():
    recipe = from_yaml(GOOD.replace("drop_rate: 0.1", "a: &a [1, 2]\n    b: *a"))
    assert recipe.model.options == {"a": [1, 2], "b": [1, 2]}
    assert parse_yaml("", "x") is None


def test_numbers_beyond_64_bits_are_named_whoever_gives_them():
    with pytest.raises(ValueError, match="epochs must fit 64 bits, got a number of 67"):
        recipes.override(TINY, {"epochs": 10**20})
    with pytest.raises(ValueError, match="seed must fit 64 bits, got a number of 71"):
        type(TINY)(**{**vars(TINY), "seed": 2**70})
