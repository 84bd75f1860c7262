"""Fused local attention with relative positions, forward and backward: the Triton kernels alone.

A query sees the keys of a window, see windows.py. What it sees is a condition on the key's row and one on its column,
and so is the relative term: `window_pack` computes for each query its logits for the WINDOW rows and WINDOW columns
that it sees, and lays out keys and values so that a load is one aligned piece,

    relative [pixel, 2, SIDE]   q . rel_h of the rows seen, from the first on, then q . rel_w of the columns seen
    keys     [pixel, D_PAD]     k | 0 ...
    values   [pixel, V_PAD]     v | 1 | 0 ...: the one sums the weights in the forward

The others walk over tiles of TILE_H x TILE_W queries (keys in the keys' kernel), each with the part of the map that
its windows cover, read in place. Rows and columns out of sight have a bias of OUT, so that no weight needs a mask. A
dilation takes the map apart into APART_H x APART_W maps of every so many pixels, which never see each other.

As in triton_kernels, logits are in base 2: in half precision keys and relative logits bring the factor KEY_SCALE, in
float32 SCALE holds it. Sizes of the map are arguments, not constants: another size does not compile anew.
"""

import triton
import triton.language as tl

from .triton_kernels import LN2, add_product
from .triton_pack import find_head, load_pixels, store_pixels

OUT = tl.constexpr(-1e30)


