"""Detection on a GPU: steps that never wait for it, compiled in bfloat16, with the same losses as on a processor."""

from dataclasses import replace

import pytest
import torch
from waiting import waiting_is_an_error

from aaconv import recipes
from aaconv.detect import Detect
from aaconv.training.distributed import World

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # The compiler's advice about float32; exact products are what is wanted here.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def make(device, **changes):
    torch.manual_seed(0)
    recipe = replace(recipes.get("detection-demo"), train_limit=64, eval_limit=32, **changes)
    task = Detect(recipe)
    model = task.build(task.facts()).to(device, memory_format=torch.channels_last)
    return task, model, *task.loaders(16, World(torch.device(device)))


def test_losses_are_those_of_the_processor():
    losses = []
    for device in ("cpu", "cuda"):
        task, model, train, _ = make(device)
        losses.append([task.loss(model, batch)[0].item() for batch in train.batches()])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_step_never_waits_for_the_gpu():
    task, model, train, _ = make("cuda", compile="default")
    model.compile(dynamic=False)
    order, random = (part.cuda() for part in train.plan(0))

    def step(start):
        part = slice(start, start + 16)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = task.loss(model, train.load(order[part], random[:, part]))
        loss.backward()
        return loss.detach()

    losses = [step(0), step(16)]
    with waiting_is_an_error():
        losses += [step(32), step(48)]
    assert torch.stack(losses).isfinite().all()


def test_it_learns_and_evaluates_compiled():
    task, model, train, test = make("cuda", compile="default")
    model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = after = None
    for epoch in range(15):
        for batch in train.batches(epoch):
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            before, after = loss.item() if before is None else before, loss.item()
    assert after < 0.6 * before
    with torch.autocast("cuda", torch.bfloat16):
        metrics = task.evaluate(model.eval(), test.batches())
    assert 0 < metrics["loss"] < before
