"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

Queries come in tiles of BLOCK_M consecutive pixels, keys in tiles of KEY_ROWS x KEY_COLS pixels ("slots"). With
rh[i, y] = q_i . rel_h[y - iy] and rw[i, x] = q_i . rel_w[x - ix], small products that are skewed in registers, the
logits of a tile are q k^T + rh onehot(row of slot)^T + rw onehot(column of slot)^T: matrix products only. The width
term is the same for all tiles of a column chunk: the accumulator they start from, which also masks the map's edge.
Logits are kept unscaled; SCALE = log2(e) / sqrt(D) enters with the exponential, which is in base 2, and so is `lse`.
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
def load_table(table, SIZE: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """[2 PAD, D_PAD]: the 2 SIZE - 1 relative vectors of one axis."""
    offset = tl.arange(0, 2 * PAD)
    return load_pixels(table, offset * D, offset < 2 * SIZE - 1, D, D_PAD)


@triton.jit
def relative_logits(q, table, position, SIZE: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_M, PAD]: q_i . table[y - position_i], by one product over all offsets, then a skew."""
    by_offset = tl.dot(q, tl.trans(table), input_precision=PRECISION)
    index = tl.arange(0, PAD)[None, :] - position[:, None] + (SIZE - 1)
    index = tl.minimum(tl.maximum(index, 0), 2 * PAD - 1)
    return tl.gather(by_offset, index, 1).to(q.dtype)


@triton.jit
def logits_grad_by_offset(grad, position, SIZE: tl.constexpr, PAD: tl.constexpr):
    """The skew undone: [BLOCK_M, PAD] by position -> [BLOCK_M, 2 PAD] by relative offset."""
    index = tl.arange(0, 2 * PAD)[None, :] + position[:, None] - (SIZE - 1)
    inside = (index >= 0) & (index < SIZE)
    return tl.where(inside, tl.gather(grad, tl.minimum(tl.maximum(index, 0), PAD - 1), 1), 0.0)


@triton.jit
def one_hot(position, PAD: tl.constexpr, dtype: tl.constexpr):
    """[PAD, slots]"""
    return tl.where(tl.arange(0, PAD)[:, None] == position[None, :], 1.0, 0.0).to(dtype)


@triton.jit
def attend_forward(
    qkv, tables, out, lse,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    H_PAD: tl.constexpr, W_PAD: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program a (image, head, query tile)."""
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    tile = tl.program_id(0) % tiles
    image_head = (tl.program_id(0) // tiles).to(tl.int64)  # int64: a batch may hold more than 2**31 elements
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
    if RELATIVE:
        table = tables + (head * ((2 * H + 2 * W - 2) * D) if TABLES_PER_HEAD else 0)
        rh = relative_logits(q, load_table(table, H, H_PAD, D, D_PAD), iy, H, H_PAD, PRECISION)
        rw = relative_logits(q, load_table(table + (2 * H - 1) * D, W, W_PAD, D, D_PAD), ix, W, W_PAD, PRECISION)

    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for x0 in range(0, W, KEY_COLS):
        jx = x0 + slot % KEY_COLS
        width_term = tl.zeros([BLOCK_M, KEY_ROWS * KEY_COLS], tl.float32)
        if RELATIVE:
            width_term = tl.dot(rw, one_hot(jx, W_PAD, q.dtype), width_term, input_precision=PRECISION)
        width_term = tl.where((jx < W)[None, :], width_term, float("-inf"))
        for y0 in range(0, H, KEY_ROWS):
            jy = y0 + slot // KEY_COLS
            key_offset = jy * STRIDE_H + jx * STRIDE_W
            valid = (jy < H) & (jx < W)
            k = load_pixels(k_base, key_offset, valid, D, D_PAD)
            v = load_pixels(v_base, key_offset, valid, DV, DV_PAD)
            s = tl.dot(q, tl.trans(k), width_term, input_precision=PRECISION)
            if RELATIVE:
                s = tl.dot(rh, one_hot(jy, H_PAD, q.dtype), s, input_precision=PRECISION)
            if H % KEY_ROWS != 0:
                s = tl.where((jy < H)[None, :], s, float("-inf"))
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
    qkv, tables, out, lse, grad_out, grad_qkv, grad_tables, delta, relative, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    H_PAD: tl.constexpr, W_PAD: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and of the tables. One program an (image, head, split): it walks over its query tiles
    and owns its slice of grad_tables [image_heads, SPLITS, 2H + 2W - 2, D], so no atomics and one result every time.
    Leaves delta and the relative logits for `attend_backward_keys`.
    """
    PIXELS: tl.constexpr = H * W
    GRAD_B: tl.constexpr = PIXELS * HEADS * (2 * D + DV)
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    LN2: tl.constexpr = 0.6931471805599453
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
    if RELATIVE:
        table = tables + (head * ((2 * H + 2 * W - 2) * D) if TABLES_PER_HEAD else 0)
        table_h = load_table(table, H, H_PAD, D, D_PAD)
        table_w = load_table(table + (2 * H - 1) * D, W, W_PAD, D, D_PAD)
        grad_table_h = tl.zeros([2 * H_PAD, D_PAD], tl.float32)
        grad_table_w = tl.zeros([2 * W_PAD, D_PAD], tl.float32)

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
        if RELATIVE:
            rh = relative_logits(q, table_h, iy, H, H_PAD, PRECISION)
            rw = relative_logits(q, table_w, ix, W, W_PAD, PRECISION)
            relative_base = relative + local_image_head * (PIXELS * (H + W))
            store_pixels(relative_base, pixel * (H + W), inside, rh, H, H_PAD)
            store_pixels(relative_base + H, pixel * (H + W), inside, rw, W, W_PAD)
            grad_rh = tl.zeros([BLOCK_M, H_PAD], tl.float32)
            grad_rw = tl.zeros([BLOCK_M, W_PAD], tl.float32)
        for x0 in range(0, W, KEY_COLS):
            jx = x0 + slot % KEY_COLS
            width_term = tl.zeros([BLOCK_M, KEY_ROWS * KEY_COLS], tl.float32)
            grad_width = tl.zeros([BLOCK_M, KEY_ROWS * KEY_COLS], tl.float32)
            if RELATIVE:
                width_term = tl.dot(rw, one_hot(jx, W_PAD, q.dtype), width_term, input_precision=PRECISION)
            width_term = tl.where((jx < W)[None, :], width_term, float("-inf"))
            for y0 in range(0, H, KEY_ROWS):
                jy = y0 + slot // KEY_COLS
                key_offset = jy * STRIDE_H + jx * STRIDE_W
                valid = (jy < H) & (jx < W)
                k = load_pixels(k_base, key_offset, valid, D, D_PAD)
                v = load_pixels(v_base, key_offset, valid, DV, DV_PAD)
                s = tl.dot(q, tl.trans(k), width_term, input_precision=PRECISION)
                if RELATIVE:
                    row_of_slot = one_hot(jy, H_PAD, q.dtype)
                    s = tl.dot(rh, row_of_slot, s, input_precision=PRECISION)
                if H % KEY_ROWS != 0:
                    s = tl.where((jy < H)[None, :], s, float("-inf"))
                p = tl.exp2(s * SCALE - row_lse[:, None])
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                grad_s = p * (dp - row_delta[:, None])
                ds = grad_s.to(q.dtype)
                grad_q = tl.dot(ds, k, grad_q, input_precision=PRECISION)
                if RELATIVE:
                    grad_rh = tl.dot(ds, tl.trans(row_of_slot), grad_rh, input_precision=PRECISION)
                    grad_width += grad_s
            if RELATIVE:
                column_of_slot = tl.trans(one_hot(jx, W_PAD, q.dtype))
                grad_rw = tl.dot(grad_width.to(q.dtype), column_of_slot, grad_rw, input_precision=PRECISION)
        if RELATIVE:
            by_offset = logits_grad_by_offset(grad_rh, iy, H, H_PAD).to(q.dtype)
            grad_q = tl.dot(by_offset, table_h, grad_q, input_precision=PRECISION)
            grad_table_h = tl.dot(tl.trans(by_offset), q, grad_table_h, input_precision=PRECISION)
            by_offset = logits_grad_by_offset(grad_rw, ix, W, W_PAD).to(q.dtype)
            grad_q = tl.dot(by_offset, table_w, grad_q, input_precision=PRECISION)
            grad_table_w = tl.dot(tl.trans(by_offset), q, grad_table_w, input_precision=PRECISION)
        grad_base = grad_qkv + image * GRAD_B + head * D
        store_pixels(grad_base, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)

    if RELATIVE:
        base = grad_tables + (image_head * SPLITS + split) * ((2 * H + 2 * W - 2) * D)
        offset_h = tl.arange(0, 2 * H_PAD)
        offset_w = tl.arange(0, 2 * W_PAD)
        store_pixels(base, offset_h * D, offset_h < 2 * H - 1, grad_table_h * (SCALE * LN2), D, D_PAD)
        base += (2 * H - 1) * D
        store_pixels(base, offset_w * D, offset_w < 2 * W - 1, grad_table_w * (SCALE * LN2), D, D_PAD)


@triton.jit
def attend_backward_keys(
    qkv, lse, grad_out, grad_qkv, delta, relative, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
    ROW_WINDOW: tl.constexpr, COL_WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program a (image, head, key tile); logits are [slots, queries] here."""
    PIXELS: tl.constexpr = H * W
    GRAD_B: tl.constexpr = PIXELS * HEADS * (2 * D + DV)
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    LN2: tl.constexpr = 0.6931471805599453
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
    edge = tl.where(valid, 0.0, float("-inf"))
    if RELATIVE:
        # only the rows and columns of this tile are needed of the relative logits
        row_of_slot = tl.trans(one_hot(slot // KEY_COLS, ROW_WINDOW, k.dtype))
        column_of_slot = tl.trans(one_hot(slot % KEY_COLS, COL_WINDOW, k.dtype))
        rows = tl.arange(0, ROW_WINDOW)
        columns = tl.arange(0, COL_WINDOW)
        row_inside = (rows < KEY_ROWS) & (y0 + rows < H)
        column_inside = (columns < KEY_COLS) & (x0 + columns < W)
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
            base = relative + local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
            rh = tl.load(base + y0 + rows[None, :], mask=inside[:, None] & row_inside[None, :], other=0.0)
            rw = tl.load(base + H + x0 + columns[None, :], mask=inside[:, None] & column_inside[None, :], other=0.0)
            s = tl.dot(row_of_slot, tl.trans(rh), s, input_precision=PRECISION)
            s = tl.dot(column_of_slot, tl.trans(rw), s, input_precision=PRECISION)
        p = tl.exp2(s * SCALE + (edge[:, None] - row_lse[None, :]))
        grad_v = tl.dot(p.to(v.dtype), do, grad_v, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(k.dtype)
        grad_k = tl.dot(ds, q, grad_k, input_precision=PRECISION)

    grad_base = grad_qkv + image * GRAD_B
    offset = (jy * W + jx) * GRAD_W
    store_pixels(grad_base + HEADS * D + head * D, offset, valid, grad_k * (SCALE * LN2), D, D_PAD)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, offset, valid, grad_v, DV, DV_PAD)
