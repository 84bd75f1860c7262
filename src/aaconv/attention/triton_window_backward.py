"""The backward kernels of local attention: of queries, of keys and values, of the tables. See triton_window_kernels."""

import triton
import triton.language as tl

from .triton_kernels import LN2, add_product
from .triton_pack import find_head, load_pixels, store_pixels
from .triton_window_kernels import (
    find_tile,
    first_seen,
    first_to_see,
    last_to_see,
    load_packed,
    over_columns,
    over_rows,
    places_of_offsets,
    programs_of_a_head,
    seen_logits,
    tile_pixels,
)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_backward_queries(
    qkv, keys, values, relative, out, lse, grad_out, grad_qkv, grads, delta, grad_relative,
    first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, SIDE: tl.constexpr, RELATIVE: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits, laid out as these. Leaves
    grads [pixel, V_PAD], the gradient of the output, and delta [pixel], grad_out . out, for the keys' kernel. One
    program a tile of queries of an image-head."""
    BLOCK_M: tl.constexpr = TILE_H * TILE_W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
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
    local = local_image_head * pixels
    keys += local * D_PAD
    values += local * V_PAD
    relative += local * (2 * SIDE)
    grad_relative += local * (2 * SIDE)
    q = load_pixels(qkv + image * pixels * STRIDE + head * D, pixel * STRIDE, inside, D, D_PAD)
    out_offset = image * pixels * (HEADS * DV) + head * DV
    do = load_pixels(grad_out + out_offset, pixel * (HEADS * DV), inside, DV, V_PAD)
    o = load_pixels(out + out_offset, pixel * (HEADS * DV), inside, DV, V_PAD)
    if EXACT:
        # Summed as the products with the values are: with one key in sight the two must cancel to the last digit.
        row = tl.arange(0, BLOCK_M)
        products = tl.dot(do, tl.trans(o), input_precision=PRECISION)
        dots = tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    else:
        dots = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    store_pixels(grads + local * V_PAD, pixel * V_PAD, inside, do, V_PAD, V_PAD)
    tl.store(delta + local + pixel, dots, mask=inside)
    lse += image_head * (2 * pixels) + pixel
    peak, log_sum = tl.load(lse), tl.load(lse + pixels)

    key_column = column_begin + tl.arange(0, KEY_COLS)[None, :]
    bias = seen_logits(
        relative + SIDE, pixel[:, None], first_column[:, None], key_column, columns, WINDOW_W, SIDE, RELATIVE
    )
    if not EXACT:
        bias -= (peak + log_sum)[:, None]
    bias = over_rows(bias, KEY_ROWS, KEY_COLS)
    no_grads = tl.broadcast_to(-dots[:, None], [BLOCK_M, KEY_ROWS * KEY_COLS])
    grad_q = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    some = tl.arange(0, KEY_ROWS)[None, :]
    by_row = seen_logits(
        relative, pixel[:, None], first_row[:, None], row_begin + some, rows, WINDOW_H, SIDE, RELATIVE
    )
    for key_y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key, _ = tile_pixels(
            key_y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
        )
        k = load_packed(keys, key, D_PAD, D_PAD)
        v = load_packed(values, key, V_PAD, V_PAD)
        s = bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        by_row = seen_logits(
            relative, pixel[:, None], first_row[:, None], key_y0 + KEY_ROWS + some, rows, WINDOW_H, SIDE, RELATIVE
        )
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if EXACT:
            s = (s * SCALE - peak[:, None]) - log_sum[:, None]
        ds = tl.exp2(s) * add_product(no_grads, do, tl.trans(v), PRECISION, EXACT)
        if RELATIVE:
            by_place = tl.reshape(ds, [BLOCK_M, KEY_ROWS, KEY_COLS])
            grad_columns += tl.sum(by_place, 1)
            place = key_y0 + some - first_row[:, None]
            seen = inside[:, None] & (place >= 0) & (place < WINDOW_H) & (key_y0 + some < rows)
            at = grad_relative + (pixel * (2 * SIDE))[:, None] + place
            tl.store(at, tl.sum(by_place, 2).to(grad_relative.dtype.element_ty), mask=seen)
        grad_q = add_product(grad_q, ds.to(k.dtype), k, PRECISION, EXACT)
    if RELATIVE:
        place = key_column - first_column[:, None]
        seen = inside[:, None] & (place >= 0) & (place < WINDOW_W) & (key_column < columns)
        at = grad_relative + (pixel * (2 * SIDE) + SIDE)[:, None] + place
        tl.store(at, grad_columns.to(grad_relative.dtype.element_ty), mask=seen)
    grad_at = grad_qkv + image * pixels * GRAD_W + head * D
    store_pixels(grad_at, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_backward_keys(
    queries, keys, values, relative, lse, grads, delta, grad_qkv, first_image_head, height, width,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    SIDE: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program a tile of TILE_H x TILE_W keys of an image-head, over the queries that
    see some of them, KEY_ROWS x KEY_COLS at a time."""
    TILE: tl.constexpr = TILE_H * TILE_W
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    pixels = height * width
    programs = programs_of_a_head(height, width, APART_H, APART_W, TILE_H, TILE_W)
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // programs, first_image_head, HEADS)
    y0, x0, rows, columns, origin = find_tile(
        tl.program_id(0) % programs, height, width, APART_H, APART_W, TILE_H, TILE_W
    )
    _, _, key, inside = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    row_begin = first_to_see(y0, rows, WINDOW_H, SHARED_H)
    row_end = last_to_see(tl.minimum(y0 + TILE_H, rows) - 1, rows, WINDOW_H, SHARED_H) + 1
    column_begin = first_to_see(x0, columns, WINDOW_W, SHARED_W)
    column_end = last_to_see(tl.minimum(x0 + TILE_W, columns) - 1, columns, WINDOW_W, SHARED_W) + 1
    local = local_image_head * pixels
    queries += local * D_PAD
    relative += local * (2 * SIDE)
    grads += local * V_PAD
    delta += local
    lse += image_head * (2 * pixels)
    k = load_packed(keys + local * D_PAD, key, D_PAD, D_PAD)
    v = load_packed(values + local * V_PAD, key, V_PAD, V_PAD)
    key_row, key_column = (y0 + tl.arange(0, TILE_H))[:, None], (x0 + tl.arange(0, TILE_W))[:, None]
    grad_k = tl.zeros([TILE, D_PAD], tl.float32)
    grad_v = tl.zeros([TILE, V_PAD], tl.float32)
    for query_x0 in range(column_begin, column_end, KEY_COLS):
        for query_y0 in range(row_begin, row_end, KEY_ROWS):
            y, x, query, exists = tile_pixels(
                query_y0, query_x0, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS
            )
            q = load_packed(queries, query, D_PAD, D_PAD)
            do = load_packed(grads, query, V_PAD, V_PAD)
            first_row, first_column = (
                first_seen(y, rows, WINDOW_H, SHARED_H)[None, :],
                first_seen(x, columns, WINDOW_W, SHARED_W)[None, :],
            )
            by_row = seen_logits(relative, query[None, :], first_row, key_row, rows, WINDOW_H, SIDE, RELATIVE)
            by_column = seen_logits(
                relative + SIDE, query[None, :], first_column, key_column, columns, WINDOW_W, SIDE, RELATIVE
            )
            # A query beyond the map has nothing to say: its weights are exp2(-inf).
            peak = tl.where(exists, tl.load(lse + query), float("inf"))
            log_sum = tl.load(lse + pixels + query)
            dots = tl.load(delta + query)
            if not EXACT:
                by_column -= (peak + log_sum)[None, :]
            s = tl.reshape(by_row[:, None, :] + by_column[None, :, :], [TILE, SLOTS])
            s = add_product(s, k, tl.trans(q), PRECISION, EXACT)
            if EXACT:
                s = (s * SCALE - peak[None, :]) - log_sum[None, :]
            p = tl.exp2(s)
            no_grads = tl.broadcast_to(-dots[None, :], [TILE, SLOTS])
            ds = p * add_product(no_grads, v, tl.trans(do), PRECISION, EXACT)
            grad_v = add_product(grad_v, p.to(do.dtype), do, PRECISION, EXACT)
            grad_k = add_product(grad_k, ds.to(q.dtype), q, PRECISION, EXACT)
    grad_qkv += image * pixels * GRAD_W
    store_pixels(grad_qkv + (HEADS + head) * D, key * GRAD_W, inside, grad_k * LOGIT_SCALE, D, D_PAD)
    store_pixels(grad_qkv + 2 * HEADS * D + head * DV, key * GRAD_W, inside, grad_v, DV, V_PAD)


@triton.jit
def gradients_by_offset(
    grad_relative, pixel, exists, line, side, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr,
    SIDE: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """[pixels, OFFSETS]: the gradients of relative logits, by the offset of the table."""
    place = places_of_offsets(line, side, WINDOW, SHARED, APART, OFFSETS)
    seen_line = (line // APART)[:, None] + tl.arange(0, OFFSETS)[None, :] - (WINDOW - 1)
    length = tl.cdiv(side - line % APART, APART)
    seen = exists[:, None] & (place >= 0) & (place < WINDOW) & (seen_line < length[:, None])
    return tl.load(grad_relative + (pixel * (2 * SIDE))[:, None] + place, mask=seen, other=0.0)


@triton.jit(do_not_specialize=["first_image_head", "height", "width", "image_heads", "splits"])
def window_backward_tables(
    queries, rel_h, rel_w, grad_relative, grad_qkv, partial, first_image_head, height, width, image_heads, splits,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, SIDE: tl.constexpr,
    OFFSETS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of relative logits into those of the queries (added to what is there) and of the tables.

    One program every splits-th block of BLOCK pixels, of all heads or, where each has tables of its own, of one. It
    owns its part of the tables' gradients, partial [programs, 2, OFFSETS, D_PAD], so nothing is added by two programs.
    """
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    pixels = height * width
    blocks = tl.cdiv(pixels, BLOCK)
    own_head = tl.program_id(0) // splits  # 0 for shared tables
    split = tl.program_id(0) % splits
    owned = image_heads // HEADS if TABLES_PER_HEAD else image_heads
    offset = tl.arange(0, OFFSETS)
    dtype: tl.constexpr = queries.dtype.element_ty
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
        of_head = grad_relative + local * pixels * (2 * SIDE)
        q = load_pixels(queries + local * pixels * D_PAD, pixel * D_PAD, exists, D_PAD, D_PAD)
        by_row = gradients_by_offset(
            of_head, pixel, exists, pixel // width, height, WINDOW_H, SHARED_H, APART_H, SIDE, OFFSETS
        )
        by_column = gradients_by_offset(
            of_head + SIDE, pixel, exists, pixel % width, width, WINDOW_W, SHARED_W, APART_W, SIDE, OFFSETS
        )
        more = tl.dot(by_row, vectors_h, input_precision=PRECISION)
        more = add_product(more, by_column, vectors_w, PRECISION, EXACT)
        grad_at = grad_qkv + image * pixels * GRAD_W + head * D
        grad_q = load_pixels(grad_at, pixel * GRAD_W, exists, D, D_PAD).to(tl.float32)
        store_pixels(grad_at, pixel * GRAD_W, exists, grad_q + more * LOGIT_SCALE, D, D_PAD)
        grad_h = add_product(grad_h, tl.trans(by_row), q, PRECISION, EXACT)
        grad_w = add_product(grad_w, tl.trans(by_column), q, PRECISION, EXACT)
    partial += tl.program_id(0) * (2 * OFFSETS * D_PAD)
    everything = offset < OFFSETS
    store_pixels(partial, offset * D_PAD, everything, grad_h * LOGIT_SCALE, D_PAD, D_PAD)
    store_pixels(partial + OFFSETS * D_PAD, offset * D_PAD, everything, grad_w * LOGIT_SCALE, D_PAD, D_PAD)
