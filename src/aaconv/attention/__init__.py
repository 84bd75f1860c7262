"""attend_2d: 2-D relative self-attention with one signature and several backends."""

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor

from . import decomposed, eager, sdpa, triton_backend, windows
from .decomposed import check_floating, shown
from .measured import prefers_sdpa
from .torch_state import someone_looks_on
from .windows import Sizes, Window, make_window

BACKENDS = {"triton": triton_backend, "sdpa": sdpa, "eager": eager}
"""Every backend by name, on the whole fastest first: a module with why_not(...) and attend(...)."""

_log = logging.getLogger("aaconv")
_default_backend = os.environ.get("AACONV_BACKEND") or None  # a wrong one is named where it is used, not at the import
_told: set[tuple[str, str]] = set()
_checked: dict[tuple, str] = {}
"""Kinds of calls that were found right, with the backend that they take."""


def attend_2d(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    backend: str | None = None,
    window: Sizes | Window | None = None,
    window_stride: Sizes = 1,
    window_dilation: Sizes = 1,
) -> Tensor:
    """Self-attention over all pixels of a map, or over a window around each, with 2-D relative positions.

    qkv [batch, height, width, 2*dk + dv] -> [batch, height, width, dv], q, k and v one after the other and the heads
    contiguous inside each. The logit of pixel i for pixel j is

        q_i . (k_j + rel_w[jx - ix] + rel_h[jy - iy]) / sqrt(dk / num_heads)

    with rel_h [2*height - 1, dk / num_heads] (index 0 is the offset -(height - 1)) or one such table per head
    [num_heads, 2*height - 1, dk / num_heads], rel_w alike; both None leave the relative term out.

    backend: "triton", "sdpa", "eager", or None for the fastest that can run here, as measured (see measured.py and
    set_default_backend). A named backend that cannot run raises ValueError with the reason.

    window: None for the whole map; K or (rows, columns): each pixel sees K x K pixels around it, pushed inwards at the
    edge of the map. The tables are then [2*K - 1, dk / num_heads] whatever the map. window_stride: so many neighbours
    share the window of the one in their middle (window: separate blocks). window_dilation: every so many pixels only,
    and offsets count in such steps. Time and memory are linear in the pixels.

    >>> qkv = torch.randn(1, 7, 9, 2 * 40 + 24)
    >>> rel_h, rel_w = torch.randn(13, 20), torch.randn(17, 20)
    >>> attend_2d(qkv, rel_h, rel_w, num_heads=2, key_channels=40).shape
    torch.Size([1, 7, 9, 24])
    """
    if window is not None:
        around = make_window(window, window_stride, window_dilation)
        return _attend_windows(qkv, rel_h, rel_w, num_heads, key_channels, backend, around)
    if window_stride != 1 or window_dilation != 1:
        windows.refuse_without_window(window_stride, window_dilation)
    if qkv is None or someone_looks_on(qkv, rel_h, rel_w):  # sizes may be symbols
        _check(qkv, rel_h, rel_w, num_heads, key_channels)
        chosen = choose_backend(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels, backend=backend)
    else:
        chosen = choose_in_advance(qkv, qkv.shape, qkv.dtype, rel_h, rel_w, num_heads, key_channels, backend)
    return BACKENDS[chosen].attend(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels)


def choose_in_advance(
    like: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    num_heads: int,
    key_channels: int,
    backend: str | None,
) -> str:
    """The name of the backend for a qkv of that shape and dtype, on the device of `like`, once all is checked. To look
    it up takes a tenth of doing it again."""
    rows = None if rel_h is None else (rel_h.shape, rel_h.dtype, rel_h.device)
    columns = None if rel_w is None else (rel_w.shape, rel_w.dtype, rel_w.device)
    kind = shape, dtype, like.device, rows, columns, num_heads, key_channels, backend, _default_backend
    try:
        chosen = _checked.get(kind)
    except TypeError:  # a list among them: checked, and named
        chosen = None
    if chosen is None or not type(num_heads) is type(key_channels) is int:  # to a dict 2.0 is 2
        qkv = like.new_empty((), dtype=dtype).expand(shape)
        _check(qkv, rel_h, rel_w, num_heads, key_channels)
        sizes = {"num_heads": num_heads, "key_channels": key_channels}
        chosen = _checked[kind] = choose_backend(qkv, rel_h, rel_w, **sizes, backend=backend)
    return chosen


