"""The projections before and behind the attention: how their numbers are drawn, and queries and keys of one length."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITS = ("scaled", "literal", "unit", "paper")


def draw_queries(init: str, qkv: nn.Conv2d, key_channels: int) -> None:
    """Draw the projection before the attention, where torch's own start is not the one that is wanted."""
    if init == "unit":
        with torch.no_grad():  # of a ReLU's output half the square is left
            qkv.weight[: 2 * key_channels].normal_(std=(2 / qkv.in_channels) ** 0.5)
    elif init == "paper":
        _glorot(qkv)


def draw_projection(init: str, project: nn.Conv2d) -> None:
    """Draw the projection behind the attention, likewise."""
    if init == "paper":
        _glorot(project)


def _glorot(conv: nn.Conv2d) -> None:
    """As TensorFlow's conv2d begins."""
    nn.init.xavier_uniform_(conv.weight)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def table_statistics(init: str, depth: int) -> tuple[float, float]:
    """(mean, standard deviation) that the relative tables are drawn with."""
    if init == "scaled":
        return 0.0, depth**-0.5
    return (0.0 if init == "unit" else depth**-0.5), 1.0


def normalize_queries(qkv: Tensor, temperature: Tensor, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] with every query and key divided by its root mean square, and the queries of
    each head times its temperature [num_heads]: a logit of content is the temperature times sqrt(depth) times a cosine.
    """
    q, k, v = qkv.split([key_channels, key_channels, qkv.shape[-1] - 2 * key_channels], dim=-1)
    q, k = (part.unflatten(-1, (len(temperature), -1)) for part in (q, k))
    q, k = (F.rms_norm(part, part.shape[-1:], eps=1e-6).to(qkv.dtype) for part in (q, k))
    q = q * temperature.to(qkv.dtype)[:, None]
    return torch.cat([q.flatten(-2), k.flatten(-2), v], dim=-1)
