"""How much longer an attention augmented network takes than a plain one, in your own loop.

python examples/compare_speed.py                       # ResNet-50, batch 128, inference and training, not compiled
python examples/compare_speed.py --mode compile        # or graphs: torch.compile(mode="reduce-overhead")
"""

import argparse
import time

import timm
import torch
import torch.nn.functional as F

import aaconv  # noqa: F401  registers aa_resnet50 with timm

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", default=["resnet50", "seresnet50", "aa_resnet50"])
parser.add_argument("--mode", choices=["eager", "compile", "graphs"], default="eager")
parser.add_argument("--phases", nargs="+", choices=["inference", "training"], default=["inference", "training"])
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--rounds", type=int, default=5)
chosen = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.benchmark = True


def prepare(name, phase):
    """A call that does one step."""
    model = timm.create_model(name, num_classes=1000).to(device, memory_format=torch.channels_last)
    model.train(phase == "training")
    images = torch.randn(chosen.batch, 3, chosen.size, chosen.size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(1000, (chosen.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if chosen.mode != "eager":
        model.compile(mode="reduce-overhead" if chosen.mode == "graphs" else None)

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


for phase in chosen.phases:
    steps = {name: prepare(name, phase) for name in chosen.models}
    for step in steps.values():
        milliseconds(step, 5)  # compiles, and looks for the fastest convolutions
    times = {name: min(milliseconds(step) for _ in range(chosen.rounds)) for name, step in steps.items()}
    first = next(iter(times.values()))
    for name, time_ in times.items():
        print(f"{phase:9}  {chosen.mode:7}  batch {chosen.batch:3}  {name:14} {time_:8.2f} ms  {time_ / first:.2f} x")
