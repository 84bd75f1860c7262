"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

They read what `pack` has laid out (see triton_pack). A product of depth 16 or 32 gives q k + rows with the map's edge
in it, and cols is what it accumulates onto: it stays the same down a strip. The ones beside the values sum the weights
in the forward, and take off do . o in the backward. No mask, no unaligned load, no arithmetic on a logit but its
exponential. Logits are kept unscaled; SCALE = log2(e) / sqrt(D) enters with the exponential, which is in base 2, and so
is `lse`.
"""

import triton
import triton.language as tl

from .triton_pack import find_head, load_pixels, pack, store_pixels  # noqa: F401  pack: so that all kernels are found here

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, row, valid, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, WIDTH] of packed operands; without a mask where all rows exist."""
    pointers = base + (row * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def load_slots(base, SLOTS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[SLOTS, WIDTH] of packed keys or values: all slots exist."""
    return tl.load(base + (tl.arange(0, SLOTS) * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit
def one_hot(index, SIZE: tl.constexpr, dtype: tl.constexpr):
    """[slots, SIZE]: a one in each row, at its index."""
    return tl.where(index[:, None] == tl.arange(0, SIZE)[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """total + a b. In float32 the product is summed apart: one long chain of additions would lose digits."""
    if EXACT:
        # max_num_imprecise_acc has no meaning for float32, but without it triton turns this into the chain after all
        return total + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def load_log_sum(lse, pixel, valid, PIXELS: tl.constexpr):
    """The largest logit of every query, and the logarithm of the sum over that; queries outside weigh nothing."""
    peak = tl.load(lse + pixel, mask=valid, other=float("inf"))
    return peak, tl.load(lse + PIXELS + pixel, mask=valid, other=0.0)


@triton.jit
def weigh(s, peak, log_total, SCALE: tl.constexpr, EXACT: tl.constexpr):
    """The weights of logits s. In float32 the two parts are taken off one by one: their sum would round them."""
    if EXACT:
        return tl.exp2((s * SCALE - peak) - log_total)
    return tl.exp2(s * SCALE - (peak + log_total))


@triton.jit
def load_columns(
    queries, pixel, inside, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr,
    KEY_COLS: tl.constexpr, WHOLE: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, KEY_ROWS * KEY_COLS]: the relative logits of a strip's columns, the same for all its rows."""
    if RELATIVE:
        columns = load_rows(queries, pixel, inside, STRIDE, KEY_COLS, WHOLE).to(tl.float32)
    else:
        columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEY_ROWS, KEY_COLS])
    return tl.reshape(columns, [BLOCK_M, KEY_ROWS * KEY_COLS])


@triton.jit(do_not_specialize=["first_image_head"])
def attend_forward(
    qkv, queries, keys, values, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, query tile). lse is [image_heads, 2, H W]: the largest logit and the logarithm of
    the sum over that, both in base 2."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    PIXELS: tl.constexpr = H * W
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    STRIPS: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    WHOLE: tl.constexpr = PIXELS % BLOCK_M == 0
    tiles: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // tiles, first_image_head, HEADS)

    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < PIXELS
    queries += local_image_head * (PIXELS * STRIDE)
    keys += local_image_head * (STRIPS * ROWS * KEY_COLS * (MAIN + TAIL))
    values += local_image_head * (STRIPS * ROWS * KEY_COLS * VALUES)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, MAIN)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL + strip * KEY_COLS, pixel, inside,
            STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE, RELATIVE,
        )  # fmt: skip
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail = load_slots(keys + first * (MAIN + TAIL) + MAIN, SLOTS, MAIN + TAIL, TAIL)
            v = load_slots(values + first * VALUES, SLOTS, VALUES, DV_PAD)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = add_product(columns, q_tail, tl.trans(k_tail), PRECISION, EXACT)
            if MAIN > 0:
                k = load_slots(keys + first * (MAIN + TAIL), SLOTS, MAIN + TAIL, MAIN)
                s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
            new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
            p = tl.exp2(s * SCALE - new_peak[:, None])
            mixed = add_product(mixed * tl.exp2(peak - new_peak)[:, None], p.to(v.dtype), v, PRECISION, EXACT)
            peak = new_peak

    depth = tl.arange(0, DV_PAD)
    total = tl.sum(tl.where((depth == DV)[None, :], mixed, 0.0), 1)
    out_base = out + image * (PIXELS * HEADS * DV) + head * DV
    store_pixels(out_base, pixel * (HEADS * DV), inside, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + image_head * (2 * PIXELS) + pixel, peak, mask=inside)
    tl.store(lse + image_head * (2 * PIXELS) + PIXELS + pixel, tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["first_image_head"])
