"""Whether a network is exported is known, whoever asks."""

import pytest
import torch

from aaconv.layers.tracing import is_exporting


class Asks(torch.nn.Module):
    def forward(self, x):
        return x + 1 if is_exporting() else x + 2


@pytest.mark.parametrize("strict", [False, True])
def test_only_an_export_is_an_export(strict):
    network, x = Asks(), torch.zeros(2)
    program = torch.export.export(network, (x,), strict=strict).module()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    assert [one(x)[0].item() for one in (network, compiled, program)] == [2, 2, 1]
