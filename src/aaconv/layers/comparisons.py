"""What added attention is compared with: other branches beside a whole convolution, which start without effect too.

They answer whether attention helps, or only more parameters, or only a look at the whole map.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .added import add_gated, take_original_keys
from .convolution import check_made
from .where import Where, choose, put_in

__all__ = ["COMPARISONS", "Average", "Comparison", "ZeroSE", "put_instead"]


class Comparison(nn.Module):
    """A convolution, the very module that was given, and something beside it; [batch, in_channels, height, width] ->
    [batch, out_channels, height', width'] as the convolution has it."""

    is_augmented = True

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        check_made(conv)
        self.conv = conv
        self.register_load_state_dict_pre_hook(take_original_keys)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay: the gate, as of AAConv2d."""
        return {name for name, _ in self.named_parameters(recurse=False)}


class ZeroSE(Comparison):
    """Squeeze-and-Excitation on the output, its factor twice a sigmoid that begins at one half: exactly 1.

    hidden: channels between its two layers.
    """

    def __init__(self, conv: nn.Conv2d, *, hidden: int = 16) -> None:
        super().__init__(conv)
        if not 1 <= hidden <= conv.out_channels:
            raise ValueError(f"hidden must be 1 to {conv.out_channels}, the output channels, got hidden={hidden}")
        like: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
        squeeze, excite = (
            nn.Conv2d(conv.out_channels, hidden, 1, **like),
            nn.Conv2d(hidden, conv.out_channels, 1, **like),
        )
        for parameter in excite.parameters():
            nn.init.zeros_(parameter)
        self.mlp = nn.Sequential(squeeze, nn.ReLU(inplace=True), excite)

    def forward(self, input: Tensor) -> Tensor:
        output = self.conv(input)
        return output * (2 * self.mlp(output.mean((2, 3), keepdim=True)).sigmoid())


class Average(Comparison):
    """Attention whose weights are even: the mean of the values over the map, projected, behind a gate per output
    channel that starts at zero. As AAConv2d(combine="add") without queries, keys and positions.

    value_channels: channels of the values.
    """

    def __init__(self, conv: nn.Conv2d, *, value_channels: int = 32) -> None:
        super().__init__(conv)
        if value_channels < 1:
            raise ValueError(f"value_channels must be at least 1, got {value_channels=}")
        like: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
        self.values = nn.Conv2d(conv.in_channels, value_channels, 1, bias=False, **like)
        self.project = nn.Conv2d(value_channels, conv.out_channels, 1, bias=False, **like)
        self.gate = nn.Parameter(torch.zeros(conv.out_channels, **like))

    def forward(self, input: Tensor) -> Tensor:
        output = self.conv(input)
        mean = self.project(self.values(input.mean((2, 3), keepdim=True)))
        return add_gated(output, mean.expand_as(output), self.gate, training=self.training)


COMPARISONS: dict[str, type[Comparison]] = {"se": ZeroSE, "average": Average}


def put_instead(model: nn.Module, kind: str, *, where: Where, **options: Any) -> nn.Module:
    """The model with the comparison of that kind around the convolutions that `where` names, as of augment."""
    if kind not in COMPARISONS:
        raise ValueError(f"instead must be one of {', '.join(COMPARISONS)}, got instead={kind!r}")
    known = inspect.signature(COMPARISONS[kind]).parameters.keys() - {"conv"}
    for name in sorted(options.keys() - known):
        raise TypeError(f"instead={kind!r} takes no option {name!r}; it takes {', '.join(known)}")
    chosen = choose(model, where, whole=True, grouped=False)
    layers: dict[nn.Conv2d, nn.Module] = {}
    for conv, names in chosen.items():
        try:
            layers[conv] = COMPARISONS[kind](conv, **options).train(conv.training)
        except ValueError as error:
            raise ValueError(f"{names[0]}: {error}") from None
    return put_in(model, chosen, layers)
