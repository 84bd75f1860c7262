"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

A logit is q_i . k_j + rows_i[jy] + cols_i[jx]: a query has H + W relative logits beside its product with the keys, and
each key adds two of them. Matrix products take depths of 16, so a head of 20 channels leaves 12 unused: they carry the
rows. `pack` lays out, once for all the tiles that will read it,

    queries  [pixel, GROUPS * TAIL + COLUMNS]   GROUPS times: q[MAIN:] | OUTSIDE | 0 ... | GROUP of the rows | 0 ...
                                                then cols[0 : W] | 0 ...
    keys     [strip, row, column, MAIN + TAIL]  k | 1 where the slot is beyond the map | 0 ... | one-hot of row % GROUP
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
def load_line(
    qkv, tables, head, image, i, first,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries, from `first` on, of image row i (ROWS) or image column i: in a line all of them have the same
    relative vectors for the same places, so that nothing needs to be skewed. Returns the queries [BLOCK_M, D_PAD],
    their pixels, whether they exist, and where the vector of place 0 is: place p has the p-th after it."""
    along = first + tl.arange(0, BLOCK_M)
    iy = i if ROWS else along
    ix = along if ROWS else i
    exists = along < (W if ROWS else H)
    base = qkv + image * STRIDE_B + head * D
    q = load_pixels(base, iy * STRIDE_H + ix * STRIDE_W + along * 0, exists, D, D_PAD)
    vectors = tables + (head * ((2 * H + 2 * W - 2) * D) if TABLES_PER_HEAD else 0)
    vectors += (H - 1 - i) * D if ROWS else (2 * H + W - 2 - i) * D
    return q, iy * W + ix, exists, vectors


@triton.jit
def pack_line(
    qkv, tables, queries, local_image_head, image_head, i, first,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr,
    OUTSIDE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The tails (ROWS) or the columns' logits of BLOCK_M queries of one image row or column: one product."""
    WIDTH: tl.constexpr = GROUPS * TAIL if ROWS else COLUMNS
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    head = (image_head % HEADS).to(tl.int32)
    q, pixel, exists, vectors = load_line(
        qkv, tables, head, image_head // HEADS, i, first,
        STRIDE_B, STRIDE_H, STRIDE_W, H, W, D, D_PAD, TABLES_PER_HEAD, ROWS, BLOCK_M,
    )  # fmt: skip
    wide = tl.arange(0, PADDED)
    depth = tl.arange(0, D_PAD)[None, :]
    part = wide % TAIL if ROWS else wide
    place = (wide // TAIL) * GROUP + part - ROWS_AT if ROWS else wide
    known = (part >= ROWS_AT) & (part < ROWS_AT + GROUP) & (place < H) if ROWS else wide < W
    factors = tl.load(
        vectors + place[:, None] * D + depth, mask=(known & RELATIVE)[:, None] & (depth < D), other=0.0
    ).to(q.dtype)  # fmt: skip
    if ROWS:  # unit vectors bring the last channels of q to their places
        factors = tl.where((part < D - MAIN)[:, None] & (depth == (MAIN + part)[:, None]), 1.0, factors).to(q.dtype)
    packed = tl.dot(q, tl.trans(factors), input_precision=PRECISION)
    if ROWS:
        packed = tl.where((part == D - MAIN)[None, :], OUTSIDE, packed)
    start = queries + local_image_head * (H * W * STRIDE) + (0 if ROWS else GROUPS * TAIL)
    store_pixels(start, pixel * STRIDE, exists, packed, WIDTH, PADDED)


@triton.jit
def pack_keys(
    qkv, keys, values, local_image_head, image_head, tile,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    VALUES: tl.constexpr, KEY_COLS: tl.constexpr, ALL_SLOTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    ALL_ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    head = (image_head % HEADS).to(tl.int32)
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    exists = slot < ALL_SLOTS
    jy = (slot // KEY_COLS) % ALL_ROWS
    jx = (slot // (KEY_COLS * ALL_ROWS)) * KEY_COLS + slot % KEY_COLS
    on_map = (jy < H) & (jx < W)
    place = jy * STRIDE_H + jx * STRIDE_W
    image = qkv + (image_head // HEADS) * STRIDE_B
    k = load_pixels(image + (HEADS + head) * D, place, on_map, D, KEY)
    depth = tl.arange(0, KEY)[None, :]
    k = tl.where(depth == D, tl.where(on_map, 0.0, 1.0)[:, None], k)
    k = tl.where(depth - (MAIN + ROWS_AT) == (jy % GROUP)[:, None], 1.0, k)
    keys += local_image_head * (ALL_SLOTS * (MAIN + TAIL))
    store_pixels(keys, slot * (MAIN + TAIL), exists, k, MAIN + TAIL, KEY)
    v = load_pixels(image + 2 * HEADS * D + head * DV, place, on_map, DV, VALUES)
    depth = tl.arange(0, VALUES)[None, :]
    v = tl.where((depth == DV) | (depth == DV + 1), 1.0, v)
    store_pixels(values + local_image_head * (ALL_SLOTS * VALUES), slot * VALUES, exists, v, VALUES, VALUES)


@triton.jit
def pack(
    qkv, tables, queries, keys, values, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr, KEY_COLS: tl.constexpr,
    ALL_SLOTS: tl.constexpr, TAILS_PADDED: tl.constexpr, COLUMNS_PADDED: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. Of each head's programs the first ones take BLOCK_M queries of an image
    row, the next BLOCK_M queries of an image column, the last SLOTS keys."""
    row_blocks: tl.constexpr = (W + BLOCK_M - 1) // BLOCK_M
    column_blocks: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
    in_rows: tl.constexpr = H * row_blocks
    in_columns: tl.constexpr = W * column_blocks if RELATIVE else 0
    of_keys: tl.constexpr = (ALL_SLOTS + SLOTS - 1) // SLOTS
    local_image_head = (tl.program_id(0) // (in_rows + in_columns + of_keys)).to(tl.int64)
    image_head = local_image_head + first_image_head  # int64: a batch may hold more than 2**31 elements
    program = tl.program_id(0) % (in_rows + in_columns + of_keys)
    if program < in_rows:
        pack_line(
            qkv, tables, queries, local_image_head, image_head,
            program // row_blocks, program % row_blocks * BLOCK_M,
            STRIDE_B, STRIDE_H, STRIDE_W, HEADS, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP, GROUPS, COLUMNS,
            TAILS_PADDED, TABLES_PER_HEAD, RELATIVE, OUTSIDE, PRECISION, True, BLOCK_M,
        )  # fmt: skip
    elif program < in_rows + in_columns:
        pack_line(
            qkv, tables, queries, local_image_head, image_head,
            (program - in_rows) // column_blocks, (program - in_rows) % column_blocks * BLOCK_M,
            STRIDE_B, STRIDE_H, STRIDE_W, HEADS, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP, GROUPS, COLUMNS,
            COLUMNS_PADDED, TABLES_PER_HEAD, RELATIVE, OUTSIDE, PRECISION, False, BLOCK_M,
        )  # fmt: skip
    else:
        pack_keys(
            qkv, keys, values, local_image_head, image_head, program - in_rows - in_columns,
            STRIDE_B, STRIDE_H, STRIDE_W, HEADS, H, W, D, DV, MAIN, TAIL, KEY, ROWS_AT, GROUP, VALUES, KEY_COLS,
            ALL_SLOTS, SLOTS,
        )  # fmt: skip


@triton.jit
def load_columns(
    queries, pixel, inside, x0, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr,
    KEY_COLS: tl.constexpr, WHOLE: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, KEY_ROWS * KEY_COLS]: the relative logits of a strip's columns, the same for all its rows."""
    if RELATIVE:
        columns = load_rows(queries + x0, pixel, inside, STRIDE, KEY_COLS, WHOLE).to(tl.float32)
    else:
        columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEY_ROWS, KEY_COLS])
    return tl.reshape(columns, [BLOCK_M, KEY_ROWS * KEY_COLS])


@triton.jit
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
            queries + GROUPS * TAIL,
            pixel,
            inside,
            strip * KEY_COLS,
            STRIDE,
            BLOCK_M,
            KEY_ROWS,
            KEY_COLS,
            WHOLE,
            RELATIVE,
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
    row = tl.arange(0, TAIL) - ROWS_AT
    places = local_image_head * (PIXELS * (STRIPS * H + W)) + pixel[:, None] * (STRIPS * H + W)
    tail_grad = tl.zeros([BLOCK_M, TAIL], tl.float32)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, MAIN)
        main_grad = tl.zeros([BLOCK_M, MAIN], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL,
            pixel,
            inside,
            strip * KEY_COLS,
            STRIDE,
            BLOCK_M,
            KEY_ROWS,
            KEY_COLS,
            WHOLE,
            RELATIVE,
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


@triton.jit
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
    local_image_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
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


@triton.jit
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
        do = load_rows(grads, pixel, inside, VALUES, VALUES, WHOLE)
        peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
        s = tl.dot(k_tail, tl.trans(q_tail), input_precision=PRECISION)
        if RELATIVE:
            q_columns = load_rows(columns, pixel, inside, STRIDE, WINDOW, WHOLE)
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
