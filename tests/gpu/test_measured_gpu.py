"""What backend=None takes is the faster one on the GPU at hand."""

import pytest
import torch

from aaconv.attention.measured import prefers_sdpa
from aaconv.benchmark import attention

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = [  # far from the depths at which the choice changes: there both are as good
    ("128:14x14:20/3", torch.bfloat16, True),
    ("4:32x32:64/64:12", torch.bfloat16, True),
    ("32:14x14:128/128:4", torch.float16, True),
    ("128:14x14:20/3", torch.bfloat16, False),
    ("4:32x32:64/64:12", torch.bfloat16, False),
    ("64:14x14:20/3", torch.float32, True),
    ("1:32x32:64/64:12", torch.float32, True),
]


@pytest.mark.parametrize(("text", "dtype", "positions"), KINDS, ids=str)
def test_the_choice_is_the_faster_one(text, dtype, positions):
    shape = attention.Shape.parse(text)
    rows = attention.measure(shape, ["triton", "sdpa"], torch.device("cuda"), dtype, 3, lambda line: None, positions)
    times = {row["variant"]: row["both_ms"]["p50"] for row in rows}
    chosen = "sdpa" if prefers_sdpa(dtype, positions, shape.key_depth, shape.value_depth) else "triton"
    assert times[chosen] <= 1.15 * min(times.values()), times