def _attend_windows(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    num_heads: int,
    key_channels: int,
    backend: str | None,
    window: Window,
) -> Tensor:
    _check(qkv, rel_h, rel_w, num_heads, key_channels, window)
    sizes = {"num_heads": num_heads, "key_channels": key_channels}
    height, width = qkv.shape[1:3]
    if window.covers(height, width):
        if rel_h is not None and rel_w is not None:
            rel_h, rel_w = windows.middle_of(rel_h, height), windows.middle_of(rel_w, width)
        return attend_2d(qkv, rel_h, rel_w, **sizes, backend=backend)
    named = chosen_default() if backend is None else backend
    if named is not None and known_backend(named) == "eager":
        return eager.attend(qkv, rel_h, rel_w, **sizes, window=window)
    if named in (None, "triton"):
        reason = triton_backend.why_not(qkv, rel_h, rel_w, **sizes, window=window)
        if reason is None:
            return triton_backend.attend(qkv, rel_h, rel_w, **sizes, window=window)
        _tell_once("triton in windows", reason)
    if height * width == 0:
        return eager.attend(qkv, rel_h, rel_w, **sizes, window=window)
    attend = functools.partial(attend_decomposed, backend=named)
    try:
        return windows.attend(qkv, rel_h, rel_w, window, **sizes, attend_decomposed=attend)
    except ValueError as error:
        if named != "triton":
            raise
        raise ValueError(f"{error}; the kernels for windows: {reason}") from None


def attend_decomposed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    columns: Tensor,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over the keys of a map, with a bias for the row and one for the column of a key.

    q [batch, heads, queries, depth], k [batch, heads, keys, depth], v [batch, heads, keys, value depth], rows [batch,
    heads, queries, height], columns [batch, heads, queries, width] -> [batch, heads, queries, value depth]. The logit
    of a query for the key in row y and column x is

        scale * q . k + rows[y] + columns[x]

    with scale depth ** -0.5 by default. The keys of the map come last, row by row; keys before them (a class token)
    have no bias. Queries may be any: of another map, of a window, of the same map. All five have gradients, and
    nothing of the size queries x keys is stored by the triton and sdpa backends.

    q, k and v have one dtype: bfloat16, float16, float32 or float64, and autocast does not change that. rows and
    columns may have another of these, such as the float32 of relative logits: they are cast to that of q, and their
    gradients keep their own. scale: a finite number, or None. backend: as in attend_2d, but None takes the first of
    triton, sdpa and eager that can run: which one is faster was measured for attend_2d alone.

    >>> q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 1 + 12, 16), torch.randn(1, 2, 1 + 12, 16)
    >>> rows, columns = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 4)  # a map of 3 x 4, and a class token before it
    >>> attend_decomposed(q, k, v, rows, columns).shape
    torch.Size([1, 2, 5, 16])
    """
    inputs = q, k, v, rows, columns
    decomposed.check(*inputs)
    named = chosen_default() if backend is None else backend
    scale = decomposed.scale_of(q, scale)
    for name, form in decomposed.FORMS.items() if named is None else [(named, decomposed.FORMS[known_backend(named)])]:
        reason = form.why_not(*inputs)
        if reason is None:
            return form.attend(*inputs, scale)
        if named is not None:
            raise ValueError(f"backend={named!r} cannot run: {reason}; backend=None takes the fastest that can")
        _tell_once(name, reason)
    raise AssertionError("the eager backend refuses nothing")


def attention_maps(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> Tensor:
    """The weights attend_2d averages the values with: [batch, num_heads, height*width (i), height*width (j)]."""
    _check(qkv, rel_h, rel_w, num_heads, key_channels, window)
    return eager.attention_maps(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels, window=window)


def choose_backend(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    backend: str | None = None,
) -> str:
    """The name of the backend attend_2d takes for these arguments."""
    arguments = (qkv, rel_h, rel_w)
    options = {"num_heads": num_heads, "key_channels": key_channels}
    named = chosen_default() if backend is None else backend
    if named is not None:
        reason = BACKENDS[known_backend(named)].why_not(*arguments, **options)
        if reason is not None:
            raise ValueError(f"backend={named!r} cannot run: {reason}; backend=None takes the fastest that can")
        return named
    for name in _fastest_first(qkv, rel_h is not None, num_heads, key_channels):
        reason = BACKENDS[name].why_not(*arguments, **options)
        if reason is None:
            return name
        _tell_once(name, reason)
    raise AssertionError("the eager backend refuses nothing")


def _fastest_first(qkv: Tensor, positions: bool, num_heads: int, key_channels: int) -> list[str]:
    """All backends in the order in which attend_2d asks whether they can run."""
    value_depth = (qkv.shape[3] - 2 * key_channels) // num_heads
    if qkv.is_cuda and prefers_sdpa(qkv.dtype, positions, key_channels // num_heads, value_depth):
        return ["sdpa", "triton", "eager"]
    return list(BACKENDS)


def known_backend(name: str) -> str:
    """The name itself, or a ValueError that lists the backends there are."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(sorted(BACKENDS))} or None, got backend={shown(name)}")
    return name


