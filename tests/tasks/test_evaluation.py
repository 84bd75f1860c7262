"""The loop over the batches of an evaluation."""

import pytest
import torch
from torch import nn

from aaconv.tasks.evaluation import outputs_over


class Recording(nn.Module):
    """Gives back the first pixel of each image, once or as two outputs, and keeps the shapes it has seen."""

    def __init__(self, outputs):
        super().__init__()
        self.weight, self.outputs, self.seen = nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), outputs, []

    def forward(self, images):
        self.seen.append(tuple(images.shape))
        pixels = images[:, 0, 0, :1].to(torch.bfloat16) * self.weight
        return pixels if self.outputs == 1 else (pixels, -pixels)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("sizes", [(4, 4, 1), (3,), (2, 5, 3)])
def test_every_image_has_its_output_and_the_network_sees_full_batches(sizes, outputs):
    images = torch.arange(1.0, sum(sizes) + 1).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).split(sizes)
    model = Recording(outputs)
    found = list(outputs_over(model, [(some, some[:, 0, 0, 0]) for some in images]))
    largest = 0
    for size, seen in zip(sizes, model.seen, strict=True):
        largest = max(largest, size)
        assert seen == (largest, 3, 2, 2)
    for some, (same, targets, output) in zip(images, found, strict=True):
        assert same is some
        output = output if outputs == 1 else output[0]
        assert output.dtype == torch.float32
        assert not output.requires_grad
        assert torch.equal(output[:, 0], targets)
