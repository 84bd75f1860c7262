"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

Queries come in tiles of BLOCK_M consecutive pixels, keys in tiles of KEY_ROWS x KEY_COLS pixels ("slots"). A query has
H + W relative logits, q_i . rel_h[y - iy] for every row y and q_i . rel_w[x - ix] for every column x; `relative_logits`
leaves them in scratch: one product with all relative vectors, skewed from offsets to places by a gather. Going down a
column of key tiles, the columns' logits stay the same: they are what the product q k^T accumulates onto, and cost
nothing. The rows' logits of a tile, KEY_ROWS a query, are spread over its slots by a product with a constant one-hot
matrix. So a logit needs no arithmetic beside the matrix units but its exponential, for any map and any tile.
Logits are kept unscaled; SCALE = log2(e) / sqrt(D) enters with the exponential, which is in base 2, and so is `lse`.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
ROWS = tl.constexpr(16)
"""Key rows of a tile, padded to what a matrix product takes."""


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
def one_hot(index, SIZE: tl.constexpr, dtype: tl.constexpr):
    """[SIZE, slots]: a one in each column, at its index."""
    return tl.where(tl.arange(0, SIZE)[:, None] == index[None, :], 1.0, 0.0).to(dtype)


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
    qkv, tables, scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, REL: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """scratch [heads in this launch, H W, H + W]. One program an (image, head, query tile). REL is H + W padded."""
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    iy = pixel // W
    ix = pixel % W
    inside = pixel < H * W
    q_base = qkv + (image_head // HEADS) * STRIDE_B + head * D
    q = load_pixels(q_base, iy * STRIDE_H + ix * STRIDE_W, inside, D, D_PAD)
    vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
    by_offset = tl.dot(q, tl.trans(vectors), input_precision=PRECISION)
    place = tl.arange(0, REL)[None, :]
    offset = place + tl.where(place < H, H - 1 - iy[:, None], H + W - 2 - ix[:, None])
    logits = tl.gather(by_offset, tl.minimum(tl.maximum(offset, 0), 2 * REL - 1), 1)
    store_pixels(scratch + local_image_head * (H * W * (H + W)), pixel * (H + W), inside, logits, H + W, REL)


@triton.jit
def attend_forward(
    qkv, scratch, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, query tile). OUTSIDE is the logit of a slot beyond the map's edge; lse is
    [image_heads, 2, H W]: the largest logit and the logarithm of the sum over that, both in base 2."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    tiles: tl.constexpr = (H * W + BLOCK_M - 1) // BLOCK_M
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    k_base = q_base + HEADS * D
    v_base = qkv + image * STRIDE_B + 2 * HEADS * D + head * DV

    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < H * W
    q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
    slot = tl.arange(0, SLOTS)
    key_row = slot // KEY_COLS
    key_col = slot % KEY_COLS
    spread = one_hot(key_row, ROWS, q.dtype)
    row = tl.arange(0, ROWS)
    relative = scratch + local_image_head * (H * W * (H + W)) + pixel[:, None] * (H + W)
    depth = tl.arange(0, DV_PAD)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    keys = k_base + (key_row * STRIDE_H + key_col * STRIDE_W)[:, None] + tl.arange(0, D_PAD)[None, :]
    values = v_base + (key_row * STRIDE_H + key_col * STRIDE_W)[:, None] + depth[None, :]
    in_depth = (tl.arange(0, D_PAD) < D)[None, :]
    for x0 in range(0, W, KEY_COLS):
        jx = x0 + key_col
        on_map = inside[:, None] & (jx < W)[None, :]
        if RELATIVE:
            columns = tl.load(relative + H + jx[None, :], mask=on_map, other=OUTSIDE).to(tl.float32)
        else:
            columns = tl.where(on_map, 0.0, OUTSIDE)
        for y0 in range(0, H, KEY_ROWS):
            jy = y0 + key_row
            valid = (jx < W)[:, None]
            if H % KEY_ROWS != 0:
                valid = valid & (jy < H)[:, None]
            step = y0 * STRIDE_H + x0 * STRIDE_W
            k = tl.load(keys + step, mask=valid & in_depth, other=0.0)
            v = tl.load(values + step, mask=valid & (depth < DV)[None, :], other=0.0)
            s = tl.dot(q, tl.trans(k), columns, input_precision=PRECISION)
            if RELATIVE:
                rows = tl.load(
                    relative + (y0 + row)[None, :], mask=inside[:, None] & (y0 + row < H)[None, :], other=OUTSIDE
                )
                s = tl.dot(rows, spread, s, input_precision=PRECISION)
            elif H % KEY_ROWS != 0:
                s = tl.where((jy < H)[None, :], s, OUTSIDE)
            # a column of ones beside the values makes the same product sum the weights
            v = tl.where((depth == DV)[None, :], 1.0, v).to(v.dtype)
            new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
            p = tl.exp2(s * SCALE - new_peak[:, None])
            mixed = add_product(mixed * tl.exp2(peak - new_peak)[:, None], p.to(v.dtype), v, PRECISION, EXACT)
            peak = new_peak

    total = tl.sum(tl.where((depth == DV)[None, :], mixed, 0.0), 1)
    out_base = out + image * (H * W * HEADS * DV) + head * DV
    store_pixels(out_base, pixel * (HEADS * DV), inside, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + image_head * (2 * H * W) + pixel, peak, mask=inside)
    tl.store(lse + image_head * (2 * H * W) + H * W + pixel, tl.log2(total), mask=inside)


@triton.jit
def attend_backward_queries(
    qkv, scratch, out, lse, grad_out, grad_qkv, delta, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits, as float32 in grad_scratch
    (laid out as scratch). One program an (image, head, query tile). Leaves delta [heads in this launch, H W].
    COLS is KEY_COLS padded to what a matrix product takes.
    """
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    PIXELS: tl.constexpr = H * W
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    tiles: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    local_image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image_head = local_image_head + first_image_head
    head = (image_head % HEADS).to(tl.int32)
    image = image_head // HEADS
    q_base = qkv + image * STRIDE_B + head * D
    k_base = q_base + HEADS * D
    v_base = qkv + image * STRIDE_B + 2 * HEADS * D + head * DV
    out_offset = image * (PIXELS * HEADS * DV) + head * DV

    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pixel < PIXELS
    q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
    do = load_pixels(grad_out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
    o = load_pixels(out + out_offset, pixel * (HEADS * DV), inside, DV, DV_PAD)
    peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + local_image_head * PIXELS + pixel, row_delta, mask=inside)

    slot = tl.arange(0, SLOTS)
    key_row = slot // KEY_COLS
    key_col = slot % KEY_COLS
    spread_rows = one_hot(key_row, ROWS, q.dtype)
    gather_rows = tl.trans(spread_rows)
    gather_cols = tl.trans(one_hot(key_col, COLS, q.dtype))
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    places = local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
    less_delta = tl.zeros([BLOCK_M, SLOTS], tl.float32) - row_delta[:, None]

    grad_q = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for x0 in range(0, W, KEY_COLS):
        jx = x0 + key_col
        on_map = inside[:, None] & (jx < W)[None, :]
        if RELATIVE:
            columns = tl.load(scratch + places + H + jx[None, :], mask=on_map, other=OUTSIDE).to(tl.float32)
            grad_columns = tl.zeros([BLOCK_M, COLS], tl.float32)
        else:
            columns = tl.where(on_map, 0.0, OUTSIDE)
        for y0 in range(0, H, KEY_ROWS):
            jy = y0 + key_row
            valid = (jy < H) & (jx < W)
            place = jy * STRIDE_H + jx * STRIDE_W
            k = load_pixels(k_base, place, valid, D, D_PAD)
            v = load_pixels(v_base, place, valid, DV, DV_PAD)
            s = tl.dot(q, tl.trans(k), columns, input_precision=PRECISION)
            if RELATIVE:
                in_rows = inside[:, None] & (y0 + row < H)[None, :]
                rows = tl.load(scratch + places + (y0 + row)[None, :], mask=in_rows, other=OUTSIDE)
                s = tl.dot(rows, spread_rows, s, input_precision=PRECISION)
            elif H % KEY_ROWS != 0:
                s = tl.where((jy < H)[None, :], s, OUTSIDE)
            p = weigh(s, peak[:, None], log_total[:, None], SCALE, EXACT)
            ds = p * tl.dot(do, tl.trans(v), less_delta, input_precision=PRECISION)
            ds = ds.to(q.dtype)
            grad_q = add_product(grad_q, ds, k, PRECISION, EXACT)
            if RELATIVE:
                grad_columns = add_product(grad_columns, ds, gather_cols, PRECISION, EXACT)
                grad_rows = tl.dot(ds, gather_rows, input_precision=PRECISION)
                own = in_rows & (row < KEY_ROWS)[None, :]
                pointers = grad_scratch + places + (y0 + row)[None, :]
                if W > KEY_COLS:  # the row is met again in the next column of tiles, by the same threads
                    grad_rows += tl.load(pointers, mask=own & (x0 > 0), other=0.0)
                tl.store(pointers, grad_rows, mask=own)
        if RELATIVE:
            in_cols = inside[:, None] & ((col < KEY_COLS) & (x0 + col < W))[None, :]
            tl.store(grad_scratch + places + (H + x0 + col)[None, :], grad_columns, mask=in_cols)
    grad_base = grad_qkv + image * (PIXELS * GRAD_W) + head * D
    store_pixels(grad_base, pixel * GRAD_W, inside, grad_q * (SCALE * LN2), D, D_PAD)


@triton.jit
def relative_backward(
    qkv, tables, grad_qkv, grad_tables, grad_scratch, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, REL: tl.constexpr,
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
    vectors = load_tables(tables, head, H, W, D, D_PAD, REL, TABLES_PER_HEAD)
    grad_vectors = tl.zeros([2 * REL, D_PAD], tl.float32)
    offset = tl.arange(0, 2 * REL)
    of_row = (offset < 2 * H - 1)[None, :]
    for start in range(split * BLOCK_M, H * W, SPLITS * BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        iy = (pixel // W)[:, None]
        ix = (pixel % W)[:, None]
        inside = pixel < H * W
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
        by_place = load_pixels(grad_logits, pixel * (H + W), inside, H + W, REL)
        # the skew undone: by row and column -> by relative offset
        place = offset[None, :] + tl.where(of_row, iy - (H - 1), ix - (H + W - 2))
        exists = tl.where(of_row, (place >= 0) & (place < H), (place >= H) & (place < H + W))
        by_offset = tl.gather(by_place, tl.minimum(tl.maximum(place, 0), REL - 1), 1)
        by_offset = tl.where(exists, by_offset, 0.0).to(q.dtype)
        grad_q = tl.dot(by_offset, vectors, input_precision=PRECISION) * (SCALE * LN2)
        grad_q += load_pixels(grad_base, pixel * GRAD_W, inside, D, D_PAD).to(tl.float32)
        store_pixels(grad_base, pixel * GRAD_W, inside, grad_q, D, D_PAD)
        grad_vectors = add_product(grad_vectors, tl.trans(by_offset), q, PRECISION, EXACT)
    base = grad_tables + (image_head * SPLITS + split) * (LENGTH * D)
    store_pixels(base, offset * D, offset < LENGTH, grad_vectors * (SCALE * LN2), D, D_PAD)


@triton.jit
def attend_backward_keys(
    qkv, scratch, lse, grad_out, grad_qkv, delta, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    RELATIVE: tl.constexpr, OUTSIDE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program an (image, head, key tile); logits are [slots, queries] here.

    Of a query's relative logits only the KEY_ROWS + KEY_COLS of this tile are read, padded to WINDOW, and spread over
    the slots by one product. Slots beyond the map's edge need no mask: what they gather is not stored.
    """
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
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
    slot = tl.arange(0, SLOTS)
    key_row = slot // KEY_COLS
    key_col = slot % KEY_COLS
    jy = y0 + key_row
    jx = x0 + key_col
    valid = (jy < H) & (jx < W)
    k = load_pixels(k_base, jy * STRIDE_H + jx * STRIDE_W, valid, D, D_PAD)
    v = load_pixels(v_base, jy * STRIDE_H + jx * STRIDE_W, valid, DV, DV_PAD)
    if RELATIVE:
        spread = one_hot(key_row, WINDOW, k.dtype) + one_hot(KEY_ROWS + key_col, WINDOW, k.dtype)
        spread = tl.trans(spread)
        window = tl.arange(0, WINDOW)
        place = tl.where(window < KEY_ROWS, y0 + window, H + x0 + window - KEY_ROWS)
        exists = tl.where(window < KEY_ROWS, place < H, (window < KEY_ROWS + KEY_COLS) & (place < H + W))
    grad_k = tl.zeros([SLOTS, D_PAD], tl.float32)
    grad_v = tl.zeros([SLOTS, DV_PAD], tl.float32)
    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < PIXELS
        q = load_pixels(q_base, (pixel // W) * STRIDE_H + (pixel % W) * STRIDE_W, inside, D, D_PAD)
        do = load_pixels(do_base, pixel * (HEADS * DV), inside, DV, DV_PAD)
        peak, log_total = load_log_sum(lse + image_head * (2 * PIXELS), pixel, inside, PIXELS)
        row_delta = tl.load(delta + local_image_head * PIXELS + pixel, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if RELATIVE:
            base = scratch + local_image_head * (PIXELS * (H + W)) + pixel[:, None] * (H + W)
            relative = tl.load(base + place[None, :], mask=inside[:, None] & exists[None, :], other=0.0)
            s = tl.dot(spread, tl.trans(relative), s, input_precision=PRECISION)
        p = weigh(s, peak[None, :], log_total[None, :], SCALE, EXACT)
        grad_v = add_product(grad_v, p.to(v.dtype), do, PRECISION, EXACT)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(k.dtype)
        grad_k = add_product(grad_k, ds, q, PRECISION, EXACT)

    grad_base = grad_qkv + image * GRAD_B
    offset = (jy * W + jx) * GRAD_W
    store_pixels(grad_base + HEADS * D + head * D, offset, valid, grad_k * (SCALE * LN2), D, D_PAD)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, offset, valid, grad_v, DV, DV_PAD)
