"""The first of the fused kernels: it lays out the operands of the attention for the others.

A logit is q_i . k_j + rows_i[jy] + cols_i[jx]: a query has H + W relative logits beside its product with the keys, and
each key adds two of them. Matrix products take depths of 16, so a head of 20 channels leaves 12 unused: they carry the
rows. `pack` lays out, once for all the tiles that will read it,

    queries  [pixel, GROUPS * TAIL + COLUMNS]   GROUPS times: q[MAIN:] | OUTSIDE | -lse in 3 parts | 0 ... |
                                                GROUP of the rows | 0 ...; then cols[0 : W] | 0 ...
    keys     [strip, row, column, MAIN + TAIL]  k | 1 where the slot is beyond the map | 1 | 1 | 1 | 0 ... |
                                                one-hot of row % GROUP
    values   [strip, row, column, VALUES]       v | 1 | 1 | 0 ...

with keys in strips of KEY_COLS columns, so that a tile of KEY_ROWS x KEY_COLS keys is one piece of memory. k, rows and
cols are multiplied by KEY_SCALE. The log-sum-exp is there for the backward, and not in float32 (LOG_SUM): three parts
of 16 bits hold it as float32 does.
"""

import triton
import triton.language as tl


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
def find_head(number, first_image_head, HEADS: tl.constexpr):
    """Of the image-head with that number in this launch: the number, that among all, its image and its head."""
    local_image_head = number.to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image_head = local_image_head + first_image_head
    return local_image_head, image_head, image_head // HEADS, (image_head % HEADS).to(tl.int32)


