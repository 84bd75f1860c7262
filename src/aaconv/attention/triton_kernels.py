"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

A logit is q_i . k_j + rows_i[jy] + cols_i[jx]: a query has H + W relative logits beside its product with the keys, and
each key adds two of them. Matrix products take depths of 16, so a head of 20 channels leaves 12 unused: they carry the
rows. `pack` lays out, once for all the tiles that will read it,

    queries  [pixel, GROUPS * TAIL + COLUMNS]   a group: channels MAIN.. of q | GROUP of the rows | OUTSIDE | 0 ...
                                                then cols[0 : W] | 0 ...
    keys     [strip, row, column, MAIN + TAIL]  k | one-hot of row % GROUP | 1 where the slot is beyond the map | 0 ...
    values   [strip, row, column, VALUES]       v | 1 | 1 | 0 ...

with keys in strips of KEY_COLS columns, so that a tile of KEY_ROWS x KEY_COLS keys is one piece of memory. A product of
16 or 32 then gives q k + rows with the map's edge in it, and cols is what it accumulates onto: it stays the same down a
strip. The ones beside the values sum the weights in the forward, and take off do . o in the backward. No mask, no
unaligned load, no arithmetic on a logit but its exponential.
Logits are kept unscaled; SCALE = log2(e) / sqrt(D) enters with the exponential, which is in base 2, and so is `lse`.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_pixels(base, pixel_offset, valid, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    """[pixels, DEPTH_PAD] of consecutive channels, zero outside."""
    depth = tl.arange(0, DEPTH_PAD)
    mask = valid[:, None] & (depth < DEPTH)[None, :]
    return tl.load(base + pixel_offset[:, None] + depth[None, :], mask=mask, other=0.0)


@triton.jit
def store_pixels(base, pixel_offset, valid, value, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    depth = tl.arange(0, DEPTH_PAD)
    mask = valid[:, None] & (depth < DEPTH)[None, :]
    tl.store(base + pixel_offset[:, None] + depth[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(base, row, valid, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, WIDTH] of packed operands; without a mask where all rows exist."""
    pointers = base + (row * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def one_hot(index, SIZE: tl.constexpr, dtype: tl.constexpr):
    """[slots, SIZE]: a one in each row, at its index."""
    return tl.where(index[:, None] == tl.arange(0, SIZE)[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """total + a b. In float32 the product is summed apart: one long chain of additions would lose digits."""
    if EXACT:
        return total + tl.dot(a, b, input_precision=PRECISION)
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
def load_tables(
    tables, head, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """[OFFSETS, D_PAD]: the 2H - 1 relative vectors of the rows, then the 2W - 1 of the columns."""
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    offset = tl.arange(0, OFFSETS)
    base = tables + (head * (LENGTH * D) if TABLES_PER_HEAD else 0)
    return load_pixels(base, offset * D, offset < LENGTH, D, D_PAD)


@triton.jit
def pack_queries(
    qkv, tables, queries, program, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    QUERY: tl.constexpr, OFFSETS: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr,
    OUTSIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    local_image_head = (program // tiles).to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    pixel = (program % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    iy = pixel // W
    ix = pixel % W
    inside = pixel < H * W
    place = tl.arange(0, QUERY)[None, :]
    in_tails = place < GROUPS * TAIL
    part = place % TAIL - (D - MAIN)  # negative: a channel of q, from 0 on: a row of the group
    q_base = qkv + (image_head // HEADS) * STRIDE_B + head * D
    q_pixel = iy * STRIDE_H + ix * STRIDE_W
    packed = tl.load(q_base + q_pixel[:, None] + (D + part), mask=inside[:, None] & in_tails & (part < 0), other=0.0)
    if RELATIVE:
        vectors = load_tables(tables, head, H, W, D, D_PAD, OFFSETS, TABLES_PER_HEAD)
        q = load_pixels(q_base, q_pixel, inside, D, D_PAD)
        by_offset = tl.dot(q, tl.trans(vectors), input_precision=PRECISION)
        y = (place // TAIL) * GROUP + part
        x = place - GROUPS * TAIL
        offset = tl.where(in_tails, H - 1 + y - iy[:, None], 2 * H + W - 2 + x - ix[:, None])
        logits = tl.gather(by_offset, tl.minimum(tl.maximum(offset, 0), OFFSETS - 1), 1)
        wanted = tl.where(in_tails, (part >= 0) & (part < GROUP) & (y < H), x < W)
        packed = tl.where(wanted, logits.to(packed.dtype), packed)
    packed = tl.where(in_tails & (part == GROUP), OUTSIDE, packed)
    store_pixels(queries + local_image_head * (H * W * STRIDE), pixel * STRIDE, inside, packed, STRIDE, QUERY)


@triton.jit
def pack_keys(
    qkv, keys, values, program, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr,
    KEY_COLS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    STRIPS: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    ALL_SLOTS: tl.constexpr = STRIPS * ROWS * KEY_COLS
    tiles: tl.constexpr = (ALL_SLOTS + SLOTS - 1) // SLOTS
    local_image_head = (program // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    slot = (program % tiles) * SLOTS + tl.arange(0, SLOTS)
    exists = slot < ALL_SLOTS
    jy = (slot // KEY_COLS) % ROWS
    jx = (slot // (KEY_COLS * ROWS)) * KEY_COLS + slot % KEY_COLS
    on_map = (jy < H) & (jx < W)
    place = jy * STRIDE_H + jx * STRIDE_W
    image = qkv + (image_head // HEADS) * STRIDE_B
    k = load_pixels(image + (HEADS + head) * D, place, on_map, D, KEY)
    part = tl.arange(0, KEY)[None, :] - D
    k = tl.where(part == (jy % GROUP)[:, None], 1.0, k)
    k = tl.where(part == GROUP, tl.where(on_map, 0.0, 1.0)[:, None], k)
    keys += local_image_head * (ALL_SLOTS * (MAIN + TAIL))
    store_pixels(keys, slot * (MAIN + TAIL), exists, k, MAIN + TAIL, KEY)
    v = load_pixels(image + 2 * HEADS * D + head * DV, place, on_map, DV, VALUES)
    depth = tl.arange(0, VALUES)[None, :]
    v = tl.where((depth == DV) | (depth == DV + 1), 1.0, v)
    store_pixels(values + local_image_head * (ALL_SLOTS * VALUES), slot * VALUES, exists, v, VALUES, VALUES)


@triton.jit
def pack(
    qkv, tables, queries, keys, values, first_image_head, query_programs,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, QUERY: tl.constexpr, VALUES: tl.constexpr, KEY_COLS: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. One program an (image, head, query tile), then one an (image, head, tile
    of SLOTS keys). QUERY is GROUPS * TAIL + COLUMNS padded, KEY MAIN + TAIL, OFFSETS the number of relative vectors."""
    program = tl.program_id(0)
    if program < query_programs:
        pack_queries(
            qkv, tables, queries, program, first_image_head, STRIDE_B, STRIDE_H, STRIDE_W, HEADS, H, W, D, D_PAD,
            MAIN, TAIL, GROUP, GROUPS, COLUMNS, QUERY, OFFSETS, TABLES_PER_HEAD, RELATIVE, OUTSIDE, PRECISION, BLOCK_M,
        )  # fmt: skip
    else:
        pack_keys(
            qkv, keys, values, program - query_programs, first_image_head, STRIDE_B, STRIDE_H, STRIDE_W,
            HEADS, H, W, D, DV, MAIN, TAIL, KEY, GROUP, VALUES, KEY_COLS, SLOTS,
        )  # fmt: skip


@triton.jit
def load_columns(
    queries, pixel, inside, x0, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr,
    KEY_COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, KEY_ROWS * KEY_COLS]: the relative logits of a strip's columns, the same for all its rows."""
    columns = load_rows(queries + x0, pixel, inside, STRIDE, KEY_COLS, WHOLE).to(tl.float32)
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEY_ROWS, KEY_COLS])
    return tl.reshape(columns, [BLOCK_M, KEY_ROWS * KEY_COLS])


@triton.jit
def attend_forward(
    qkv, queries, keys, values, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
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
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS

    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < PIXELS
    queries += local_image_head * (PIXELS * STRIDE)
    keys += local_image_head * (STRIPS * ROWS * KEY_COLS * (MAIN + TAIL))
    values += local_image_head * (STRIPS * ROWS * KEY_COLS * VALUES)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, MAIN)
    slot = tl.arange(0, SLOTS)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL, pixel, inside, strip * KEY_COLS, STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE
        )
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail = load_rows(keys + first * (MAIN + TAIL) + MAIN, slot, slot < SLOTS, MAIN + TAIL, TAIL, True)
            v = load_rows(values + first * VALUES, slot, slot < SLOTS, VALUES, DV_PAD, True)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = tl.dot(q_tail, tl.trans(k_tail), columns, input_precision=PRECISION)
            if MAIN > 0:
                k = load_rows(keys + first * (MAIN + TAIL), slot, slot < SLOTS, MAIN + TAIL, MAIN, True)
                s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
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


@triton.jit
def attend_backward_queries(
    qkv, queries, keys, values, out, lse, grad_out, grad_qkv, grads, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits, as float32 in grad_scratch
    [heads in this launch, H W, H + W]. One program an (image, head, query tile). Leaves in grads
    [heads in this launch, H W, VALUES] do | -(do . o) in two parts | 0, which the keys' kernel reads."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    PIXELS: tl.constexpr = H * W
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    STRIPS: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    WHOLE: tl.constexpr = PIXELS % BLOCK_M == 0
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    tiles: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS

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
    row = tl.arange(0, TAIL) - (D - MAIN)
    places = local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
    tail_grad = tl.zeros([BLOCK_M, TAIL], tl.float32)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, MAIN)
        main_grad = tl.zeros([BLOCK_M, MAIN], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL, pixel, inside, strip * KEY_COLS, STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE
        )
        grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail = load_rows(keys + first * (MAIN + TAIL) + MAIN, slot, slot < SLOTS, MAIN + TAIL, TAIL, True)
            v = load_rows(values + first * VALUES, slot, slot < SLOTS, VALUES, VALUES, True)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = tl.dot(q_tail, tl.trans(k_tail), columns, input_precision=PRECISION)
            if MAIN > 0:
                k = load_rows(keys + first * (MAIN + TAIL), slot, slot < SLOTS, MAIN + TAIL, MAIN, True)
                s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
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
                pointers = grad_scratch + places + y[None, :]
                if STRIPS > 1:  # the row is met again in the next strip, by the same threads
                    product += tl.load(pointers, mask=own & (strip > 0), other=0.0)
                tl.store(pointers, product, mask=own)
        if RELATIVE:
            x = strip * KEY_COLS + col
            tl.store(grad_scratch + places + (H + x)[None, :], grad_columns, mask=inside[:, None] & (x < W)[None, :])
    grad_base = grad_qkv + image * (PIXELS * GRAD_W) + head * D
    if MAIN > 0:
        store_pixels(grad_base, pixel * GRAD_W, inside, main_grad * (SCALE * LN2), MAIN, MAIN)
    store_pixels(grad_base + MAIN, pixel * GRAD_W, inside, tail_grad * (SCALE * LN2), D - MAIN, TAIL)


@triton.jit
def relative_backward(
    qkv, tables, grad_qkv, grad_tables, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, PLACES: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """grad_scratch into the gradients of the queries (added to what is there) and of the tables. One program an
    (image, head, split): it walks over its query tiles and owns its slice of grad_tables
    [image_heads, SPLITS, 2H + 2W - 2, D], so no atomics and one result every time.
    """
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    split = tl.program_id(0) % SPLITS
    local_image_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    grad_base = grad_qkv + image * (H * W * GRAD_W) + head * D
    grad_logits = grad_scratch + local_image_head * (H * W * (H + W))
    vectors = load_tables(tables, head, H, W, D, D_PAD, OFFSETS, TABLES_PER_HEAD)
    grad_vectors = tl.zeros([OFFSETS, D_PAD], tl.float32)
    offset = tl.arange(0, OFFSETS)
    of_row = (offset < 2 * H - 1)[None, :]
    for start in range(split * BLOCK_M, H * W, SPLITS * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = (pixel // W)[:, None]
        ix = (pixel % W)[:, None]
        inside = pixel < H * W
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
        by_place = load_pixels(grad_logits, pixel * (H + W), inside, H + W, PLACES)
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


@triton.jit
def attend_backward_keys(
    qkv, queries, keys, values, lse, grad_qkv, grads, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
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
    local_image_head = (tl.program_id(0) // (tiles_y * STRIPS)).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS

    slot = tl.arange(0, SLOTS)
    first = (local_image_head * STRIPS + strip) * (ROWS * KEY_COLS) + y0 * KEY_COLS
    keys += first * (MAIN + TAIL)
    k_tail = load_rows(keys + MAIN, slot, slot < SLOTS, MAIN + TAIL, TAIL, True)
    v = load_rows(values + first * VALUES, slot, slot < SLOTS, VALUES, VALUES, True)
    spread_cols = one_hot(slot % KEY_COLS, WINDOW, v.dtype)
    tails = queries + local_image_head * (PIXELS * STRIDE) + (y0 // GROUP) * TAIL
    columns = queries + local_image_head * (PIXELS * STRIDE) + GROUPS * TAIL + strip * KEY_COLS
    grads += local_image_head * (PIXELS * VALUES)
    tail_grad = tl.zeros([SLOTS, TAIL], tl.float32)
    value_grad = tl.zeros([SLOTS, VALUES], tl.float32)
    if MAIN > 0:
        k = load_rows(keys, slot, slot < SLOTS, MAIN + TAIL, MAIN, True)
        q_base = qkv + image * STRIDE_B + head * D
        main_grad = tl.zeros([SLOTS, MAIN], tl.float32)
    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < PIXELS
        q_tail = load_rows(tails, pixel, inside, STRIDE, TAIL, WHOLE)
        q_columns = load_rows(columns, pixel, inside, STRIDE, WINDOW, WHOLE)
        do = load_rows(grads, pixel, inside, VALUES, VALUES, WHOLE)
        peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
        s = tl.dot(k_tail, tl.trans(q_tail), input_precision=PRECISION)
        s = tl.dot(spread_cols, tl.trans(q_columns), s, input_precision=PRECISION)
        if MAIN > 0:
            q_place = pixel * STRIDE_W if STRIDE_H == W * STRIDE_W else (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W
            q = load_rows(q_base, q_place, inside, 1, MAIN, WHOLE)
            s = tl.dot(k, tl.trans(q), s, input_precision=PRECISION)
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
