"""`aaconv demo`: a task that convolutions alone cannot see, and the same network with attention beside them.

Each image shows two small squares, one near the left edge and one near the right. Do they have the same colour? The
network's convolutions see windows of 11 x 11 pixels, and no such window holds both squares. Global average pooling and
a linear classifier, as in ResNets, cannot make up for it. They add a number a(i) for the colour i on the left to a
number b(j) for the colour j on the right. As a(i) + b(i) + a(j) + b(j) = a(i) + b(j) + a(j) + b(i), one of these four
cases is on the wrong side of any threshold: three of four images is the best to hope for. Attention lets every pixel
look at all others.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .augment import augment

SIZE, SQUARE = 20, 3
COLOURS = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
LEFT, RIGHT = (0, 2), (SIZE - SQUARE - 2, SIZE - SQUARE)
BATCH = 32
HELD_OUT = 2000


def run(*, steps: int = 200, seed: int = 0) -> dict[str, float]:
    """Train both networks on the same images, print how well they do on others; returns the two accuracies."""
    torch.manual_seed(seed)
    plain = small_network()
    torch.manual_seed(seed)
    augmented, report = augment(
        small_network(), (3, SIZE, SIZE), where=["1.0", "2.0"], num_heads=4, key_ratio=0.5, value_ratio=0.25,
        min_key_channels_per_head=4,
    )  # fmt: skip
    networks = {"convolutions": plain, "convolutions + attention": augmented}

    print(f"Two squares far apart in an image of {SIZE} x {SIZE} pixels: have they the same colour?")
    print("Guessing is right in 50%; what sees only one of them at a time, in 75% at best.\n")
    print(f"The second network is the first after augment(...):\n{report}\n")
    accuracies = {}
    for name, network in networks.items():
        with Line(f"{name:<24}") as line:
            train(network, steps, seed, line)
            accuracies[name] = accuracy(network)
            line(f"{count(network):,} parameters, {accuracies[name]:.1%} of {HELD_OUT} unseen images right", last=True)
    print(conclusion(*accuracies.values()))
    return accuracies


def draw(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [number, 3, SIZE, SIZE] with a square on either side, and whether the two have the same colour."""
    images = 0.1 * torch.randn(number, 3, SIZE, SIZE, generator=generator)
    same = torch.randint(2, (number,), generator=generator)
    left = torch.randint(len(COLOURS), (number,), generator=generator)
    another = (left + torch.randint(1, len(COLOURS), (number,), generator=generator)) % len(COLOURS)
    pixel = torch.arange(SIZE)
    for (first, last), colour in ((LEFT, left), (RIGHT, torch.where(same == 1, left, another))):
        x = torch.randint(first, last + 1, (number, 1), generator=generator)
        y = torch.randint(SIZE - SQUARE + 1, (number, 1), generator=generator)
        columns, rows = ((pixel >= start) & (pixel < start + SQUARE) for start in (x, y))
        images += COLOURS[colour][:, :, None, None] * (rows[:, None, :, None] & columns[:, None, None, :])
    return images, same


def small_network(width: int = 32) -> nn.Sequential:
    """Three 3x3 convolutions, the first with stride 2 (windows of 3, 7, 11 pixels), pooling, a linear classifier."""

    def block(in_channels: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

    blocks = block(3, 2), block(width, 1), block(width, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


def train(network: nn.Module, steps: int, seed: int, say: Callable[[str], None]) -> None:
    """`steps` batches of images drawn from the seed, none of them twice."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps, pct_start=0.2)
    network.train()
    for step in range(1, steps + 1):
        images, same = draw(BATCH, generator)
        loss = F.cross_entropy(network(images), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            say(f"step {step} of {steps}, loss {loss.item():.3f}")


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    """The part of HELD_OUT new images that the network gets right."""
    images, same = draw(HELD_OUT, torch.Generator().manual_seed(10**6))
    network.eval()
    guesses = torch.cat([network(part).argmax(1) for part in images.split(250)])
    return (guesses == same).double().mean().item()


def conclusion(without: float, with_attention: float) -> str:
    """What came out, in two sentences, and what to try next."""
    gain = 100 * (with_attention - without)
    return f"""
Attention beside the 3x3 convolutions changes the accuracy by {gain:+.0f} points at about the same number of parameters.
A deeper stack of convolutions, or a larger head after the pooling, could learn the task as well; here one layer sees
the whole image.

Next:
  aaconv models 'aa_*'           the paper's networks, with parameters and FLOPs
  aaconv cost aa_resnet50        what attention costs, layer by layer
  aaconv bench layer             time and memory on this machine
  python -c "import aaconv; help(aaconv.augment)"   your own network"""


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


class Line:
    """Progress of one thing: a line rewritten in place on a terminal, elsewhere a line a few seconds."""

    def __init__(self, name: str, every: float = 5.0) -> None:
        self.name, self.every, self.live = name, every, sys.stdout.isatty()
        self.start = self.told = time.perf_counter()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live and kind is not None:
            print()

    def __call__(self, text: str, *, last: bool = False) -> None:
        now = time.perf_counter()
        if not (self.live or last or now - self.told >= self.every):
            return
        self.told = now
        start, end = ("\r\033[K", "\n" if last else "") if self.live else ("", "\n")
        print(f"{start}{self.name} {now - self.start:5.1f} s  {text}", end=end, flush=True)