@triton.jit
def load_line(
    qkv, table, head, image, i, first,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries, from `first` on, of image row i (ROWS) or image column i: in a line all of them have the same
    relative vectors for the same places, so that nothing needs to be skewed. Returns the queries [BLOCK_M, D_PAD],
    their pixels, whether they exist, and where in the table the vector of place 0 is: place p has the p-th after it."""
    side: tl.constexpr = H if ROWS else W  # as long as a line of the other direction
    along = first + tl.arange(0, BLOCK_M)
    pixel = i * W + along if ROWS else along * W + i
    exists = along < (W if ROWS else H)
    q = load_pixels(qkv + image * STRIDE_B + head * D, pixel * STRIDE_P, exists, D, D_PAD)
    vectors = table + (side - 1 - i) * D + (head * ((2 * side - 1) * D) if TABLES_PER_HEAD else 0)
    return q, pixel, exists, vectors


@triton.jit
def pack_line(
    qkv, table, queries, lse, local_image_head, image, head, i, first,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr,
    OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr, LOG_SUM: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The tails (ROWS) or the columns' logits of BLOCK_M queries of one image row or column: one product."""
    WIDTH: tl.constexpr = GROUPS * TAIL if ROWS else COLUMNS
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    q, pixel, exists, vectors = load_line(
        qkv, table, head, image, i, first, STRIDE_B, STRIDE_P, H, W, D, D_PAD, TABLES_PER_HEAD, ROWS, BLOCK_M,
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
        packed *= tl.where(part < ROWS_AT, 1.0, KEY_SCALE)[None, :]
        packed = tl.where((part == D - MAIN)[None, :], OUTSIDE, packed)
        if LOG_SUM:
            rest = -tl.load(lse + pixel, mask=exists, other=0.0) - tl.load(lse + H * W + pixel, mask=exists, other=0.0)
            for digits in tl.static_range(3):
                rounded = rest.to(q.dtype).to(tl.float32)
                packed = tl.where((part == D - MAIN + 1 + digits)[None, :], rounded[:, None], packed)
                rest -= rounded
    else:
        packed *= KEY_SCALE
    start = queries + local_image_head * (H * W * STRIDE) + (0 if ROWS else GROUPS * TAIL)
    store_pixels(start, pixel * STRIDE, exists, packed, WIDTH, PADDED)


@triton.jit
def pack_keys(
    qkv, keys, values, local_image_head, image, head, tile,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    VALUES: tl.constexpr, KEY_COLS: tl.constexpr, ALL_SLOTS: tl.constexpr, KEY_SCALE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    ALL_ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    slot = tile * SLOTS + tl.arange(0, SLOTS)
    exists = slot < ALL_SLOTS
    jy = (slot // KEY_COLS) % ALL_ROWS
    jx = (slot // (KEY_COLS * ALL_ROWS)) * KEY_COLS + slot % KEY_COLS
    on_map = (jy < H) & (jx < W)
    place = (jy * W + jx) * STRIDE_P
    base = qkv + image * STRIDE_B
    k = load_pixels(base + (HEADS + head) * D, place, on_map, D, KEY)
    depth = tl.arange(0, KEY)[None, :]
    k = tl.where(depth == D, tl.where(on_map, 0.0, 1.0)[:, None], k.to(tl.float32) * KEY_SCALE)
    k = tl.where((depth > D) & (depth <= D + 3), 1.0, k)
    k = tl.where(depth - (MAIN + ROWS_AT) == (jy % GROUP)[:, None], 1.0, k)
    keys += local_image_head * (ALL_SLOTS * (MAIN + TAIL))
    store_pixels(keys, slot * (MAIN + TAIL), exists, k, MAIN + TAIL, KEY)
    v = load_pixels(base + 2 * HEADS * D + head * DV, place, on_map, DV, VALUES)
    depth = tl.arange(0, VALUES)[None, :]
    v = tl.where((depth == DV) | (depth == DV + 1), 1.0, v)
    store_pixels(values + local_image_head * (ALL_SLOTS * VALUES), slot * VALUES, exists, v, VALUES, VALUES)


@triton.jit(do_not_specialize=["first_image_head"])
def pack(
    qkv, rel_h, rel_w, queries, keys, values, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr, KEY_COLS: tl.constexpr,
    ALL_SLOTS: tl.constexpr, TAILS_PADDED: tl.constexpr, COLUMNS_PADDED: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr,
    LOG_SUM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. Of each head's programs the first ones take BLOCK_M queries of an image
    row, the next BLOCK_M queries of an image column, the last SLOTS keys."""
    row_blocks: tl.constexpr = (W + BLOCK_M - 1) // BLOCK_M
    column_blocks: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
    in_rows: tl.constexpr = H * row_blocks
    in_columns: tl.constexpr = W * column_blocks if RELATIVE else 0
    of_keys: tl.constexpr = (ALL_SLOTS + SLOTS - 1) // SLOTS
    programs: tl.constexpr = in_rows + in_columns + of_keys
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // programs, first_image_head, HEADS)
    lse += image_head * (2 * H * W)
    program = tl.program_id(0) % programs
    if program < in_rows:
        pack_line(
            qkv, rel_h, queries, lse, local_image_head, image, head,
            program // row_blocks, program % row_blocks * BLOCK_M,
            STRIDE_B, STRIDE_P, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP, GROUPS, COLUMNS,
            TAILS_PADDED, TABLES_PER_HEAD, RELATIVE, OUTSIDE, KEY_SCALE, LOG_SUM, PRECISION, True, BLOCK_M,
        )  # fmt: skip
    elif program < in_rows + in_columns:
        pack_line(
            qkv, rel_w, queries, lse, local_image_head, image, head,
            (program - in_rows) // column_blocks, (program - in_rows) % column_blocks * BLOCK_M,
            STRIDE_B, STRIDE_P, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP, GROUPS, COLUMNS,
            COLUMNS_PADDED, TABLES_PER_HEAD, RELATIVE, OUTSIDE, KEY_SCALE, LOG_SUM, PRECISION, False, BLOCK_M,
        )  # fmt: skip
    else:
        pack_keys(
            qkv, keys, values, local_image_head, image, head, program - in_rows - in_columns,
            STRIDE_B, STRIDE_P, HEADS, H, W, D, DV, MAIN, TAIL, KEY, ROWS_AT, GROUP, VALUES, KEY_COLS,
            ALL_SLOTS, KEY_SCALE, SLOTS,
        )  # fmt: skip
