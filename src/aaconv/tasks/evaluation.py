"""A network over all batches of an evaluation: the loop that both tasks share."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def outputs_over(model: nn.Module, batches: Iterable[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Any, Any]]:
    """(images, targets, outputs in float32) of every batch, without gradients.

    A last batch that is smaller is filled up for the network: shapes stay, nothing recompiles.
    """
    full = 0
    for images, targets in batches:
        number, full = len(images), max(full, len(images))
        filler = images[:1].expand(full - number, -1, -1, -1)
        with torch.no_grad():
            outputs = model(torch.cat([images, filler]) if number < full else images)
        if isinstance(outputs, Tensor):
            yield images, targets, outputs[:number].float()
        else:
            yield images, targets, tuple(output[:number].float() for output in outputs)
