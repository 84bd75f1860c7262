"""Errors of torch in one line of ours."""

import pytest
import torch
from torch import nn

from aaconv.utils.errors import one_line


def test_a_list_of_tensors_that_do_not_fit_keeps_its_first():
    with pytest.raises(RuntimeError) as found:
        nn.Linear(2, 3).load_state_dict({"weight": torch.zeros(5, 2), "bias": torch.zeros(4)})
    text = one_line(found.value)
    assert text.startswith("Error(s) in loading state_dict for Linear: size mismatch for weight: ")
    assert "bias" not in text


@pytest.mark.parametrize("text", ["", "as it is", "as it is\nand more", "\n as it is:"])
def test_other_errors_are_their_first_line(text):
    assert one_line(ValueError(text)) == (text.strip().partition("\n")[0] or "ValueError")
