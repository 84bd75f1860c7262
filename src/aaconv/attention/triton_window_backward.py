"""The backward kernels of local attention: of queries, of keys and values, of the tables. See triton_window_kernels."""

import triton
import triton.language as tl

from .triton_kernels import LN2, add_product, multiply
from .triton_pack import load_pixels, store_pixels
from .triton_window import BLOCK_OF_LINES as LINES_AT_ONCE
from .triton_window_kernels import (
    find_tile,
    first_seen,
    keep_before,
    lines_in_sight,
    load_columns,
    load_packed,
    load_rows,
    over_columns,
    row_places,
    seen_by_tile,
    store_after,
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
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, VALUE_AT: tl.constexpr, JOINT: tl.constexpr,
    LINES_H: tl.constexpr, LINES_W: tl.constexpr, RELATIVE: tl.constexpr, LOG_SUM: tl.constexpr, DELTA: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits, which these take the place of.
    One program a tile of queries of an image-head."""
    BLOCK_M: tl.constexpr = TILE_H * TILE_W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    FIRST: tl.constexpr = KEY if JOINT else D
    # In half precision a product sums over the columns, where all but its first KEY_ROWS results are zero.
    ALIGNED: tl.constexpr = WINDOW_H // 2 % KEY_ROWS == 0
    SUMS: tl.constexpr = KEY_ROWS if EXACT or KEY_ROWS > 8 else 8
    pixels = height * width
    local_image_head, image_head, image, head, y0, x0, rows, columns, origin = find_tile(
        first_image_head, height, width, HEADS, APART_H, APART_W, TILE_H, TILE_W
    )
    y, x, pixel = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    inside = (y < rows) & (x < columns)
    row_begin, row_end, column_begin = seen_by_tile(
        y0, x0, rows, columns, WINDOW_H, WINDOW_W, SHARED_H, SHARED_W, TILE_H, KEY_ROWS, ALIGNED
    )
    first = local_image_head * (pixels + 1)
    keys += first * KEY_STRIDE
    values = keys + KEY if JOINT else values + first * VALUE_STRIDE
    queries += first * KEY_STRIDE
    grads = queries + KEY if JOINT else grads + first * VALUE_STRIDE
    relative += first * (LINES_H + LINES_W)
    q = load_packed(queries, pixel, KEY, KEY_STRIDE)
    do = load_packed(grads, pixel, VALUE, VALUE_STRIDE)
    if JOINT:
        rest_of_q = keep_before(do, VALUE_AT, True)
        do = keep_before(do, VALUE_AT, False)
    if not DELTA:
        dots = tl.load(delta + local_image_head * pixels + pixel)
    bias = load_columns(relative, pixel, column_begin, LINES_H, LINES_W, KEY_ROWS, KEY_COLS)
    if not LOG_SUM:
        lse += image_head * (2 * pixels) + pixel
        peak, log_sum = tl.load(lse), tl.load(lse + pixels)
        if not EXACT:
            bias -= (peak + log_sum)[:, None]
    grad_q = tl.zeros([BLOCK_M, KEY], tl.float32)
    grad_rest = tl.zeros([BLOCK_M, VALUE], tl.float32)
    grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    at = relative + (pixel * (LINES_H + LINES_W))[:, None]  # no other program reads these
    sums = tl.arange(0, SUMS)[None, :]
    row_of_key = (tl.arange(0, KEY_ROWS * KEY_COLS) // KEY_COLS)[:, None]
    this_row = tl.where(row_of_key == sums, 1.0, 0.0).to(q.dtype)
    by_row = load_rows(relative, pixel, row_begin, LINES_H, LINES_W, KEY_ROWS, ALIGNED)
    for key_y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key = tile_pixels(
            key_y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
        )
        k = load_packed(keys, key, KEY, KEY_STRIDE)
        v = load_packed(values, key, VALUE, VALUE_STRIDE)
        s = bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        by_row = load_rows(relative, pixel, key_y0 + KEY_ROWS, LINES_H, LINES_W, KEY_ROWS, ALIGNED)
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if JOINT:
            s = add_product(s, rest_of_q, tl.trans(v), PRECISION, EXACT)
        if EXACT:
            s = (s * SCALE - peak[:, None]) - log_sum[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = multiply(tl.exp2(s), dp if DELTA else dp - dots[:, None], EXACT)
        rounded = ds.to(k.dtype)
        if RELATIVE:
            by_place = tl.reshape(ds, [BLOCK_M, KEY_ROWS, KEY_COLS])
            grad_columns += tl.sum(by_place, 1)
            grad_rows = tl.sum(by_place, 2) if EXACT else tl.dot(rounded, this_row)
            place = row_places(key_y0, LINES_H, SUMS, KEY_ROWS, ALIGNED)[None, :]
            tl.store(at + place, grad_rows.to(relative.dtype.element_ty), mask=inside[:, None] & (sums < KEY_ROWS))
        grad_q = add_product(grad_q, rounded, k, PRECISION, EXACT)
        if JOINT:
            grad_rest = add_product(grad_rest, rounded, v, PRECISION, EXACT)
    if RELATIVE:
        place = LINES_H + ((column_begin + tl.arange(0, KEY_COLS)) & (LINES_W - 1))
        tl.store(at + place[None, :], grad_columns.to(relative.dtype.element_ty), mask=inside[:, None])
    grad_at = grad_qkv + image * pixels * GRAD_W + head * D
    store_pixels(grad_at, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), FIRST, KEY)
    if JOINT:
        store_pixels(grad_at + KEY, pixel * GRAD_W, inside, grad_rest * (SCALE * LN2), D - KEY, VALUE)


@triton.jit
def choose_line(line, BLOCK: tl.constexpr, FROM: tl.constexpr, dtype: tl.constexpr):
    """[keys, BLOCK_OF_LINES]: a one at each key's line among BLOCK from FROM on, so that a product picks its logits."""
    among = tl.arange(0, BLOCK_OF_LINES)[None, :] - FROM
    return tl.where((line & (BLOCK - 1))[:, None] == among, 1.0, 0.0).to(dtype)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_backward_keys(
    queries, keys, values, relative, lse, grads, delta, grad_qkv, first_image_head, height, width,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, VALUE_AT: tl.constexpr, JOINT: tl.constexpr,
    LINES_H: tl.constexpr, LINES_W: tl.constexpr, LOG_SUM: tl.constexpr, DELTA: tl.constexpr, SCALE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program a tile of TILE_H x TILE_W keys of an image-head, over the queries that
    see some of them, KEY_ROWS x KEY_COLS at a time. Relative logits enter as products with a one at the key's line."""
    TILE: tl.constexpr = TILE_H * TILE_W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    FIRST: tl.constexpr = KEY if JOINT else D
    ALL_LINES: tl.constexpr = LINES_H + LINES_W
    HALF: tl.constexpr = BLOCK_OF_LINES // 2
    ONE_PRODUCT: tl.constexpr = TILE_H <= HALF and TILE_W <= HALF  # rows and columns share its depth
    BLOCK: tl.constexpr = HALF if ONE_PRODUCT else BLOCK_OF_LINES
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
    queries += first * KEY_STRIDE
    grads = queries + KEY if JOINT else grads + first * VALUE_STRIDE
    keys += first * KEY_STRIDE
    values = keys + KEY if JOINT else values + first * VALUE_STRIDE
    delta += local_image_head * pixels
    lse += image_head * (2 * pixels)
    k = load_packed(keys, key, KEY, KEY_STRIDE)
    v = load_packed(values, key, VALUE, VALUE_STRIDE)
    if JOINT:
        rest_of_k = keep_before(v, VALUE_AT, True)
        v = keep_before(v, VALUE_AT, False)
    relative += first * ALL_LINES
    rows_at = tl.multiple_of((y0 & (LINES_H - 1)) // BLOCK * BLOCK, BLOCK)
    columns_at = tl.multiple_of(LINES_H + (x0 & (LINES_W - 1)) // BLOCK * BLOCK, BLOCK)
    chosen = choose_line(key_y, BLOCK, 0, k.dtype)
    if ONE_PRODUCT:
        chosen += choose_line(key_x, BLOCK, HALF, k.dtype)
        place = tl.arange(0, BLOCK_OF_LINES)
        place += place // HALF * (columns_at - rows_at - HALF)
    else:
        this_column = choose_line(key_x, BLOCK, 0, k.dtype)
    grad_k = tl.zeros([TILE, KEY], tl.float32)
    grad_rest = tl.zeros([TILE, VALUE], tl.float32)
    grad_v = tl.zeros([TILE, VALUE], tl.float32)
    for query_x0 in range(column_begin, column_end, KEY_COLS):
        for query_y0 in range(row_begin, row_end, KEY_ROWS):
            y, x, query = tile_pixels(
                query_y0, query_x0, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
            )
            query = tl.where((y < row_end) & (x < column_end), query, pixels)  # else the one that sees nothing
            q = load_packed(queries, query, KEY, KEY_STRIDE)
            do = load_packed(grads, query, VALUE, VALUE_STRIDE)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if JOINT:
                s = add_product(s, rest_of_k, tl.trans(do), PRECISION, EXACT)
            if ONE_PRODUCT:
                logits = tl.load(relative + rows_at + (query * ALL_LINES)[:, None] + place[None, :])
                s = add_product(s, chosen, tl.trans(logits), PRECISION, EXACT)
            else:
                for_rows = load_packed(relative + rows_at, query, BLOCK_OF_LINES, ALL_LINES)
                for_columns = load_packed(relative + columns_at, query, BLOCK_OF_LINES, ALL_LINES)
                s = add_product(s, chosen, tl.trans(for_rows), PRECISION, EXACT)
                s = add_product(s, this_column, tl.trans(for_columns), PRECISION, EXACT)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            existing = tl.minimum(query, pixels - 1)
            if not LOG_SUM:
                peak, log_sum = tl.load(lse + existing), tl.load(lse + pixels + existing)
                s = (s * SCALE - peak[None, :]) - log_sum[None, :]
            if not DELTA:
                dp -= tl.load(delta + existing)[None, :]
            p = tl.exp2(s)
            ds = (p * dp).to(q.dtype)
            grad_v = add_product(grad_v, p.to(do.dtype), do, PRECISION, EXACT)
            grad_k = add_product(grad_k, ds, q, PRECISION, EXACT)
            if JOINT:
                grad_rest = add_product(grad_rest, ds, do, PRECISION, EXACT)
    grad_qkv += image * pixels * GRAD_W
    inside = (key_y < rows) & (key_x < columns)
    grad_at = grad_qkv + (HEADS + head) * D
    store_pixels(grad_at, key * GRAD_W, inside, grad_k * LOGIT_SCALE, FIRST, KEY)
    if JOINT:
        store_pixels(grad_at + KEY, key * GRAD_W, inside, grad_rest * LOGIT_SCALE, D - KEY, VALUE)
    store_after(grad_qkv + 2 * HEADS * D + head * DV, key * GRAD_W, inside, grad_v, VALUE_AT, DV, VALUE)


@triton.jit
def gradients_by_offset(
    relative, pixel, exists, line, side, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr,
    LINES: tl.constexpr, ALL_LINES: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """[pixels, OFFSETS]: the gradients of relative logits, by the offset of the table."""
    query = line // APART
    length = tl.cdiv(side - line % APART, APART)
    first = first_seen(query, length, WINDOW, SHARED)
    seen_line = query[:, None] + tl.arange(0, OFFSETS)[None, :] - (WINDOW - 1)
    end = tl.where(exists, tl.minimum(first + WINDOW, length), 0)
    seen = (seen_line >= first[:, None]) & (seen_line < end[:, None])
    at = relative + ((pixel * ALL_LINES)[:, None] + (seen_line & (LINES - 1)))
    return tl.load(at, mask=seen, other=0.0)


@triton.jit
def add_to_part(part, offset, known, chunk, grad, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store some vectors of a part of the tables' gradient, or add to what an earlier launch left there."""
    earlier = (offset * 0 + chunk) > 0
    grad += load_pixels(part, offset * D, known & earlier, D, D_PAD)
    store_pixels(part, offset * D, known, grad, D, D_PAD)


@triton.jit
def gradients_of_row(
    qkv, relative, grad_qkv, vectors_h, vectors_w, grad_w, row, own_head, split,
    first_image_head, pixels, width, blocks, owned, splits,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    LINES_H: tl.constexpr, LINES_W: tl.constexpr, OFFSETS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_W: tl.constexpr, SHARED_W: tl.constexpr, APART_W: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of the queries of a row of the map, every splits-th block of them. Also the gradients of the
    row's vectors of rel_h, and grad_w with those of rel_w added."""
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    ALL_LINES: tl.constexpr = LINES_H + LINES_W
    grad_h = tl.zeros([LINES_H, D_PAD], tl.float32)
    zero = tl.full((), 0, tl.int64)  # int64: a batch may hold more than 2**31 elements
    for block in range(split, owned * blocks, splits):
        local = zero + block // blocks
        if TABLES_PER_HEAD:
            local = local * HEADS + own_head
        image, head = (local + first_image_head) // HEADS, (local + first_image_head) % HEADS
        x = block % blocks * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
        exists = x < width
        pixel = row * width + x
        of_head = relative + local * (pixels + 1) * ALL_LINES
        q = load_pixels(qkv + image * pixels * STRIDE + head * D, pixel * STRIDE, exists, D, D_PAD)
        by_row = load_pixels(of_head, pixel * ALL_LINES, exists, LINES_H, LINES_H)
        by_column = gradients_by_offset(
            of_head + LINES_H, pixel, exists, x, width, WINDOW_W, SHARED_W, APART_W, LINES_W, ALL_LINES, OFFSETS
        )
        more = tl.dot(by_row, vectors_h, input_precision=PRECISION)
        more = add_product(more, by_column, vectors_w, PRECISION, EXACT)
        grad_at = grad_qkv + image * pixels * GRAD_W + head * D
        grad_q = load_pixels(grad_at, pixel * GRAD_W, exists, D, D_PAD).to(tl.float32)
        store_pixels(grad_at, pixel * GRAD_W, exists, grad_q + more * LOGIT_SCALE, D, D_PAD)
        grad_h = add_product(grad_h, tl.trans(by_row), q, PRECISION, EXACT)
        grad_w = add_product(grad_w, tl.trans(by_column), q, PRECISION, EXACT)
    return grad_h, grad_w


@triton.jit(do_not_specialize=["first_image_head", "height", "width", "image_heads", "chunk", "splits"])
def window_backward_tables(
    qkv, rel_h, rel_w, relative, grad_qkv, grad_tables,
    first_image_head, height, width, image_heads, chunk, splits,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    LINES_H: tl.constexpr, LINES_W: tl.constexpr, OFFSETS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, ROW_BLOCK: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients that the queries' kernel has left in the place of relative logits into those of the queries (added
    to what is there) and of the tables.

    One program a row of the map, or with MANY_ROWS every n-th: every splits-th of the blocks of ROW_BLOCK pixels that
    the images have of it, of all heads or, where each has tables of its own, of one. The queries of a row share the
    vectors of rel_h, so that its gradients are taken as they lie; those of the columns are gathered. A program owns its
    part of the tables' gradients, grad_tables [splits, first rows, (heads,) rows' and columns' offsets, D], so nothing
    is added by two; rows and launches after the first add to it.
    """
    LENGTH: tl.constexpr = 2 * WINDOW_H + 2 * WINDOW_W - 2
    pixels = height * width
    blocks = tl.cdiv(width, ROW_BLOCK)
    first_rows = height
    if MANY_ROWS:
        first_rows = tl.num_programs(0) // splits // (HEADS if TABLES_PER_HEAD else 1)
    row = tl.program_id(0) % first_rows
    own_head = tl.program_id(0) // first_rows // splits  # 0 for shared tables
    split = tl.program_id(0) // first_rows % splits
    owned = image_heads // HEADS if TABLES_PER_HEAD else image_heads
    part = split * first_rows + row
    if TABLES_PER_HEAD:
        rel_h += own_head * ((2 * WINDOW_H - 1) * D)
        rel_w += own_head * ((2 * WINDOW_W - 1) * D)
        part = part * HEADS + own_head
    grad_tables += part.to(tl.int64) * (LENGTH * D)  # int64: tall maps whose heads have tables have many large parts
    if chunk == 0:
        everything = tl.arange(0, 2 * OFFSETS)
        zeros = tl.zeros([2 * OFFSETS, D_PAD], tl.float32)
        store_pixels(grad_tables, everything * D, everything < LENGTH, zeros, D, D_PAD)
        tl.debug_barrier()  # other threads store to the same places at the end
    dtype: tl.constexpr = qkv.dtype.element_ty
    seen, offset_h = lines_in_sight(row, height, WINDOW_H, SHARED_H, APART_H, LINES_H)
    offset_w = tl.arange(0, OFFSETS)
    vectors_h = load_pixels(rel_h, offset_h * D, seen, D, D_PAD).to(dtype)
    vectors_w = load_pixels(rel_w, offset_w * D, offset_w < 2 * WINDOW_W - 1, D, D_PAD).to(dtype)
    grad_w = tl.zeros([OFFSETS, D_PAD], tl.float32)
    if MANY_ROWS:
        for each in range(row, height, first_rows):
            seen, offset_h = lines_in_sight(each, height, WINDOW_H, SHARED_H, APART_H, LINES_H)
            vectors_h = load_pixels(rel_h, offset_h * D, seen, D, D_PAD).to(dtype)
            grad_h, grad_w = gradients_of_row(
                qkv, relative, grad_qkv, vectors_h, vectors_w, grad_w, each, own_head, split,
                first_image_head, pixels, width, blocks, owned, splits, STRIDE, HEADS, D, DV, D_PAD, LINES_H, LINES_W,
                OFFSETS, TABLES_PER_HEAD, LOGIT_SCALE, EXACT, PRECISION, WINDOW_W, SHARED_W, APART_W, ROW_BLOCK,
            )  # fmt: skip
            add_to_part(grad_tables, offset_h, seen, 1, grad_h * LOGIT_SCALE, D, D_PAD)
            tl.debug_barrier()  # other threads add the next row's to the same places
    else:
        grad_h, grad_w = gradients_of_row(
            qkv, relative, grad_qkv, vectors_h, vectors_w, grad_w, row, own_head, split,
            first_image_head, pixels, width, blocks, owned, splits, STRIDE, HEADS, D, DV, D_PAD, LINES_H, LINES_W,
            OFFSETS, TABLES_PER_HEAD, LOGIT_SCALE, EXACT, PRECISION, WINDOW_W, SHARED_W, APART_W, ROW_BLOCK,
        )  # fmt: skip
        add_to_part(grad_tables, offset_h, seen, chunk, grad_h * LOGIT_SCALE, D, D_PAD)
    grad_tables += (2 * WINDOW_H - 1) * D
    add_to_part(grad_tables, offset_w, offset_w < 2 * WINDOW_W - 1, chunk, grad_w * LOGIT_SCALE, D, D_PAD)
