"""The backward kernels of local attention: of queries, of keys and values, of the tables. See triton_window_kernels."""

import triton
import triton.language as tl

from .triton_kernels import LN2, add_product
from .triton_pack import load_pixels, store_pixels
from .triton_window import BLOCK_OF_LINES as LINES_AT_ONCE
from .triton_window_kernels import (
    find_tile,
    first_seen,
    load_columns,
    load_packed,
    load_rows,
    over_columns,
    seen_by_tile,
    tile_pixels,
)

BLOCK_OF_LINES = tl.constexpr(LINES_AT_ONCE)
"""Also the depth of a product."""


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


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_backward_queries(
    queries, keys, values, relative, lse, grads, delta, grad_qkv, first_image_head, height, width,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, LINES: tl.constexpr, RELATIVE: tl.constexpr, LOG_SUM: tl.constexpr, DELTA: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits, which these take the place of.
    One program a tile of queries of an image-head."""
    BLOCK_M: tl.constexpr = TILE_H * TILE_W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    pixels = height * width
    local_image_head, image_head, image, head, y0, x0, rows, columns, origin = find_tile(
        first_image_head, height, width, HEADS, APART_H, APART_W, TILE_H, TILE_W
    )
    y, x, pixel = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    inside = (y < rows) & (x < columns)
    row_begin, row_end, column_begin = seen_by_tile(
        y0, x0, rows, columns, WINDOW_H, WINDOW_W, SHARED_H, SHARED_W, TILE_H, KEY_ROWS
    )
    first = local_image_head * (pixels + 1)
    keys += first * D_PAD
    values += first * V_PAD
    relative += first * (2 * LINES)
    q = load_packed(queries + first * D_PAD, pixel, D_PAD, D_PAD)
    do = load_packed(grads + first * V_PAD, pixel, V_PAD, V_PAD)
    if not DELTA:
        dots = tl.load(delta + local_image_head * pixels + pixel)
    bias = load_columns(relative, pixel, column_begin, LINES, KEY_ROWS, KEY_COLS)
    if not LOG_SUM:
        lse += image_head * (2 * pixels) + pixel
        peak, log_sum = tl.load(lse), tl.load(lse + pixels)
        if not EXACT:
            bias -= (peak + log_sum)[:, None]
    grad_q = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    at = relative + (pixel * (2 * LINES))[:, None]  # no other program reads these
    by_row = load_rows(relative, pixel, row_begin, LINES, KEY_ROWS)
    for key_y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key = tile_pixels(
            key_y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
        )
        k = load_packed(keys, key, D_PAD, D_PAD)
        v = load_packed(values, key, V_PAD, V_PAD)
        s = bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        by_row = load_rows(relative, pixel, key_y0 + KEY_ROWS, LINES, KEY_ROWS)
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if EXACT:
            s = (s * SCALE - peak[:, None]) - log_sum[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = tl.exp2(s) * (dp if DELTA else dp - dots[:, None])
        if RELATIVE:
            by_place = tl.reshape(ds, [BLOCK_M, KEY_ROWS, KEY_COLS])
            grad_columns += tl.sum(by_place, 1)
            place = tl.multiple_of(key_y0 & (LINES - 1), KEY_ROWS) + tl.arange(0, KEY_ROWS)[None, :]
            tl.store(at + place, tl.sum(by_place, 2).to(relative.dtype.element_ty), mask=inside[:, None])
        grad_q = add_product(grad_q, ds.to(k.dtype), k, PRECISION, EXACT)
    if RELATIVE:
        place = (column_begin + tl.arange(0, KEY_COLS)) & (LINES - 1)
        grad_columns = grad_columns.to(relative.dtype.element_ty)
        tl.store(at + (LINES + place)[None, :], grad_columns, mask=inside[:, None])
    grad_at = grad_qkv + image * pixels * GRAD_W + head * D
    store_pixels(grad_at, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)


@triton.jit
def choose_line(line, TILE: tl.constexpr, dtype: tl.constexpr):
    """[TILE, BLOCK_OF_LINES]: a one at the line of each key, so that a product picks its logits."""
    among = tl.arange(0, BLOCK_OF_LINES)[None, :]
    return tl.where((line & (BLOCK_OF_LINES - 1))[:, None] == among, 1.0, 0.0).to(dtype)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_backward_keys(
    queries, keys, values, relative, lse, grads, delta, grad_qkv, first_image_head, height, width,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    LINES: tl.constexpr, LOG_SUM: tl.constexpr, DELTA: tl.constexpr, SCALE: tl.constexpr, LOGIT_SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program a tile of TILE_H x TILE_W keys of an image-head, over the queries that
    see some of them, KEY_ROWS x KEY_COLS at a time. Relative logits enter as products with a one at the key's line."""
    TILE: tl.constexpr = TILE_H * TILE_W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    pixels = height * width
    local_image_head, image_head, image, head, y0, x0, rows, columns, origin = find_tile(
        first_image_head, height, width, HEADS, APART_H, APART_W, TILE_H, TILE_W
    )
    key_y, key_x, key = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    row_begin = first_to_see(y0, rows, WINDOW_H, SHARED_H)
    row_end = last_to_see(tl.minimum(y0 + TILE_H, rows) - 1, rows, WINDOW_H, SHARED_H) + 1
    column_begin = first_to_see(x0, columns, WINDOW_W, SHARED_W)
    column_end = last_to_see(tl.minimum(x0 + TILE_W, columns) - 1, columns, WINDOW_W, SHARED_W) + 1
    first = local_image_head * (pixels + 1)
    queries += first * D_PAD
    grads += first * V_PAD
    delta += local_image_head * pixels
    lse += image_head * (2 * pixels)
    k = load_packed(keys + first * D_PAD, key, D_PAD, D_PAD)
    v = load_packed(values + first * V_PAD, key, V_PAD, V_PAD)
    relative += first * (2 * LINES)
    by_rows = relative + ((y0 & (LINES - 1)) // BLOCK_OF_LINES * BLOCK_OF_LINES)
    by_columns = relative + LINES + ((x0 & (LINES - 1)) // BLOCK_OF_LINES * BLOCK_OF_LINES)
    this_row, this_column = choose_line(key_y, TILE, k.dtype), choose_line(key_x, TILE, k.dtype)
    grad_k = tl.zeros([TILE, D_PAD], tl.float32)
    grad_v = tl.zeros([TILE, V_PAD], tl.float32)
    for query_x0 in range(column_begin, column_end, KEY_COLS):
        for query_y0 in range(row_begin, row_end, KEY_ROWS):
            y, x, query = tile_pixels(
                query_y0, query_x0, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
            )
            query = tl.where((y < row_end) & (x < column_end), query, pixels)  # else the one that sees nothing
            q = load_packed(queries, query, D_PAD, D_PAD)
            do = load_packed(grads, query, V_PAD, V_PAD)
            for_rows = load_packed(by_rows, query, BLOCK_OF_LINES, 2 * LINES)
            for_columns = load_packed(by_columns, query, BLOCK_OF_LINES, 2 * LINES)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            s = add_product(s, this_row, tl.trans(for_rows), PRECISION, EXACT)
            s = add_product(s, this_column, tl.trans(for_columns), PRECISION, EXACT)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            existing = tl.minimum(query, pixels - 1)
            if not LOG_SUM:
                peak, log_sum = tl.load(lse + existing), tl.load(lse + pixels + existing)
                s = (s * SCALE - peak[None, :]) - log_sum[None, :]
            if not DELTA:
                dp -= tl.load(delta + existing)[None, :]
            p = tl.exp2(s)
            grad_v = add_product(grad_v, p.to(do.dtype), do, PRECISION, EXACT)
            grad_k = add_product(grad_k, (p * dp).to(q.dtype), q, PRECISION, EXACT)
    grad_qkv += image * pixels * GRAD_W
    inside = (key_y < rows) & (key_x < columns)
    store_pixels(grad_qkv + (HEADS + head) * D, key * GRAD_W, inside, grad_k * LOGIT_SCALE, D, D_PAD)
    store_pixels(grad_qkv + 2 * HEADS * D + head * DV, key * GRAD_W, inside, grad_v, DV, V_PAD)


@triton.jit
def gradients_by_offset(
    relative, pixel, exists, line, side, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr,
    LINES: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """[pixels, OFFSETS]: the gradients of relative logits, by the offset of the table."""
    query = line // APART
    length = tl.cdiv(side - line % APART, APART)
    first = first_seen(query, length, WINDOW, SHARED)
    seen_line = query[:, None] + tl.arange(0, OFFSETS)[None, :] - (WINDOW - 1)
    place = seen_line - first[:, None]
    seen = exists[:, None] & (place >= 0) & (place < WINDOW) & (seen_line < length[:, None])
    at = relative + (pixel * (2 * LINES))[:, None] + (seen_line & (LINES - 1))
    return tl.load(at, mask=seen, other=0.0)


@triton.jit(do_not_specialize=["first_image_head", "height", "width", "image_heads", "first_part", "splits"])
def window_backward_tables(
    qkv, rel_h, rel_w, relative, grad_qkv, grad_tables,
    first_image_head, height, width, image_heads, first_part, splits,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    LINES: tl.constexpr, OFFSETS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, LOGIT_SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients that the queries' kernel has left in the place of relative logits into those of the queries (added
    to what is there) and of the tables.

    One program every splits-th block of BLOCK pixels, of all heads or, where each has tables of its own, of one. It
    owns its part of the tables' gradients, grad_tables [parts, (heads,) rows' and columns' offsets, D], so nothing is
    added by two programs.
    """
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    pixels = height * width
    blocks = tl.cdiv(pixels, BLOCK)
    own_head = tl.program_id(0) // splits  # 0 for shared tables
    split = tl.program_id(0) % splits
    owned = image_heads // HEADS if TABLES_PER_HEAD else image_heads
    offset = tl.arange(0, OFFSETS)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if TABLES_PER_HEAD:
        rel_h += own_head * ((2 * WINDOW_H - 1) * D)
        rel_w += own_head * ((2 * WINDOW_W - 1) * D)
    vectors_h = load_pixels(rel_h, offset * D, offset < 2 * WINDOW_H - 1, D, D_PAD).to(dtype)
    vectors_w = load_pixels(rel_w, offset * D, offset < 2 * WINDOW_W - 1, D, D_PAD).to(dtype)
    grad_h = tl.zeros([OFFSETS, D_PAD], tl.float32)
    grad_w = tl.zeros([OFFSETS, D_PAD], tl.float32)
    zero = tl.full((), 0, tl.int64)  # int64: a batch may hold more than 2**31 elements
    for block in range(split, owned * blocks, splits):
        local = zero + block // blocks
        if TABLES_PER_HEAD:
            local = local * HEADS + own_head
        image, head = (local + first_image_head) // HEADS, (local + first_image_head) % HEADS
        pixel = block % blocks * BLOCK + tl.arange(0, BLOCK)
        exists = pixel < pixels
        of_head = relative + local * (pixels + 1) * (2 * LINES)
        q = load_pixels(qkv + image * pixels * STRIDE + head * D, pixel * STRIDE, exists, D, D_PAD)
        by_row = gradients_by_offset(
            of_head, pixel, exists, pixel // width, height, WINDOW_H, SHARED_H, APART_H, LINES, OFFSETS
        )
        by_column = gradients_by_offset(
            of_head + LINES, pixel, exists, pixel % width, width, WINDOW_W, SHARED_W, APART_W, LINES, OFFSETS
        )
        more = tl.dot(by_row, vectors_h, input_precision=PRECISION)
        more = add_product(more, by_column, vectors_w, PRECISION, EXACT)
        grad_at = grad_qkv + image * pixels * GRAD_W + head * D
        grad_q = load_pixels(grad_at, pixel * GRAD_W, exists, D, D_PAD).to(tl.float32)
        store_pixels(grad_at, pixel * GRAD_W, exists, grad_q + more * LOGIT_SCALE, D, D_PAD)
        grad_h = add_product(grad_h, tl.trans(by_row), q, PRECISION, EXACT)
        grad_w = add_product(grad_w, tl.trans(by_column), q, PRECISION, EXACT)
    LENGTH: tl.constexpr = 2 * WINDOW_H + 2 * WINDOW_W - 2
    part = first_part + split
    if TABLES_PER_HEAD:
        part = part * HEADS + own_head
    grad_tables += part * (LENGTH * D)
    store_pixels(grad_tables, offset * D, offset < 2 * WINDOW_H - 1, grad_h * LOGIT_SCALE, D, D_PAD)
    grad_tables += (2 * WINDOW_H - 1) * D
    store_pixels(grad_tables, offset * D, offset < 2 * WINDOW_W - 1, grad_w * LOGIT_SCALE, D, D_PAD)
