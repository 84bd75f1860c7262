"""AAConv1d and AAConv2d: a convolution beside relative self-attention, concatenated or added.

"Attention Augmented Convolutional Networks", Bello, Zoph, Vaswani, Shlens, Le, 2019. The paper's letters and our names:

    N_h    num_heads          d_k    key_channels      d_v      value_channels    kappa  key_ratio = d_k / F_out
    F_in   in_channels        F_out  out_channels      r^H r^W  rel_h, rel_w      upsilon  value_ratio = d_v / F_out
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import Self

from ..attention import known_backend
from .added import add_gated, take_original_keys
from .branch import AttentionBranch
from .channels import attention_channels, check_groups, in_each_dimension, one_of, resolve_channels
from .convolution import (
    can_reuse_weights,
    check_made,
    check_own_weights,
    convolve_around,
    convolve_without_gradient,
    first_channels,
    likes_more_channels,
)
from .geometry import Axis, Geometry, resolve_window
from .lazy import make_lazy
from .position import make_position
from .projections import INITS, draw_projection, draw_queries
from .tracing import leaf
from .without_gradient import concatenate_without_gradient

__all__ = ["AAConv1d", "AAConv2d", "AAConvNd", "attention_channels"]

Pair = int | tuple[int, ...]


class AAConvNd(AttentionBranch):
    """What AAConv1d and AAConv2d share: everything but the number of dimensions."""

    conv_class: type[nn.Conv1d] | type[nn.Conv2d]
    is_augmented = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str | None = None,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        num_heads: int | None = None,
        key_channels: int | None = None,
        value_channels: int | None = None,
        key_ratio: float | None = None,
        value_ratio: float | None = None,
        min_key_channels_per_head: int = 20,
        min_value_channels_per_head: int = 1,
        size: Pair | None = None,
        position: str = "relative",
        downsample: bool | int = False,
        share_heads: bool = True,
        window: Pair | None = None,
        window_stride: Pair = 1,
        window_dilation: Pair = 1,
        attention_bias: bool | None = None,
        init: str = "scaled",
        combine: str = "concat",
        qk_norm: bool = False,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self._tuple("kernel_size", kernel_size)
        self.stride = self._tuple("stride", stride)
        self.dilation = self._tuple("dilation", dilation)
        if padding is None:
            padding = tuple(d * (k // 2) for k, d in zip(self.kernel_size, self.dilation, strict=True))
        self.padding = padding if isinstance(padding, str) else self._tuple("padding", padding, least=0)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ValueError(f"padding must be a number of pixels, 'same' or 'valid', got padding={padding!r}")
        self.padding_mode = padding_mode
        self.combine = one_of("combine", combine, ("concat", "add"))
        channels = resolve_channels(
            out_channels,
            num_heads,
            key_channels,
            value_channels,
            key_ratio,
            value_ratio,
            min_key_channels_per_head,
            min_value_channels_per_head,
            groups,
            whole=combine == "add",
        )
        channels.warn(stacklevel=2)
        self.num_heads = channels.num_heads
        self.key_channels, self.value_channels = dk, dv = channels.key_channels, channels.value_channels
        if downsample < 0:
            raise ValueError(f"downsample must be a bool or how often to halve the map, got downsample={downsample}")
        self.downsample, self.share_heads = int(downsample), share_heads
        self.window = resolve_window(self.dimensions, window, window_stride, window_dilation, size)
        self.geometry = self._make_geometry(pads_to_same=padding == "same")
        self.init = one_of("init", init, INITS)
        self.backend = None if backend is None else known_backend(backend)
        self.position_name, self.position = position, make_position(position)

        factory = {"device": device, "dtype": dtype}
        self.conv: nn.Conv1d | nn.Conv2d | None = None
        if conv_channels := out_channels - (0 if combine == "add" else dv):
            check_groups(out_channels, out_channels - conv_channels, self.num_heads, groups)
            place: tuple[Any, ...] = (kernel_size, stride, self.padding, dilation, groups, bias, padding_mode)
            self.conv = self.conv_class(in_channels, conv_channels, *place, **factory)
        bias = init == "paper" if attention_bias is None else attention_bias
        self.qkv = nn.Conv2d(in_channels + self.position.extra_channels, 2 * dk + dv, 1, bias=bias, **factory)
        draw_queries(init, self.qkv, dk)
        self.project = nn.Conv2d(dv, out_channels if combine == "add" else dv, 1, bias=bias, **factory)
        draw_projection(init, self.project)
        table_size = None if size is None else self._map_size(size)
        self.add_tables(self._table_spec(), self.window.size if self.window else table_size, **factory)
        self.register_parameter("gate", None)
        self.register_parameter("temperature", None)
        if combine == "add":
            self.gate = nn.Parameter(torch.zeros(out_channels, **factory))
            self.register_load_state_dict_pre_hook(take_original_keys)
        if qk_norm:
            self.temperature = nn.Parameter(torch.ones(self.num_heads, **factory))
        if self.rel_w is not None and is_lazy(self.rel_w):
            make_lazy(self)

    @classmethod
    def from_conv(cls, conv: nn.Conv1d | nn.Conv2d, *, pads_itself: bool = False, **options: Any) -> Self:
        """Augment an existing convolution; the channels that stay convolutional keep its weights. With combine="add"
        all do: the layer's `conv` is the very module that was given.

        pads_itself: its forward pads to "same" whatever its padding attribute says (timm's Conv2dSame).
        """
        check_made(conv)
        if options.get("combine") != "add":
            check_own_weights(conv)
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            conv.padding_mode,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
            **options,
        )
        if pads_itself:
            layer.geometry = layer._make_geometry(pads_to_same=True)
        if layer.combine == "add":
            layer.conv = conv
        elif layer.conv is not None:
            layer.conv = first_channels(conv, layer.conv.out_channels)
        return layer.train(conv.training)

    @leaf
    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        output = concatenate_without_gradient(self, self.out_channels, input)
        return self._combine(input, self._attend(input)) if output is None else output

    def reset_parameters(self) -> None:
        """Draw everything anew, as at construction."""
        for module in (self.conv, self.qkv, self.project):
            if module is not None:
                module.reset_parameters()
        draw_queries(self.init, self.qkv, self.key_channels)
        draw_projection(self.init, self.project)
        self.draw_tables()
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.temperature is not None:
            nn.init.ones_(self.temperature)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay: with combine="add" tables, gate, temperature."""
        if self.combine != "add":
            return set()
        return {name for name, _ in self.named_parameters(recurse=False)}

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"{type(self).__name__} has no {name} of its own, only its parts have one: a batch norm folded into "
                f"`conv`, or a channel pruned there, would miss the attention; aaconv.layers.fold_batch_norm(layer, "
                f"norm) folds into both"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        size = "lazy" if self.position.has_tables and self.size is None else self.size
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"num_heads={self.num_heads}, key_channels={self.key_channels}, value_channels={self.value_channels}, "
            f"position={self.position_name!r}, {self.window or f'size={size}'}, downsample={self.downsample}"
            f"{', combine=' + repr(self.combine) if self.combine != 'concat' else ''}"
            f"{', qk_norm=True' if self.temperature is not None else ''}"
        )

    def _combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the layer returns: the convolution of x, and the attention behind it or on it."""
        if self.conv is None:
            return attended
        if self.gate is not None:
            return add_gated(self.conv(x), attended, self.gate, training=self.training)
        if x.is_cuda and likes_more_channels(self.conv, self.out_channels):
            if can_reuse_weights(self.conv, x, attended):
                return convolve_without_gradient(self.conv, x, attended)
            if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
                return convolve_around(self.conv, x, attended)
        # Launched one by one, the operators that would save a GPU this copy take the host longer than it takes the GPU.
        return torch.cat([self.conv(x), attended], dim=1)

    def _make_geometry(self, pads_to_same: bool) -> Geometry:
        padding = (0,) * self.dimensions if isinstance(self.padding, str) else self.padding
        numbers = zip(self.kernel_size, self.stride, padding, self.dilation, strict=True)
        rows, columns = (Axis(), *(Axis(*axis, pads_to_same) for axis in numbers))[-2:]
        return Geometry(rows, columns, self.downsample)

    def _tuple(self, name: str, value: Pair, least: int = 1) -> tuple[int, ...]:
        return in_each_dimension(name, value, self.dimensions, least)

    def _map_size(self, size: Pair) -> tuple[int, int]:
        height, width = (1, *self._tuple("size", size))[-2:]
        return height, width


class AAConv2d(AAConvNd):
    """Drop-in for nn.Conv2d whose last value_channels output channels attend to the whole map.

    [batch, in_channels, height, width] -> [batch, out_channels, height', width'], cat([conv(x), attention(x)]); with
    combine="add" all channels are convolutional, and attend too: conv(x) + gate * attention(x).
    nn.Conv2d's arguments come first, in its order. Three things differ: padding defaults to "same" for odd kernels
    (dilation * (k // 2)), nn.Conv2d's to 0; an input without a batch axis is refused; without `size` the layer is lazy.

    num_heads: heads of the attention, 8 by default, or fewer where out_channels is below 16; they divide key_channels
        and value_channels.
    key_channels | key_ratio, value_channels | value_ratio: depth of queries and keys, and of values, in all heads
        together, given as such or as a fraction of out_channels (default 0.2 and 0.1), rounded by attention_channels.
        value_channels == out_channels leaves no convolution: `conv` is None (with combine="add" it stays, whatever
        the values are).
    min_key_channels_per_head, min_value_channels_per_head: lower bounds when ratios are rounded, 20 as in the paper and
        1. Where one overrides a ratio that was given, a warning says so: below 800 channels it is the minimum of keys
        that decides in 8 heads, and not a key_ratio of 0.2.
    size: (height, width) of the attention map the relative tables are made for. None makes them at the first forward,
        as torch's lazy modules do; until then whatever needs their numbers (numel, an average of the weights, an
        initialisation by apply) raises a ValueError. make_tables(height, width) makes them for inputs of that size. Any
        size runs either way: a smaller map uses the middle of the tables, exactly, a larger one a smoothly stretched
        copy.
    position: "relative", "none", "sinusoidal" or "coordconv".
    downsample: attend at half the resolution: 3x3 average pooling before, bilinear resizing after. A number
        halves it so often.
    share_heads: one pair of relative tables for all heads (the paper's text), or one per head.
    window: None attends to the whole map. K or (rows, columns) attends to K x K pixels around each, pushed inwards at
        the edge: time and memory are linear in the pixels, and the tables are made for the window, so there is no
        `size` and any map runs unchanged. A checkpoint of a layer without a window loads: the middle of its tables.
    window_stride, window_dilation: so many neighbours share a window (the window itself: separate blocks), and every
        so many pixels only are seen. See attend_2d.
    attention_bias: biases in the two 1x1 projections; None has them with init="paper" alone.
    init: "scaled" draws the tables with standard deviation (key_channels / num_heads) ** -0.5; "literal" reads the
        paper's listing to the letter: that value is the mean, and the deviation is 1. "unit" draws tables, queries and
        keys so that the content, row and column part of a logit begin with a deviation of 1 each behind a ReLU; with
        "scaled" it is about 0.1, and attention begins as an average over the map. "paper" begins as the paper's listing
        does: the tables of "literal", Glorot's uniform weights in both projections, and biases of zero.
    combine: "concat" puts attention in the place of output channels, as the paper does. "add" keeps the whole
        convolution and adds attention, projected from value_channels to out_channels, behind `gate`, one number per
        output channel that starts at zero: in eval mode a new layer computes what its convolution computes, to the bit.
        Grouped and depthwise convolutions are taken as they are. A state dict that knows nothing of attention loads
        with strict=False: its `weight` and `bias` are those of `conv`.
    qk_norm: divide every query and key by its root mean square; `temperature`, one number per head that starts at 1,
        multiplies the logits. Weight decay then cannot shrink them.
    backend: of the attention, see attend_2d. Gradients of gradients and torch.func.jvp work on the CPU in float32 and
        float64, and elsewhere with "eager".

    A stride makes the attention work at the output resolution, on average-pooled input.

    >>> layer = AAConv2d(16, 96, 3, size=14)
    >>> layer(torch.randn(2, 16, 14, 14)).shape
    torch.Size([2, 96, 14, 14])
    >>> layer.num_heads, layer.key_channels, layer.value_channels
    (8, 160, 8)
    >>> layer.attention_maps(torch.randn(1, 16, 14, 14)).shape
    torch.Size([1, 8, 196, 196])
    """

    dimensions = 2
    conv_class = nn.Conv2d


class AAConv1d(AAConvNd):
    """Drop-in for nn.Conv1d, AAConv2d over a sequence: [batch, in_channels, length] -> [batch, out_channels, length'].

    nn.Conv1d's arguments come first, then AAConv2d's; `rel_w` is the one relative table, `size` a length.

    >>> AAConv1d(16, 96, 5)(torch.randn(2, 16, 40)).shape
    torch.Size([2, 96, 40])
    """

    dimensions = 1
    conv_class = nn.Conv1d

    def _as_map(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def _from_map(self, x: Tensor) -> Tensor:
        return x.squeeze(2)
