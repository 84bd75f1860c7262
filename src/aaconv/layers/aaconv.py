"""AAConv2d: a convolution beside 2-D relative self-attention, concatenated.

"Attention Augmented Convolutional Networks", Bello, Zoph, Vaswani, Shlens, Le, 2019. The paper's letters and our names:

    N_h    num_heads          d_k    key_channels      d_v      value_channels    kappa  key_ratio = d_k / F_out
    F_in   in_channels        F_out  out_channels      r^H r^W  rel_h, rel_w      upsilon  value_ratio = d_v / F_out
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from ..attention import attend_2d, attention_maps, known_backend
from .channels import attention_channels, check_groups, in_each_dimension, resolve_channels
from .convolution import convolve_around, first_channels, likes_more_channels
from .pooling import average, resize
from .position import fit_table, make_position

__all__ = ["AAConv1d", "AAConv2d", "attention_channels"]

_log = logging.getLogger("aaconv")
_told_resizes: set[tuple[int, int]] = set()

Pair = int | tuple[int, int]


class AAConv2d(nn.Module):
    """Drop-in for nn.Conv2d whose last value_channels output channels attend to the whole map.

    [batch, in_channels, height, width] -> [batch, out_channels, height', width'], cat([conv(x), attention(x)]).
    nn.Conv2d's arguments come first, in its order; padding defaults to "same" for odd kernels (dilation * (k // 2)).

    num_heads: heads of the attention; they divide key_channels and value_channels.
    key_channels | key_ratio, value_channels | value_ratio: depth of queries and keys, and of values, in all heads
        together, given as such or as a fraction of out_channels (default 0.2 and 0.1), rounded by attention_channels.
        value_channels == out_channels leaves no convolution: `conv` is None.
    min_key_channels_per_head, min_value_channels_per_head: lower bounds when ratios are rounded.
    size: (height, width) of the attention map the relative tables are made for. None makes them at the first forward,
        as torch's lazy modules do. Any size runs either way: a smaller map uses the middle of the tables, exactly, a
        larger one a smoothly stretched copy.
    position: "relative", "none", "sinusoidal" or "coordconv".
    downsample: attend at half the resolution: 3x3 average pooling before, bilinear resizing after. A number
        halves it so often.
    share_heads: one pair of relative tables for all heads (the paper's text), or one a head.
    attention_bias: biases in the two 1x1 projections.
    init: "scaled" draws the tables with standard deviation (key_channels / num_heads) ** -0.5; "literal" reads the
        paper's listing to the letter: that value is the mean, and the deviation is 1. "unit" draws tables, queries and
        keys so that the content, row and column part of a logit begin with a deviation of 1 each behind a ReLU; with
        "scaled" it is about 0.1, and attention begins as an average over the map.
    backend: of the attention, see attend_2d.

    A stride makes the attention work at the output resolution, on average-pooled input.
    """

    _dimensions = 2
    _conv_class: type[nn.Module] = nn.Conv2d

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
        num_heads: int = 8,
        key_channels: int | None = None,
        value_channels: int | None = None,
        key_ratio: float | None = None,
        value_ratio: float | None = None,
        min_key_channels_per_head: int = 20,
        min_value_channels_per_head: int = 0,
        size: Pair | None = None,
        position: str = "relative",
        downsample: bool | int = False,
        share_heads: bool = True,
        attention_bias: bool = False,
        init: str = "scaled",
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.num_heads = in_channels, out_channels, groups, num_heads
        self.kernel_size = self._tuple("kernel_size", kernel_size)
        self.stride = self._tuple("stride", stride)
        self.dilation = self._tuple("dilation", dilation)
        if padding is None:
            padding = tuple(d * (k // 2) for k, d in zip(self.kernel_size, self.dilation, strict=True))
        self.padding = padding if isinstance(padding, str) else self._tuple("padding", padding, least=0)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ValueError(f"padding must be a number of pixels, 'same' or 'valid', got padding={padding!r}")
        self.padding_mode = padding_mode
        self._pads_to_same = padding == "same"
        self.key_channels, self.value_channels = resolve_channels(
            out_channels,
            num_heads,
            key_channels,
            value_channels,
            key_ratio,
            value_ratio,
            min_key_channels_per_head,
            min_value_channels_per_head,
        )
        if downsample < 0:
            raise ValueError(f"downsample must be a bool or how often to halve the map, got downsample={downsample}")
        self.downsample, self.share_heads = int(downsample), share_heads
        if init not in ("scaled", "literal", "unit"):
            raise ValueError(f"init must be 'scaled', 'literal' or 'unit', got init={init!r}")
        self.init = init
        self.backend = None if backend is None else known_backend(backend)
        self.position_name, self.position = position, make_position(position)

        factory = {"device": device, "dtype": dtype}
        self.conv = None
        if conv_channels := out_channels - self.value_channels:
            check_groups(out_channels, self.value_channels, num_heads, groups)
            self.conv = self._conv_class(
                in_channels,
                conv_channels,
                kernel_size,
                stride,
                self.padding,
                dilation,
                groups,
                bias,
                padding_mode,
                **factory,
            )
        dk, dv = self.key_channels, self.value_channels
        self.qkv = nn.Conv2d(in_channels + self.position.extra_channels, 2 * dk + dv, 1, bias=attention_bias, **factory)
        self._draw_queries_and_keys()
        self.project = nn.Conv2d(dv, dv, 1, bias=attention_bias, **factory)
        self._make_tables(None if size is None else self._map_pair(self._tuple("size", size)), factory)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, *, pads_itself: bool = False, **options: Any) -> "AAConv2d":
        """Augment an existing convolution; the channels that stay convolutional keep its weights.

        pads_itself: its forward pads to "same" whatever its padding attribute says (timm's Conv2dSame).
        """
        weight = conv.weight
        if is_lazy(weight):
            raise ValueError("the convolution is lazy: its weights are not made yet; run a forward first")
        own = dict(conv.named_parameters(recurse=False))
        for name in ("weight", "bias"):
            if name not in own and getattr(conv, name) is not None:
                raise ValueError(
                    f"the convolution computes its {name} from other parameters (parametrized, normalised or pruned), "
                    f"which cannot be cut to fewer channels; make that permanent first, as "
                    f"torch.nn.utils.parametrize.remove_parametrizations does"
                )
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
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        layer._pads_to_same |= pads_itself
        if layer.conv is not None:
            layer.conv = first_channels(conv, layer.conv.out_channels)
        return layer.train(conv.training)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        attended = self._attend(input)
        if self.conv is None:
            return attended
        if input.is_cuda and likes_more_channels(self.conv, self.out_channels):
            return convolve_around(self.conv, input, attended)
        return torch.cat([self.conv(input), attended], dim=1)

    def attention_maps(self, x: Tensor) -> Tensor:
        """The weight pixel i gives to pixel j: [batch, num_heads, HW (i), HW (j)] at the attention's resolution."""
        self._check_input(x)
        self.make_tables(*self._as_map(x).shape[-2:])
        qkv = self._project_in(self._pool_to_output(self._as_map(x))[0])
        return attention_maps(qkv, *self._tables(qkv), num_heads=self.num_heads, key_channels=self.key_channels)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the output for an input of height x width."""
        size = []
        for length, (before, after, window), stride in zip(
            (height, width), self._windows(), self._map_pair(self.stride), strict=True
        ):
            reach = 1 if window % 2 else window  # an odd window is padded to its middle
            size.append((length + before + after - reach) // stride + 1)
        return size[0], size[1]

    def attention_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the attention map for an input of height x width."""
        height, width = self.output_size(height, width)
        step = self._map_pair((2,) * self._dimensions)
        for _ in range(self.downsample):
            height, width = (height - 1) // step[0] + 1, (width - 1) // step[1] + 1
        return height, width

    def make_tables(self, height: int, width: int) -> None:
        """Make tables that are still lazy for inputs of height x width, without a forward; others stay as they are."""
        if is_lazy(self.rel_w):
            map_seen = torch.empty(1, self.in_channels, height, width, device="meta")
            self._infer_parameters(self, (self._from_map(map_seen),))

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) the relative tables are made for; None without tables or before the first forward."""
        if self.rel_w is None or is_lazy(self.rel_w):
            return None
        height = 1 if self.rel_h is None else (self.rel_h.shape[-2] + 1) // 2
        return height, (self.rel_w.shape[-2] + 1) // 2

    def reset_parameters(self) -> None:
        """Draw everything anew, as at construction."""
        for module in (self.conv, self.qkv, self.project):
            if module is not None:
                module.reset_parameters()
        self._draw_queries_and_keys()
        self._draw_tables()

    def extra_repr(self) -> str:
        size = "lazy" if self.position.has_tables and self.size is None else self.size
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"num_heads={self.num_heads}, key_channels={self.key_channels}, value_channels={self.value_channels}, "
            f"position={self.position_name!r}, size={size}, downsample={self.downsample}"
        )

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != self._dimensions + 2 or x.shape[1] != self.in_channels:
            axes = "height, width" if self._dimensions == 2 else "length"
            raise ValueError(f"expected input [batch, {self.in_channels}, {axes}], got shape {list(x.shape)}")
        if min(self.output_size(*self._as_map(x).shape[-2:])) < 1:
            raise ValueError(
                f"an input of shape {list(x.shape)} is too small for kernel_size={self.kernel_size}, "
                f"padding={self.padding}, dilation={self.dilation}: no output pixel is left"
            )

    def _attend(self, x: Tensor) -> Tensor:
        pooled, out_size = self._pool_to_output(self._as_map(x))
        qkv = self._project_in(pooled)
        tables = self._tables(qkv)
        attended = attend_2d(
            qkv, *tables, num_heads=self.num_heads, key_channels=self.key_channels, backend=self.backend
        )
        attended = self.project(attended.permute(0, 3, 1, 2))
        if self.downsample:
            attended = resize(attended, out_size)
        return self._from_map(attended)

    def _pool_to_output(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The input at the attention's resolution, and the (height, width) the result must have."""
        (top, bottom, window_height), (left, right, window_width) = self._windows()
        if top or bottom or left or right:
            x = F.pad(x, (left, right, top, bottom))
        stride = self._map_pair(self.stride)
        if stride != (1, 1):
            x = average(x, (window_height, window_width), stride)
        out_size = x.shape[-2:]
        for _ in range(self.downsample):
            x = average(x, self._map_pair((3,) * self._dimensions), self._map_pair((2,) * self._dimensions))
        return x, out_size

    def _project_in(self, pooled: Tensor) -> Tensor:
        """[batch, in_channels, height, width] -> [batch, height, width, 2*dk + dv]."""
        return self.qkv(self.position.encode(pooled)).permute(0, 2, 3, 1)

    def _tables(self, qkv: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.rel_w is None:
            return None, None
        rel_w = fit_table(self.rel_w, qkv.shape[2])
        if self.rel_h is None:
            # One row: its logit is the same for every key, so the softmax does not see it.
            return rel_w.new_zeros(*rel_w.shape[:-2], 1, rel_w.shape[-1]), rel_w
        return fit_table(self.rel_h, qkv.shape[1]), rel_w

    def _make_tables(self, size: tuple[int, int] | None, factory: dict[str, Any]) -> None:
        self.register_parameter("rel_h", None)
        self.register_parameter("rel_w", None)
        if not self.position.has_tables:
            return
        for name, axis in self._table_axes():
            table = UninitializedParameter(**factory)
            if size is not None:
                table.materialize(self._table_shape(size[axis]))
            setattr(self, name, table)
        if size is not None:
            return self._draw_tables()
        # What LazyModuleMixin.__init__ does: torch.compile and load_state_dict look for these two hooks.
        self.__class__ = self._lazy_class()
        self._load_hook = self._register_load_state_dict_pre_hook(self._lazy_load_hook)
        self._initialize_hook = self.register_forward_pre_hook(self._infer_parameters, with_kwargs=True)

    def _table_shape(self, length: int) -> tuple[int, ...]:
        shape = (2 * length - 1, self.key_channels // self.num_heads)
        return shape if self.share_heads else (self.num_heads, *shape)

    def _draw_queries_and_keys(self) -> None:
        if self.init == "unit":
            with torch.no_grad():  # of a ReLU's output half the square is left
                self.qkv.weight[: 2 * self.key_channels].normal_(std=(2 / self.qkv.in_channels) ** 0.5)

    def _draw_tables(self) -> None:
        scale = (self.key_channels // self.num_heads) ** -0.5
        mean, std = {"scaled": (0.0, scale), "literal": (scale, 1.0), "unit": (0.0, 1.0)}[self.init]
        for table in (self.rel_h, self.rel_w):
            if table is not None and not is_lazy(table):
                nn.init.normal_(table, mean, std)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, _ in self._table_axes():
            own, key = getattr(self, name), prefix + name
            loaded = state_dict.get(key)
            if own is None or is_lazy(own) or loaded is None or is_lazy(loaded) or loaded.dim() != own.dim():
                continue
            old, new = loaded.shape[-2], own.shape[-2]
            if old != new:
                state_dict[key] = fit_table(loaded, (new + 1) // 2)
                if (old, new) not in _told_resizes:
                    _told_resizes.add((old, new))
                    _log.warning(
                        "relative tables for maps of %d pixels resized to %d (first: %s)",
                        (old + 1) // 2,
                        (new + 1) // 2,
                        key,
                    )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _windows(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """For each axis of the map: pixels to add (negative: to cut) before and after it, and the window to average.

        The window of output pixel i is centred where the convolution's is: the paper's 3 pixels for an odd kernel with
        stride 2, exactly the pixels of the stride for an even kernel with an even stride.
        """
        axes = []
        for index, (kernel, dilation, stride) in enumerate(
            zip(self.kernel_size, self.dilation, self.stride, strict=True)
        ):
            reach = dilation * (kernel - 1)
            padding = 0 if isinstance(self.padding, str) else self.padding[index]
            odd = stride + 1 - stride % 2
            if self._pads_to_same:
                axes.append((0, 0, odd))
            elif reach % 2 and stride % 2 == 0:
                side = padding - (reach + 1) // 2 + stride // 2
                axes.append((side, side, stride))
            else:
                total = 2 * padding - reach
                axes.append((-(-total // 2), total // 2, odd))
        return (*([(0, 0, 1)] * (2 - len(axes))), *axes)

    # What a map is in one and in two dimensions: the attention itself is always two-dimensional.

    def _tuple(self, name: str, value: Pair, least: int = 1) -> tuple[int, ...]:
        return in_each_dimension(name, value, self._dimensions, least)

    def _map_pair(self, values: tuple[int, ...]) -> tuple[int, int]:
        return (*((1,) * (2 - len(values))), *values)

    def _table_axes(self) -> tuple[tuple[str, int], ...]:
        return (("rel_h", 0), ("rel_w", 1))[2 - self._dimensions :]

    def _as_map(self, x: Tensor) -> Tensor:
        return x

    def _from_map(self, x: Tensor) -> Tensor:
        return x

    def _lazy_class(self) -> type:
        return _LazyAAConv2d


class AAConv1d(AAConv2d):
    """AAConv2d over a sequence, [batch, in_channels, length] -> [batch, out_channels, length'].

    AAConv2d's arguments, nn.Conv1d's for the convolution; `rel_w` is the one relative table, `size` a length.
    """

    _dimensions = 1
    _conv_class = nn.Conv1d

    def _as_map(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def _from_map(self, x: Tensor) -> Tensor:
        return x.squeeze(2)

    def _lazy_class(self) -> type:
        return _LazyAAConv1d


class _LazyTables(LazyModuleMixin):
    """Until the first forward: the relative tables take their size from the map that arrives."""

    def initialize_parameters(self, input: Tensor) -> None:
        if not self.has_uninitialized_params():
            return  # a checkpoint brought the tables
        self._check_input(input)
        size = self.attention_size(*self._as_map(input).shape[-2:])
        # Never inference tensors: autograd refuses to save those for a backward.
        with torch.inference_mode(False), torch.no_grad():
            for name, axis in self._table_axes():
                getattr(self, name).materialize(self._table_shape(size[axis]))
            self._draw_tables()


class _LazyAAConv2d(_LazyTables, AAConv2d):
    cls_to_become = AAConv2d


class _LazyAAConv1d(_LazyTables, AAConv1d):
    cls_to_become = AAConv1d
