"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

Queries come in tiles of BLOCK_M consecutive pixels, keys in tiles of KEY_ROWS x KEY_COLS pixels ("slots"). The relative
term of a query is a row of H + W logits, q_i . rel_h[y - iy] for every y and q_i . rel_w[x - ix] for every x: one small
product with all relative vectors, skewed in registers by a gather. Each slot picks two of them, its row's and its
column's, so the logits of a tile are q k^T + relative pick: matrix products only, for any map and any tile.
Logits are kept unscaled; SCALE = log2(e) / sqrt(D) enters with the exponential, which is in base 2, and so is `lse`.
H + W is padded to REL, the 2H + 2W - 2 relative vectors to 2 REL.
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
def load_tables(
    tables, head, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, REL: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """[2 REL, D_PAD]: the 2H - 1 relative vectors of the rows, then the 2W - 1 of the columns."""
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    offset = tl.arange(0, 2 * REL)
    base = tables + (head * (LENGTH * D) if TABLES_PER_HEAD else 0)
    return load_pixels(base, offset * D, offset < LENGTH, D, D_PAD)


@triton.jit
def relative_logits(
    q, tables, iy, ix, H: tl.constexpr, W: tl.constexpr, REL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """[BLOCK_M, REL]: what a query gives to each row (H of them), then to each column (W) of the map."""
    by_offset = tl.dot(q, tl.trans(tables), input_precision=PRECISION)
    place = tl.arange(0, REL)[None, :]
    index = place + tl.where(place < H, H - 1 - iy[:, None], H + W - 2 - ix[:, None])
    return tl.gather(by_offset, tl.minimum(tl.maximum(index, 0), 2 * REL - 1), 1).to(q.dtype)


@triton.jit
def by_relative_offset(grad, iy, ix, H: tl.constexpr, W: tl.constexpr, REL: tl.constexpr):
    """The skew undone: [BLOCK_M, REL] by row and column -> [BLOCK_M, 2 REL] by relative offset."""
    offset = tl.arange(0, 2 * REL)[None, :]
    of_row = offset < 2 * H - 1
    place = offset + tl.where(of_row, iy[:, None] - (H - 1), ix[:, None] - (H + W - 2))
    inside = tl.where(of_row, (place >= 0) & (place < H), (place >= H) & (place < H + W))
    return tl.where(inside, tl.gather(grad, tl.minimum(tl.maximum(place, 0), REL - 1), 1), 0.0)


@triton.jit
def pick(row, column, FIRST_COLUMN: tl.constexpr, PAD: tl.constexpr, dtype: tl.constexpr):
    """[PAD, slots]: ones where a slot's row and its column stand, the columns from FIRST_COLUMN on."""
    place = tl.arange(0, PAD)[:, None]
    return tl.where((place == row[None, :]) | (place == FIRST_COLUMN + column[None, :]), 1.0, 0.0).to(dtype)


@triton.jit
def window_places(
    y0, x0, H: tl.constexpr, W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Where the relative logits of a key tile's rows and columns stand among the H + W of a query, and which exist."""
    column = tl.arange(0, WINDOW)
    place = tl.where(column < KEY_ROWS, y0 + column, H + x0 + column - KEY_ROWS)
    exists = tl.where(column < KEY_ROWS, place < H, (column < KEY_ROWS + KEY_COLS) & (place < H + W))
    return place, exists


@triton.jit
def attend_forward(
    qkv, tables, out, lse, scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, REL: tl.constexpr, WINDOW: tl.constexpr,
    RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program a (image, head, query tile). WINDOW > 0: the relative logits are read from scratch, tile by tile."""
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    key_tiles_x: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    key_tiles: tl.constexpr = key_tiles_x * ((H + KEY_ROWS - 1) // KEY_ROWS)
    tile = tl.program_id(0) % tiles
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    k_base = q_base + HEADS * D
    v_base = qkv + image * STRIDE_B + 2 * HEADS * D + head * DV

    pixel = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    iy = pixel // W
    ix = pixel % W
    inside = pixel < H * W
    q = load_pixels(q_base, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    if RELATIVE and WINDOW > 0:
        scratch_rows = scratch + local_image_head * (H * W * (H + W)) + pixel[:, None] * (H + W)
        picked = pick(slot // KEY_COLS, slot % KEY_COLS, KEY_ROWS, WINDOW, q.dtype)
    elif RELATIVE:
        vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
        relative = relative_logits(q, vectors, iy, ix, H, W, REL, PRECISION)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for key_tile in range(key_tiles):
        y0 = (key_tile // key_tiles_x) * KEY_ROWS
        x0 = (key_tile % key_tiles_x) * KEY_COLS
        jy = y0 + slot // KEY_COLS
        jx = x0 + slot % KEY_COLS
        valid = (jy < H) & (jx < W)
        k = load_pixels(k_base, jy * STRIDE_H + jx * STRIDE_W, valid, D, D_PAD)
        v = load_pixels(v_base, jy * STRIDE_H + jx * STRIDE_W, valid, DV, DV_PAD)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if RELATIVE and WINDOW > 0:
            place, exists = window_places(y0, x0, H, W, KEY_ROWS, KEY_COLS, WINDOW)
            window = tl.load(scratch_rows + place[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
            s = tl.dot(window, picked, s, input_precision=PRECISION)
        elif RELATIVE:
            s = tl.dot(relative, pick(jy, jx, H, REL, q.dtype), s, input_precision=PRECISION)
        if (H % KEY_ROWS != 0) or (W % KEY_COLS != 0):
            s = tl.where(valid[None, :], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
        p = tl.exp2(s * SCALE - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(p, 1)
        mixed = tl.dot(p.to(v.dtype), v, mixed * fade[:, None], input_precision=PRECISION)
        peak = new_peak

    out_base = out + image * (H * W * HEADS * DV) + head * DV
    store_pixels(out_base, pixel * (HEADS * DV), inside, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + image_head * (H * W) + pixel, peak + tl.log2(total), mask=inside)


@triton.jit
def attend_backward_queries(
    qkv, tables, out, lse, grad_out, grad_qkv, grad_tables, delta, scratch, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, REL: tl.constexpr, WINDOW: tl.constexpr,
    RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of the tables. One program an (image, head, split): it walks over its query tiles
    and owns its slice of grad_tables [image_heads, SPLITS, 2H + 2W - 2, D], so no atomics and one result every time.
    Leaves delta and, in scratch [heads in this launch, H W, H + W], the relative logits for `attend_backward_keys`.
    WINDOW > 0: scratch is read instead, tile by tile, and the gradient of its logits left in grad_scratch.
    """
    PIXELS: tl.constexpr = H * W
    GRAD_B: tl.constexpr = PIXELS * HEADS * (2 * D + DV)
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    key_tiles_x: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    key_tiles: tl.constexpr = key_tiles_x * ((H + KEY_ROWS - 1) // KEY_ROWS)
    split = tl.program_id(0) % SPLITS
    local_image_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    k_base = q_base + HEADS * D
    v_base = qkv + image * STRIDE_B + 2 * HEADS * D + head * DV
    out_offset = image * (PIXELS * HEADS * DV) + head * DV
    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    if RELATIVE and WINDOW > 0:
        picked = pick(slot // KEY_COLS, slot % KEY_COLS, KEY_ROWS, WINDOW, qkv.dtype.element_ty)
        column = tl.arange(0, WINDOW)
    elif RELATIVE:
        vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
        table_base = grad_tables + (image_head * SPLITS + split) * (LENGTH * D)
        offset = tl.arange(0, 2 * REL)

    for start in range(split * BLOCK_M, PIXELS, SPLITS * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = pixel // W
        ix = pixel % W
        inside = pixel < PIXELS
        q = load_pixels(q_base, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
        do = load_pixels(grad_out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
        o = load_pixels(out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
        row_lse = tl.load(lse + image_head * PIXELS + pixel, mask=inside, other=float("inf"))
        row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + local_image_head * PIXELS + pixel, row_delta, mask=inside)
        grad_q = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        scratch_rows = local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
        if RELATIVE and WINDOW == 0:
            relative = relative_logits(q, vectors, iy, ix, H, W, REL, PRECISION)
            scratch_base = scratch + local_image_head * (PIXELS * (H + W))
            store_pixels(scratch_base, pixel * (H + W), inside, relative, H + W, REL)
            grad_relative = tl.zeros([BLOCK_M, REL], tl.float32)
        for key_tile in range(key_tiles):
            y0 = (key_tile // key_tiles_x) * KEY_ROWS
            x0 = (key_tile % key_tiles_x) * KEY_COLS
            jy = y0 + slot // KEY_COLS
            jx = x0 + slot % KEY_COLS
            valid = (jy < H) & (jx < W)
            k = load_pixels(k_base, jy * STRIDE_H + jx * STRIDE_W, valid, D, D_PAD)
            v = load_pixels(v_base, jy * STRIDE_H + jx * STRIDE_W, valid, DV, DV_PAD)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if RELATIVE and WINDOW > 0:
                place, exists = window_places(y0, x0, H, W, KEY_ROWS, KEY_COLS, WINDOW)
                window_mask = inside[:, None] & exists[None, :]
                window = tl.load(scratch + scratch_rows + place[None, :], mask=window_mask, other=0.0)
                s = tl.dot(window, picked, s, input_precision=PRECISION)
            elif RELATIVE:
                picked = pick(jy, jx, H, REL, q.dtype)
                s = tl.dot(relative, picked, s, input_precision=PRECISION)
            if (H % KEY_ROWS != 0) or (W % KEY_COLS != 0):
                s = tl.where(valid[None, :], s, float("-inf"))
            p = tl.exp2(s * SCALE - row_lse[:, None])
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            ds = (p * (dp - row_delta[:, None])).to(q.dtype)
            grad_q = tl.dot(ds, k, grad_q, input_precision=PRECISION)
            if RELATIVE and WINDOW > 0:
                # a row's logits are met again in the next column of tiles, a column's in the next row
                met = tl.where(column < KEY_ROWS, x0, y0) > 0
                pointers = grad_scratch + scratch_rows + place[None, :]
                seen = tl.load(pointers, mask=window_mask & met[None, :], other=0.0)
                seen = tl.dot(ds, tl.trans(picked), seen, input_precision=PRECISION)
                tl.store(pointers, seen, mask=window_mask)
                tl.debug_barrier()
            elif RELATIVE:
                grad_relative = tl.dot(ds, tl.trans(picked), grad_relative, input_precision=PRECISION)
        if RELATIVE and WINDOW == 0:
            by_offset = by_relative_offset(grad_relative, iy, ix, H, W, REL).to(q.dtype)
            grad_q = tl.dot(by_offset, vectors, grad_q, input_precision=PRECISION)
            # kept in memory between the tiles: for large maps it has no place in registers
            seen = load_pixels(table_base, offset * D, (offset < LENGTH) & (start >= SPLITS * BLOCK_M), D, D_PAD)
            seen += tl.dot(tl.trans(by_offset), q, input_precision=PRECISION) * (SCALE * LN2)
            store_pixels(table_base, offset * D, offset < LENGTH, seen, D, D_PAD)
            tl.debug_barrier()
        grad_base = grad_qkv + image * GRAD_B + head * D
        store_pixels(grad_base, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)


@triton.jit
def attend_backward_keys(
    qkv, lse, grad_out, grad_qkv, delta, scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, WINDOW: tl.constexpr,
    RELATIVE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program a (image, head, key tile); logits are [slots, queries] here.

    Of a query's relative logits only the KEY_ROWS + KEY_COLS of this tile are read, padded to WINDOW. Slots beyond the
    map's edge need no mask: what they gather is not stored.
    """
    PIXELS: tl.constexpr = H * W
    GRAD_B: tl.constexpr = PIXELS * HEADS * (2 * D + DV)
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    tiles_x: tl.constexpr = (W + KEY_COLS - 1) // KEY_COLS
    tiles: tl.constexpr = tiles_x * ((H + KEY_ROWS - 1) // KEY_ROWS)
    tile = tl.program_id(0) % tiles
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    k_base = q_base + HEADS * D
    v_base = qkv + image * STRIDE_B + 2 * HEADS * D + head * DV
    do_base = grad_out + image * (PIXELS * HEADS * DV) + head * DV

    y0 = (tile // tiles_x) * KEY_ROWS
    x0 = (tile % tiles_x) * KEY_COLS
    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    jy = y0 + slot // KEY_COLS
    jx = x0 + slot % KEY_COLS
    valid = (jy < H) & (jx < W)
    k = load_pixels(k_base, jy * STRIDE_H + jx * STRIDE_W, valid, D, D_PAD)
    v = load_pixels(v_base, jy * STRIDE_H + jx * STRIDE_W, valid, DV, DV_PAD)
    if RELATIVE:
        picked = tl.trans(pick(slot // KEY_COLS, slot % KEY_COLS, KEY_ROWS, WINDOW, k.dtype))
        place, exists = window_places(y0, x0, H, W, KEY_ROWS, KEY_COLS, WINDOW)
    grad_k = tl.zeros([KEY_ROWS * KEY_COLS, D_PAD], tl.float32)
    grad_v = tl.zeros([KEY_ROWS * KEY_COLS, DV_PAD], tl.float32)
    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < PIXELS
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
        do = load_pixels(do_base, pixel * (HEADS * DV), inside, DV, DV_PAD)
        row_lse = tl.load(lse + image_head * PIXELS + pixel, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + local_image_head * PIXELS + pixel, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if RELATIVE:
            base = scratch + local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
            relative = tl.load(base + place[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
            s = tl.dot(picked, tl.trans(relative), s, input_precision=PRECISION)
        p = tl.exp2(s * SCALE - row_lse[None, :])
        grad_v = tl.dot(p.to(v.dtype), do, grad_v, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(k.dtype)
        grad_k = tl.dot(ds, q, grad_k, input_precision=PRECISION)

    grad_base = grad_qkv + image * GRAD_B
    offset = (jy * W + jx) * GRAD_W
    store_pixels(grad_base + HEADS * D + head * D, offset, valid, grad_k * (SCALE * LN2), D, D_PAD)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, offset, valid, grad_v, DV, DV_PAD)


@triton.jit
def attend_backward_small(
    qkv, tables, out, lse, grad_out, grad_qkv, grad_tables,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, REL: tl.constexpr,
    RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """All gradients of a map whose keys fit one tile: one program an (image, head), no scratch, every logit once."""
    PIXELS: tl.constexpr = H * W
    GRAD_B: tl.constexpr = PIXELS * HEADS * (2 * D + DV)
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    image_head = tl.program_id(0).to(tl.int64)
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    out_offset = image * (PIXELS * HEADS * DV) + head * DV
    grad_base = grad_qkv + image * GRAD_B

    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    jy = slot // KEY_COLS
    jx = slot % KEY_COLS
    valid = (jy < H) & (jx < W)
    key_offset = jy * STRIDE_H + jx * STRIDE_W
    k = load_pixels(q_base + HEADS * D, key_offset, valid, D, D_PAD)
    v = load_pixels(qkv + image * STRIDE_B + 2 * HEADS * D + head * DV, key_offset, valid, DV, DV_PAD)
    edge = tl.where(valid, 0.0, float("-inf"))
    if RELATIVE:
        picked = tl.trans(pick(jy, jx, H, REL, k.dtype))
        vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
        grad_vectors = tl.zeros([2 * REL, D_PAD], tl.float32)
    grad_k = tl.zeros([KEY_ROWS * KEY_COLS, D_PAD], tl.float32)
    grad_v = tl.zeros([KEY_ROWS * KEY_COLS, DV_PAD], tl.float32)

    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = pixel // W
        ix = pixel % W
        inside = pixel < PIXELS
        q = load_pixels(q_base, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
        do = load_pixels(grad_out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
        o = load_pixels(out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
        row_lse = tl.load(lse + image_head * PIXELS + pixel, mask=inside, other=float("inf"))
        row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if RELATIVE:
            relative = relative_logits(q, vectors, iy, ix, H, W, REL, PRECISION)
            s = tl.dot(picked, tl.trans(relative), s, input_precision=PRECISION)
        p = tl.exp2(s * SCALE + (edge[:, None] - row_lse[None, :]))
        grad_v = tl.dot(p.to(v.dtype), do, grad_v, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(k.dtype)
        grad_k = tl.dot(ds, q, grad_k, input_precision=PRECISION)
        ds = tl.trans(ds)
        grad_q = tl.dot(ds, k, input_precision=PRECISION)
        if RELATIVE:
            grad_relative = tl.dot(ds, picked, input_precision=PRECISION)
            by_offset = by_relative_offset(grad_relative, iy, ix, H, W, REL).to(q.dtype)
            grad_q = tl.dot(by_offset, vectors, grad_q, input_precision=PRECISION)
            grad_vectors = tl.dot(tl.trans(by_offset), q, grad_vectors, input_precision=PRECISION)
        store_pixels(grad_base + head * D, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)

    offset = (jy * W + jx) * GRAD_W
    store_pixels(grad_base + HEADS * D + head * D, offset, valid, grad_k * (SCALE * LN2), D, D_PAD)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, offset, valid, grad_v, DV, DV_PAD)
    if RELATIVE:
        row = tl.arange(0, 2 * REL)
        base = grad_tables + image_head * (LENGTH * D)
        store_pixels(base, row * D, row < LENGTH, grad_vectors * (SCALE * LN2), D, D_PAD)


@triton.jit
def write_relative(
    qkv, tables, scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, REL: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Large maps: the relative logits of every query into scratch [heads in this launch, H W, H + W]."""
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    iy = pixel // W
    ix = pixel % W
    inside = pixel < H * W
    q_base = qkv + (image_head // HEADS) * STRIDE_B + head * D
    q = load_pixels(q_base, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
    vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
    relative = relative_logits(q, vectors, iy, ix, H, W, REL, PRECISION)
    store_pixels(scratch + local_image_head * (H * W * (H + W)), pixel * (H + W), inside, relative, H + W, REL)


@triton.jit
def relative_backward(
    qkv, tables, grad_qkv, grad_tables, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, REL: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Large maps: grad_scratch into the gradients of queries (added to what is there) and tables (as in
    `attend_backward_queries`)."""
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    split = tl.program_id(0) % SPLITS
    local_image_head = (tl.program_id(0) // SPLITS).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    grad_base = grad_qkv + image * (H * W * GRAD_W) + head * D
    vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
    grad_vectors = tl.zeros([2 * REL, D_PAD], tl.float32)
    for start in range(split * BLOCK_M, H * W, SPLITS * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = pixel // W
        ix = pixel % W
        inside = pixel < H * W
        q = load_pixels(qkv + image * STRIDE_B + head * D, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
        rows = grad_scratch + local_image_head * (H * W * (H + W))
        grad_relative = load_pixels(rows, pixel * (H + W), inside, H + W, REL)
        by_offset = by_relative_offset(grad_relative, iy, ix, H, W, REL).to(q.dtype)
        grad_q = tl.dot(by_offset, vectors, input_precision=PRECISION) * (SCALE * LN2)
        grad_q += load_pixels(grad_base, pixel * GRAD_W, inside, D, D_PAD)
        store_pixels(grad_base, pixel * GRAD_W, inside, grad_q, D, D_PAD)
        grad_vectors = tl.dot(tl.trans(by_offset), q, grad_vectors, input_precision=PRECISION)
    offset = tl.arange(0, 2 * REL)
    base = grad_tables + (image_head * SPLITS + split) * (LENGTH * D)
    store_pixels(base, offset * D, offset < LENGTH, grad_vectors * (SCALE * LN2), D, D_PAD)