def attend_backward_queries(
    qkv, queries, keys, values, out, lse, grad_out, grad_qkv, grads, grad_logits, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, VALUES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits in grad_logits
    [heads in this launch, H W, STRIPS H + W], the rows' in one part a strip. One program an (image, head, query tile).
    Leaves in grads
    [heads in this launch, H W, VALUES] do | -(do . o) in two parts | 0, which the keys' kernel reads."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    PIXELS: tl.constexpr = H * W
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    STRIPS: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    WHOLE: tl.constexpr = PIXELS % BLOCK_M == 0
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    tiles: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // tiles, first_image_head, HEADS)

    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < PIXELS
    queries += local_image_head * (PIXELS * STRIDE)
    keys += local_image_head * (STRIPS * ROWS * KEY_COLS * (MAIN + TAIL))
    values += local_image_head * (STRIPS * ROWS * KEY_COLS * VALUES)
    out_offset = image * (PIXELS * HEADS * DV) + head * DV
    do = load_pixels(grad_out + out_offset, pixel * (HEADS * DV), inside, DV, VALUES)
    o = load_pixels(out + out_offset, pixel * (HEADS * DV), inside, DV, VALUES)
    peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)[:, None]
    depth = tl.arange(0, VALUES)[None, :]
    rounded = delta.to(do.dtype)
    do = tl.where(depth == DV, -rounded, do)
    do = tl.where(depth == DV + 1, (rounded.to(tl.float32) - delta).to(do.dtype), do)
    store_pixels(grads + local_image_head * (PIXELS * VALUES), pixel * VALUES, inside, do, VALUES, VALUES)

    slot = tl.arange(0, SLOTS)
    gather_cols = one_hot(slot % KEY_COLS, KEY_COLS, do.dtype)
    col = tl.arange(0, KEY_COLS)
    row = tl.arange(0, TAIL) - ROWS_AT
    places = local_image_head * (PIXELS * (STRIPS * H + W)) + pixel[:, None] * (STRIPS * H + W)
    tail_grad = tl.zeros([BLOCK_M, TAIL], tl.float32)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, MAIN)
        main_grad = tl.zeros([BLOCK_M, MAIN], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL + strip * KEY_COLS, pixel, inside,
            STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE, RELATIVE,
        )  # fmt: skip
        grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail = load_slots(keys + first * (MAIN + TAIL) + MAIN, SLOTS, MAIN + TAIL, TAIL)
            v = load_slots(values + first * VALUES, SLOTS, VALUES, VALUES)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = add_product(columns, q_tail, tl.trans(k_tail), PRECISION, EXACT)
            if MAIN > 0:
                k = load_slots(keys + first * (MAIN + TAIL), SLOTS, MAIN + TAIL, MAIN)
                s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
            p = weigh(s, peak[:, None], log_total[:, None], SCALE, EXACT)
            ds = (p * tl.dot(do, tl.trans(v), input_precision=PRECISION)).to(v.dtype)
            if MAIN > 0:
                main_grad = add_product(main_grad, ds, k, PRECISION, EXACT)
            product = tl.dot(ds, k_tail, input_precision=PRECISION)
            tail_grad += product
            if RELATIVE:
                grad_columns = add_product(grad_columns, ds, gather_cols, PRECISION, EXACT)
                y = (y0 // GROUP) * GROUP + row
                own = inside[:, None] & ((row >= y0 % GROUP) & (row < y0 % GROUP + KEY_ROWS) & (y < H))[None, :]
                tl.store(grad_logits + places + (strip * H + y)[None, :], product, mask=own)
        if RELATIVE:
            x = strip * KEY_COLS + col
            on_map = inside[:, None] & (x < W)[None, :]
            tl.store(grad_logits + places + (STRIPS * H + x)[None, :], grad_columns, mask=on_map)
    grad_base = grad_qkv + image * (PIXELS * GRAD_W) + head * D
    if MAIN > 0:
        store_pixels(grad_base, pixel * GRAD_W, inside, main_grad * (SCALE * LN2), MAIN, MAIN)
    store_pixels(grad_base + MAIN, pixel * GRAD_W, inside, tail_grad * (SCALE * LN2), D - MAIN, TAIL)


@triton.jit
def load_tables(
    tables, head, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """[OFFSETS, D_PAD]: the 2H - 1 relative vectors of the rows, then the 2W - 1 of the columns."""
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    offset = tl.arange(0, OFFSETS)
    base = tables + (head * (LENGTH * D) if TABLES_PER_HEAD else 0)
    return load_pixels(base, offset * D, offset < LENGTH, D, D_PAD)


@triton.jit(do_not_specialize=["first_image_head"])
def relative_backward(
    qkv, tables, grad_qkv, grad_tables, grad_logits, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, PLACES: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """grad_logits into the gradients of the queries (added to what is there) and of the tables. One program an
    (image, head, split): it walks over its query tiles and owns its slice of grad_tables
    [image_heads, SPLITS, 2H + 2W - 2, D], so no atomics and one result every time.
    """
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    split = tl.program_id(0) % SPLITS
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // SPLITS, first_image_head, HEADS)
    grad_base = grad_qkv + image * (H * W * GRAD_W) + head * D
    grad_logits += local_image_head * (H * W * (STRIPS * H + W))
    vectors = load_tables(tables, head, H, W, D, D_PAD, OFFSETS, TABLES_PER_HEAD)
    grad_vectors = tl.zeros([OFFSETS, D_PAD], tl.float32)
    offset = tl.arange(0, OFFSETS)
    of_row = (offset < 2 * H - 1)[None, :]
    places = tl.arange(0, PLACES)[None, :]
    for start in range(split * BLOCK_M, H * W, SPLITS * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = (pixel // W)[:, None]
        ix = (pixel % W)[:, None]
        inside = pixel < H * W
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
        exists = inside[:, None] & (places < H + W)
        pointers = grad_logits + pixel[:, None] * (STRIPS * H + W) + places
        by_place = tl.load(pointers + tl.where(places < H, 0, (STRIPS - 1) * H), mask=exists, other=0.0)
        for strip in tl.static_range(1, STRIPS):
            rows = tl.load(pointers + strip * H, mask=exists & (places < H), other=0.0)
            by_place = (by_place.to(tl.float32) + rows.to(tl.float32)).to(q.dtype)
        # the skew undone: by row and column -> by relative offset
        place = offset[None, :] + tl.where(of_row, iy - (H - 1), ix - (H + W - 2))
        exists = tl.where(of_row, (place >= 0) & (place < H), (place >= H) & (place < H + W))
        by_offset = tl.gather(by_place, tl.minimum(tl.maximum(place, 0), PLACES - 1), 1)
        by_offset = tl.where(exists, by_offset, 0.0).to(q.dtype)
        grad_q = tl.dot(by_offset, vectors, input_precision=PRECISION) * (SCALE * LN2)
        grad_q += load_pixels(grad_base, pixel * GRAD_W, inside, D, D_PAD).to(tl.float32)
        store_pixels(grad_base, pixel * GRAD_W, inside, grad_q, D, D_PAD)
        grad_vectors = add_product(grad_vectors, tl.trans(by_offset), q, PRECISION, EXACT)
    base = grad_tables + (image_head * SPLITS + split) * (LENGTH * D)
    store_pixels(base, offset * D, offset < LENGTH, grad_vectors * (SCALE * LN2), D, D_PAD)


@triton.jit(do_not_specialize=["first_image_head"])
def attend_backward_keys(
    qkv, queries, keys, values, lse, grad_qkv, grads, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program an (image, head, key tile); logits are [slots, queries] here, and the
    columns' relative logits come by a product, too: WINDOW of them, KEY_COLS padded to what it takes."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    PIXELS: tl.constexpr = H * W
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    STRIPS: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    WHOLE: tl.constexpr = PIXELS % BLOCK_M == 0
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    tiles_y: tl.constexpr = (H + KEY_ROWS - 1) // KEY_ROWS
    strip = (tl.program_id(0) // tiles_y) % STRIPS
    y0 = (tl.program_id(0) % tiles_y) * KEY_ROWS
    number = tl.program_id(0) // (tiles_y * STRIPS)
    local_image_head, image_head, image, head = find_head(number, first_image_head, HEADS)

    slot = tl.arange(0, SLOTS)
    first = (local_image_head * STRIPS + strip) * (ROWS * KEY_COLS) + y0 * KEY_COLS
    keys += first * (MAIN + TAIL)
    k_tail = load_slots(keys + MAIN, SLOTS, MAIN + TAIL, TAIL)
    v = load_slots(values + first * VALUES, SLOTS, VALUES, VALUES)
    spread_cols = one_hot(slot % KEY_COLS, WINDOW, v.dtype)
    tails = queries + local_image_head * (PIXELS * STRIDE) + (y0 // GROUP) * TAIL
    columns = queries + local_image_head * (PIXELS * STRIDE) + GROUPS * TAIL + strip * KEY_COLS
    grads += local_image_head * (PIXELS * VALUES)
    tail_grad = tl.zeros([SLOTS, TAIL], tl.float32)
    value_grad = tl.zeros([SLOTS, VALUES], tl.float32)
    if MAIN > 0:
        k = load_slots(keys, SLOTS, MAIN + TAIL, MAIN)
        q_base = qkv + image * STRIDE_B + head * D
        main_grad = tl.zeros([SLOTS, MAIN], tl.float32)
    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < PIXELS
        q_tail = load_rows(tails, pixel, inside, STRIDE, TAIL, WHOLE)
        do = load_rows(grads, pixel, inside, VALUES, VALUES, WHOLE)
        peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
        s = tl.dot(k_tail, tl.trans(q_tail), input_precision=PRECISION)
        if RELATIVE:
            q_columns = load_rows(columns, pixel, inside, STRIDE, WINDOW, WHOLE)
            s = add_product(s, spread_cols, tl.trans(q_columns), PRECISION, EXACT)
        if MAIN > 0:
            q_place = pixel * STRIDE_W if STRIDE_H == W * STRIDE_W else (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W
            q = load_rows(q_base, q_place, inside, 1, MAIN, WHOLE)
            s = add_product(s, k, tl.trans(q), PRECISION, EXACT)
        p = weigh(s, peak[None, :], log_total[None, :], SCALE, EXACT)
        value_grad = add_product(value_grad, p.to(v.dtype), do, PRECISION, EXACT)
        ds = (p * tl.dot(v, tl.trans(do), input_precision=PRECISION)).to(v.dtype)
        tail_grad = add_product(tail_grad, ds, q_tail, PRECISION, EXACT)
        if MAIN > 0:
            main_grad = add_product(main_grad, ds, q, PRECISION, EXACT)

    jy = y0 + slot // KEY_COLS
    jx = strip * KEY_COLS + slot % KEY_COLS
    on_map = (jy < H) & (jx < W)
    grad_base = grad_qkv + image * (PIXELS * GRAD_W)
    place = (jy * W + jx) * GRAD_W
    if MAIN > 0:
        store_pixels(grad_base + (HEADS + head) * D, place, on_map, main_grad * (SCALE * LN2), MAIN, MAIN)
    store_pixels(grad_base + (HEADS + head) * D + MAIN, place, on_map, tail_grad * (SCALE * LN2), D - MAIN, TAIL)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, place, on_map, value_grad, DV, VALUES)