def chosen_default() -> str | None:
    """The backend that overrides the choice in this process; a ValueError if the environment names one there is not."""
    if _default_backend not in (None, *BACKENDS):
        raise ValueError(f"AACONV_BACKEND must be one of {', '.join(sorted(BACKENDS))}, got {_default_backend!r}")
    return _default_backend


def set_default_backend(name: str | None) -> None:
    """Override the choice of every attend_2d(backend=None) in this process; None restores it.

    The environment variable AACONV_BACKEND does the same from outside.

    >>> set_default_backend("eager")
    >>> set_default_backend(None)
    """
    global _default_backend
    _default_backend = None if name is None else known_backend(name)


@contextmanager
def default_backend(name: str | None) -> Iterator[None]:
    """set_default_backend for the length of a with block.

    >>> with default_backend("eager"):
    ...     out = attend_2d(torch.randn(1, 4, 4, 24), None, None, num_heads=2, key_channels=8)
    """
    global _default_backend
    before = _default_backend
    set_default_backend(name)
    try:
        yield
    finally:
        _default_backend = before


def _tell_once(name: str, reason: str) -> None:
    if torch.compiler.is_compiling() or (name, reason) in _told:
        return
    _told.add((name, reason))
    _log.info("attention backend %s is passed over: %s", name, reason)


def _check(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> None:
    check_floating("qkv", qkv)
    if qkv.dim() != 4:
        unfold = "; try qkv.unflatten(1, (height, width))" if qkv.dim() == 3 else ""
        raise ValueError(f"qkv must be [batch, height, width, 2*dk + dv], got shape {tuple(qkv.shape)}{unfold}")
    _, height, width, channels = qkv.shape
    _check_whole("num_heads", num_heads)
    _check_whole("key_channels", key_channels)
    if num_heads < 1 or key_channels < 1 or key_channels % num_heads:
        enough = f"; try key_channels={max(1, -(-key_channels // num_heads)) * num_heads}" if num_heads > 0 else ""
        raise ValueError(
            f"key_channels must be a positive multiple of num_heads, "
            f"got key_channels={key_channels}, num_heads={num_heads}{enough}"
        )
    value_channels = channels - 2 * key_channels
    if value_channels < 1 or value_channels % num_heads:
        of_first = qkv.shape[1] - 2 * key_channels
        first = of_first > 0 and of_first % num_heads == 0
        raise ValueError(
            f"qkv must hold 2 * key_channels + value channels, the latter a positive multiple of num_heads; "
            f"got {channels} channels with key_channels={key_channels}, num_heads={num_heads}"
            f"{'; if channels come first, try qkv.permute(0, 2, 3, 1)' if first else ''}"
        )
    if (rel_h is None) != (rel_w is None):
        one, other = ("rel_h", "rel_w") if rel_h is None else ("rel_w", "rel_h")
        raise ValueError(
            f"rel_h and rel_w must both be given or both be None, got {one}=None; for {other} alone give zeros as {one}"
        )
    if rel_h is None or rel_w is None:
        return
    check_floating("rel_h", rel_h)
    check_floating("rel_w", rel_w)
    if rel_h.dim() != rel_w.dim():
        shared = "rel_h" if rel_h.dim() < rel_w.dim() else "rel_w"
        raise ValueError(
            f"rel_h and rel_w must both be shared by the heads or both be per head, got shapes {tuple(rel_h.shape)} "
            f"and {tuple(rel_w.shape)}; try {shared}.expand({num_heads}, -1, -1)"
        )
    depth = key_channels // num_heads
    rows, columns = (height, width) if window is None else (window.rows.window, window.columns.window)
    for name, table, length in (("rel_h", rel_h, rows), ("rel_w", rel_w, columns)):
        if table.device != qkv.device:
            here = f"try {name}.to({str(qkv.device)!r})"
            raise ValueError(f"{name} must be on the device of qkv, {qkv.device}, got {table.device}; {here}")
        expected = (2 * length - 1, depth)
        if tuple(table.shape) not in (expected, (num_heads, *expected)):
            if length < 1:
                empty = f"an empty map of {rows} x {columns}"
                raise ValueError(f"qkv must have pixels if there are tables, got {empty}; rel_h=rel_w=None takes it")
            what = "map" if window is None else "window"
            raise ValueError(
                f"{name} must be {list(expected)} or {[num_heads, *expected]} for a {what} of {rows} x {columns}, "
                f"got {list(table.shape)}"
            )


def _check_whole(name: str, number: int) -> None:
    """torch.jit.trace has tensors for the sizes of one."""
    known = isinstance(number, (int, torch.SymInt, Integral)) and not isinstance(number, bool)
    if not known and not (isinstance(number, Tensor) and torch.jit.is_tracing()):
        raise ValueError(f"{name} must be an int, got {name}={shown(number)}")
