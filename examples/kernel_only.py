"""The operator alone: 2-D relative self-attention for a network of your own. Needs torch, nothing else of this package.

python examples/kernel_only.py
"""

import argparse

import torch
from torch import Tensor, nn

from aaconv.attention import attend_2d


class AttentionBlock(nn.Module):
    """x + attention(norm(x)) over all pixels of a map [batch, channels, height, width]."""

    def __init__(self, channels: int, num_heads: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.num_heads, self.channels = num_heads, channels
        self.norm = nn.GroupNorm(1, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)
        depth = channels // num_heads
        # A row for every distance between two rows, and between two columns, of pixels.
        self.rel_h, self.rel_w = (nn.Parameter(torch.randn(2 * side - 1, depth) * depth**-0.5) for side in size)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x).permute(0, 2, 3, 1))
        heads = {"num_heads": self.num_heads, "key_channels": self.channels}
        attended = attend_2d(qkv, self.rel_h, self.rel_w, **heads)
        return x + self.project(attended).permute(0, 3, 1, 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    block = AttentionBlock(64, num_heads=4, size=(chosen.size, chosen.size)).to(device)
    x = torch.randn(4, 64, chosen.size, chosen.size, device=device)
    target = x.flip(-1)  # mirrored: every pixel has to look at another, which only its position tells
    optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
    for step in range(chosen.steps):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1:3d}  loss {loss.item():.4f}")
