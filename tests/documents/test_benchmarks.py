"""docs/benchmarks.md: what a free attention would leave is what the recorded files give."""

import json
import re

from aaconv.benchmark.kernels import ratio_if_free
from support.places import REPOSITORY

PAGE = REPOSITORY / "docs" / "benchmarks.md"
RECORDED = REPOSITORY / "src" / "aaconv" / "recorded" / "benchmarks"
COLUMN = "attention free"


def shown():
    """(against plain, attention free) of every row that has both, as text; the second stands behind the first."""
    place = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if COLUMN in cells:
            place = cells.index(COLUMN)
        elif not line.startswith("|"):
            place = None
        elif place and re.fullmatch(r"\d\.\d\d", cells[place]):
            yield cells[place - 1], cells[place]


def recorded():
    for path in RECORDED.glob("*.json"):
        found, first = json.loads(path.read_text(encoding="utf-8")), {}
        for row in found["rows"] if isinstance(found, dict) and found["benchmark"] == "model" else ():
            step, phase = row["graph_ms"]["p50"], row["phase"]
            free = ratio_if_free(step, row["kernels_ms"], first.setdefault(phase, step))
            if free is not None:
                yield f"{row['graph_to_first']:.2f}", f"{free:.2f}"


def test_what_a_free_attention_leaves_is_recorded():
    assert len(found := set(shown())) >= 8
    assert found <= set(recorded())