@triton.jit
def first_seen(query, length, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first key of a query's window along a side; SHARED neighbours have one window (windows.Axis.start)."""
    middle = tl.minimum(query // SHARED * SHARED + SHARED // 2, length - 1)
    return tl.maximum(tl.minimum(middle - WINDOW // 2, length - WINDOW), 0)


@triton.jit
def first_to_see(key, length, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first query whose window reaches a key."""
    group = (key - WINDOW + WINDOW // 2 - SHARED // 2 + SHARED) // SHARED
    group = tl.minimum(group, (length - 1) // SHARED)
    return tl.where(key < WINDOW, 0, group * SHARED)


@triton.jit
def last_to_see(key, length, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The last query whose window reaches a key."""
    group = (key + WINDOW // 2 - SHARED // 2) // SHARED
    return tl.where(key >= length - WINDOW, length - 1, tl.minimum(group * SHARED + SHARED - 1, length - 1))


@triton.jit
def find_tile(
    number, height, width, APART_H: tl.constexpr, APART_W: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr
):
    """Of a tile of an image-head: its first row and column, the sides of the map it is in, and where that begins."""
    down, across = tl.cdiv(tl.cdiv(height, APART_H), TILE_H), tl.cdiv(tl.cdiv(width, APART_W), TILE_W)
    apart, tile = number // (down * across), number % (down * across)
    maps_across = tl.minimum(APART_W, width)  # beyond there would be maps without pixels
    above, left = apart // maps_across, apart % maps_across
    rows, columns = tl.cdiv(height - above, APART_H), tl.cdiv(width - left, APART_W)
    return tile // across * TILE_H, tile % across * TILE_W, rows, columns, above * width + left


@triton.jit
def seen_logits(relative, pixel, first, line, length, WINDOW: tl.constexpr, SIDE: tl.constexpr, RELATIVE: tl.constexpr):
    """Relative logits of queries for lines, OUT for those that they do not see. `pixel` and `first` are the queries',
    of which one dimension has size 1, and so has the other of `line`."""
    place = line - first
    seen = (place >= 0) & (place < WINDOW) & (line < length)
    if RELATIVE:
        logits = tl.load(relative + pixel * (2 * SIDE) + place, mask=seen, other=0.0).to(tl.float32)
    else:
        logits = tl.zeros(seen.shape, tl.float32)
    return tl.where(seen, logits, OUT)


@triton.jit
def over_rows(by_column, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_COLS] -> [queries, KEY_ROWS * KEY_COLS], the same for every row."""
    QUERIES: tl.constexpr = by_column.shape[0]
    spread = tl.broadcast_to(by_column[:, None, :], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def over_columns(by_row, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS] -> [queries, KEY_ROWS * KEY_COLS], the same for every column."""
    QUERIES: tl.constexpr = by_row.shape[0]
    spread = tl.broadcast_to(by_row[:, :, None], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def load_packed(base, pixel, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """[pixels, WIDTH] of packed operands: all pixels exist."""
    return tl.load(base + (pixel * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit
def tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    """The rows, columns and pixels of a tile, the last of the map in place of those beyond, and which are inside."""
    slot = tl.arange(0, TILE_H * TILE_W)
    y, x = y0 + slot // TILE_W, x0 + slot % TILE_W
    inside = (y < rows) & (x < columns)
    y, x = tl.minimum(y, rows - 1), tl.minimum(x, columns - 1)
    return y, x, origin + y * (APART_H * width) + x * APART_W, inside


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_pack(
    qkv, rel_h, rel_w, queries, keys, values, relative, first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, SIDE: tl.constexpr, OFFSETS: tl.constexpr, RELATIVE: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, KEY_SCALE: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program BLOCK pixels of an image-head. The queries are laid out for the backward alone."""
    pixels = height * width
    blocks = tl.cdiv(pixels, BLOCK)
    local_image_head, _, image, head = find_head(tl.program_id(0) // blocks, first_image_head, HEADS)
    pixel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    exists = pixel < pixels
    qkv += image * pixels * STRIDE
    q = load_pixels(qkv + head * D, pixel * STRIDE, exists, D, D_PAD)
    k = load_pixels(qkv + (HEADS + head) * D, pixel * STRIDE, exists, D, D_PAD)
    v = load_pixels(qkv + 2 * HEADS * D + head * DV, pixel * STRIDE, exists, DV, V_PAD)
    v = tl.where((tl.arange(0, V_PAD) == DV)[None, :], 1.0, v.to(tl.float32))
    first = local_image_head * pixels
    store_pixels(keys + first * D_PAD, pixel * D_PAD, exists, k.to(tl.float32) * KEY_SCALE, D_PAD, D_PAD)
    store_pixels(values + first * V_PAD, pixel * V_PAD, exists, v, V_PAD, V_PAD)
    if BACKWARD:
        store_pixels(queries + first * D_PAD, pixel * D_PAD, exists, q, D_PAD, D_PAD)
    if RELATIVE:
        if TABLES_PER_HEAD:
            rel_h += head * ((2 * WINDOW_H - 1) * D)
            rel_w += head * ((2 * WINDOW_W - 1) * D)
        offset = tl.arange(0, OFFSETS)
        at = (relative + first * (2 * SIDE)) + (pixel * (2 * SIDE))[:, None]
        vectors = load_pixels(rel_h, offset * D, offset < 2 * WINDOW_H - 1, D, D_PAD).to(q.dtype)
        logits = tl.dot(q, tl.trans(vectors), input_precision=PRECISION) * KEY_SCALE
        place = places_of_offsets(pixel // width, height, WINDOW_H, SHARED_H, APART_H, OFFSETS)
        seen = exists[:, None] & (place >= 0) & (place < WINDOW_H)
        tl.store(at + place, logits.to(relative.dtype.element_ty), mask=seen)
        vectors = load_pixels(rel_w, offset * D, offset < 2 * WINDOW_W - 1, D, D_PAD).to(q.dtype)
        logits = tl.dot(q, tl.trans(vectors), input_precision=PRECISION) * KEY_SCALE
        place = places_of_offsets(pixel % width, width, WINDOW_W, SHARED_W, APART_W, OFFSETS)
        seen = exists[:, None] & (place >= 0) & (place < WINDOW_W)
        tl.store(at + (SIDE + place), logits.to(relative.dtype.element_ty), mask=seen)


@triton.jit
def places_of_offsets(
    line, side, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr, OFFSETS: tl.constexpr
):
    """[queries, OFFSETS]: of the line at each offset of the table its place in the window of a query in `line`."""
    query = line // APART
    before = query - first_seen(query, tl.cdiv(side - line % APART, APART), WINDOW, SHARED)
    return tl.arange(0, OFFSETS)[None, :] - (WINDOW - 1) + before[:, None]


@triton.jit
def mix_values(
    q, keys, values, relative, pixel, first_row, columns_bias, row_begin, row_end, column_begin, rows, columns,
    origin, width,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, V_OUT: tl.constexpr, DV: tl.constexpr, ONES: tl.constexpr,
    SIDE: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, APART_H: tl.constexpr, APART_W: tl.constexpr, BLOCK_M: tl.constexpr,
    KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, V_OUT]: the values under weights exp2(logit - peak), not yet divided by their sum, that sum, the peak.
    ONLINE follows the largest logit from tile to tile, which is always safe; else nothing is taken off."""
    mixed = tl.zeros([BLOCK_M, V_OUT], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf") if ONLINE else 0.0, tl.float32)
    some = tl.arange(0, KEY_ROWS)[None, :]
    by_row = seen_logits(
        relative, pixel[:, None], first_row[:, None], row_begin + some, rows, WINDOW_H, SIDE, RELATIVE
    )
    for y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key, _ = tile_pixels(
            y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
        )
        k = load_packed(keys, key, D_PAD, D_PAD)
        v = load_packed(values, key, V_OUT, V_PAD)
        s = columns_bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        # Of the next tile: these loads are too small to be done ahead by triton.
        by_row = seen_logits(
            relative, pixel[:, None], first_row[:, None], y0 + KEY_ROWS + some, rows, WINDOW_H, SIDE, RELATIVE
        )
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if ONLINE:
            new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
            fade = tl.exp2(peak - new_peak)
            mixed *= fade[:, None]
            total *= fade
            peak = new_peak
        p = tl.exp2(s * SCALE - peak[:, None]) if ONLINE else tl.exp2(s)
        mixed = add_product(mixed, p.to(v.dtype), v, PRECISION, EXACT)
        if not ONES:
            total += tl.sum(p, 1)
    if ONES:  # then the sum stands beside the mixed values
        total = tl.sum(tl.where((tl.arange(0, V_OUT) == DV)[None, :], mixed, 0.0), 1)
    return mixed, total, peak


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_forward(
    qkv, keys, values, relative, out, lse, first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, V_OUT: tl.constexpr, ONES: tl.constexpr, SIDE: tl.constexpr, RELATIVE: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, ONLINE: tl.constexpr,
    SMALLEST_SUM: tl.constexpr, LARGEST_SUM: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program a tile of queries of an image-head. lse is [image_heads, 2, pixels]: what is taken off the logits and
    the logarithm of the sum over that, both in base 2. Where nothing is taken off and the sum comes out too large or
    too small, it is done again, online."""
    BLOCK_M: tl.constexpr = TILE_H * TILE_W
    pixels = height * width
    programs = programs_of_a_head(height, width, APART_H, APART_W, TILE_H, TILE_W)
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // programs, first_image_head, HEADS)
    y0, x0, rows, columns, origin = find_tile(
        tl.program_id(0) % programs, height, width, APART_H, APART_W, TILE_H, TILE_W
    )
    y, x, pixel, inside = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    row_begin = first_seen(y0, rows, WINDOW_H, SHARED_H)
    last = tl.minimum(y0 + TILE_H, rows) - 1
    row_end = tl.minimum(first_seen(last, rows, WINDOW_H, SHARED_H) + WINDOW_H, rows)
    column_begin = first_seen(x0, columns, WINDOW_W, SHARED_W)
    first_row, first_column = first_seen(y, rows, WINDOW_H, SHARED_H), first_seen(x, columns, WINDOW_W, SHARED_W)
    keys += local_image_head * pixels * D_PAD
    values += local_image_head * pixels * V_PAD
    relative += local_image_head * pixels * (2 * SIDE)
    q = load_pixels(qkv + image * pixels * STRIDE + head * D, pixel * STRIDE, inside, D, D_PAD)
    key_column = column_begin + tl.arange(0, KEY_COLS)[None, :]
    bias = seen_logits(
        relative + SIDE, pixel[:, None], first_column[:, None], key_column, columns, WINDOW_W, SIDE, RELATIVE
    )
    bias = over_rows(bias, KEY_ROWS, KEY_COLS)
    mixed, total, peak = mix_values(
        q, keys, values, relative, pixel, first_row, bias, row_begin, row_end, column_begin, rows, columns, origin,
        width, D_PAD, V_PAD, V_OUT, DV, ONES, SIDE, RELATIVE, SCALE, EXACT, PRECISION, WINDOW_H, APART_H, APART_W,
        BLOCK_M, KEY_ROWS, KEY_COLS, ONLINE,
    )  # fmt: skip
    if not ONLINE:
        well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
        if tl.min(well.to(tl.int32), 0) == 0:  # also if it is not a number
            mixed, total, peak = mix_values(
                q, keys, values, relative, pixel, first_row, bias, row_begin, row_end, column_begin, rows, columns,
                origin, width, D_PAD, V_PAD, V_OUT, DV, ONES, SIDE, RELATIVE, SCALE, EXACT, PRECISION, WINDOW_H,
                APART_H, APART_W, BLOCK_M, KEY_ROWS, KEY_COLS, True,
            )  # fmt: skip
    # In float32 divided as IEEE has it: triton's own division may be two units off, as many as all the rest.
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], mixed.shape)) if EXACT else mixed / total[:, None]
    store_pixels(out + image * pixels * (HEADS * DV) + head * DV, pixel * (HEADS * DV), inside, result, DV, V_OUT)
    lse += image_head * (2 * pixels) + pixel
    tl.store(lse, peak, mask=inside)
    tl.store(lse + pixels, tl.log2(total), mask=inside)


@triton.jit
def programs_of_a_head(
    height, width, APART_H: tl.constexpr, APART_W: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr
):
    """Tiles of all the maps that a dilation makes of one."""
    down, across = tl.cdiv(tl.cdiv(height, APART_H), TILE_H), tl.cdiv(tl.cdiv(width, APART_W), TILE_W)
    return down * across * tl.minimum(APART_H, height) * tl.minimum(APART_W, width)
