"""How much longer an attention augmented network takes than a plain one, in your own loop.

python examples/compare_speed.py                          # ResNet-50, batch 128, inference and training, not compiled
python examples/compare_speed.py --modes eager compile    # torch.compile as well; graphs: its mode="reduce-overhead"
python examples/compare_speed.py --batch 1 8 --phases inference --json speeds.json
"""

import argparse
import time

import timm
import torch
import torch.nn.functional as F

import aaconv  # noqa: F401  registers aa_resnet50 with timm
from aaconv.benchmark.output import Results

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", default=["resnet50", "seresnet50", "aa_resnet50"])
parser.add_argument("--modes", nargs="+", choices=["eager", "compile", "graphs"], default=["eager"])
parser.add_argument("--phases", nargs="+", choices=["inference", "training"], default=["inference", "training"])
parser.add_argument("--batch", nargs="+", type=int, default=[128])
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well, with versions and device")
chosen = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
results = Results("compare_speed", torch.device(device), chosen.json, size=chosen.size, rounds=chosen.rounds)
torch.backends.cudnn.benchmark = True


def prepare(name, phase, mode, batch):
    """A call that does one step."""
    model = timm.create_model(name, num_classes=1000).to(device, memory_format=torch.channels_last)
    model.train(phase == "training")
    images = torch.randn(batch, 3, chosen.size, chosen.size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if mode != "eager":
        model.compile(mode="reduce-overhead" if mode == "graphs" else None, dynamic=False)

    def step():
        with torch.set_grad_enabled(phase == "training"), torch.autocast(device, torch.bfloat16):
            logits = model(images)
        if phase == "training":
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def milliseconds(step, steps=10):
    if device == "cpu":
        steps = 1
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def compare(phase, mode, batch):
    if mode != "eager":
        torch.compiler.reset()
    steps = {name: prepare(name, phase, mode, batch) for name in chosen.models}
    for step in steps.values():
        milliseconds(step, 5)  # compiles, and looks for the fastest convolutions
    rounds = [{name: milliseconds(step) for name, step in steps.items()} for _ in range(chosen.rounds)]
    times = {name: min(of_round[name] for of_round in rounds) for name in steps}
    first = next(iter(times.values()))
    for name, time_ in times.items():
        print(f"{phase:9}  {mode:7}  batch {batch:3}  {name:14} {time_:8.2f} ms  {time_ / first:.2f} x", flush=True)
        row = {"model": name, "phase": phase, "mode": mode, "batch": batch, "ms": time_, "to_first": time_ / first}
        results.add(row)


for mode in chosen.modes:
    for phase in chosen.phases:
        for batch in chosen.batch:
            compare(phase, mode, batch)
