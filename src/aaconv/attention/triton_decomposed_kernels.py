"""Fused attention with a bias of two parts, forward and backward: the Triton kernels alone.

The logit of query i for the key in row y and column x of a map is

    scale * q_i . k_yx + rows[i, y] + columns[i, x]

Keys are walked over in tiles of KEY_ROWS rows and KEY_COLS columns of the map. Down a strip of KEY_COLS columns the
columns' part of the logits stays the same, so it is loaded once and kept in registers. With one row a tile, the rows'
part is one number a query: it joins the largest logit in the exponent and costs nothing. LEADING keys before the map
(a class token) have no bias. Logits are in base 2. Heads of 80 or 96 channels are multiplied in two parts, MAIN and
TAIL, so that no product is padded to 128.

Sizes of maps and strides are arguments, not constants: another size does not compile anew.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_depth(base, offset, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, end, WHOLE: tl.constexpr):
    """[len(offset), WIDTH] of the channels from FIRST up to `end`; zero beyond, and where `valid` is false.

    WHOLE: all offsets are valid, and `end` is a constant.
    """
    depth = FIRST + tl.arange(0, WIDTH)
    pointers = base + offset[:, None] + depth[None, :]
    if WHOLE and end >= FIRST + WIDTH:
        found = tl.load(pointers)
    elif WHOLE:
        found = tl.load(pointers, mask=(depth < end)[None, :], other=0.0)
    else:
        found = tl.load(pointers, mask=valid[:, None] & (depth < end)[None, :], other=0.0)
    return found


@triton.jit
def store_depth(base, offset, valid, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, end):
    """The channels from FIRST on, up to `end`."""
    depth = FIRST + tl.arange(0, WIDTH)
    mask = valid[:, None] & (depth < end)[None, :]
    tl.store(base + offset[:, None] + depth[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def key_places(y0, strip, height, width, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, LEADING: tl.constexpr):
    """The keys of a tile, int32 [KEY_ROWS * KEY_COLS], and which of them exist."""
    slot = tl.arange(0, KEY_ROWS * KEY_COLS)
    y, x = y0 + slot // KEY_COLS, strip * KEY_COLS + slot % KEY_COLS
    return LEADING + y * width + x, (y < height) & (x < width)


@triton.jit
def load_columns(columns, query, stride, strip, width, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS * KEY_COLS] in base 2: the columns' part of the logits, -inf beyond the map."""
    x = strip * KEY_COLS + tl.arange(0, KEY_COLS)
    found = tl.load(columns + query[:, None] * stride + x[None, :], mask=(x < width)[None, :], other=float("-inf"))
    found = found.to(tl.float32) * LOG2E
    if KEY_ROWS > 1:
        QUERIES: tl.constexpr = query.shape[0]
        found = tl.broadcast_to(found[:, None, :], [QUERIES, KEY_ROWS, KEY_COLS])
        found = tl.reshape(found, [QUERIES, KEY_ROWS * KEY_COLS])
    return found


@triton.jit
def load_rows(rows, query, stride, y0, height, KEY_ROWS: tl.constexpr):
    """The rows' part of a tile's logits in base 2: [queries] of its one row, or [queries, KEY_ROWS], -inf beyond."""
    if KEY_ROWS == 1:
        # Masked for the row after the last, which is loaded ahead and not used.
        y = query * 0 + y0
        found = tl.load(rows + query * stride + y, mask=y < height, other=0.0)
    else:
        y = y0 + tl.arange(0, KEY_ROWS)
        found = tl.load(rows + query[:, None] * stride + y[None, :], mask=(y < height)[None, :], other=float("-inf"))
    return found.to(tl.float32) * LOG2E


@triton.jit
def over_columns(rows, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS] -> [queries, KEY_ROWS * KEY_COLS], each the same for the columns of its row."""
    QUERIES: tl.constexpr = rows.shape[0]
    return tl.reshape(tl.broadcast_to(rows[:, :, None], [QUERIES, KEY_ROWS, KEY_COLS]), [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def weigh_tile(logits, v, v_tail, peak, total, mixed, mixed_tail, offset, TAIL: tl.constexpr):
    """One step of the online softmax: the values under exp2(logits + offset), with what came before."""
    new_peak = tl.maximum(peak, tl.max(logits, 1) + offset)
    p = tl.exp2(logits + (offset - new_peak)[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(p, 1)
    p = p.to(v.dtype)
    mixed = tl.dot(p, v, mixed * fade[:, None])
    if TAIL > 0:
        mixed_tail = tl.dot(p, v_tail, mixed_tail * fade[:, None])
    return new_peak, total, mixed, mixed_tail


@triton.jit
def attend_decomposed_forward(
    q, k, v, rows, columns, out, lse,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, rows_n, columns_n,
    heads, queries, height, width, scale,
    LEADING: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    DV: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, BLOCK_M queries). rows [images * heads, queries, rows_n] and columns alike. lse
    [images * heads, 2, queries], in base 2: the largest logit, and the logarithm of the sum over it. WHOLE: every tile
    of keys is full."""
    tiles = tl.cdiv(queries, BLOCK_M)
    image_head = (tl.program_id(0) // tiles).to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image, head = image_head // heads, image_head % heads
    place = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = place < queries
    query = tl.minimum(place, queries - 1)
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    rows += image_head * queries * rows_n
    columns += image_head * queries * columns_n
    scale = scale * LOG2E
    q_main = load_depth(q, query * q_n, exists, 0, MAIN, D, True)
    q_tail = load_depth(q, query * q_n, exists, MAIN, TAIL, D, True) if TAIL > 0 else q_main

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, V_MAIN], tl.float32)
    mixed_tail = tl.zeros([BLOCK_M, V_TAIL], tl.float32) if V_TAIL > 0 else mixed
    if LEADING > 0:
        # Names of their own: a variable of the loop below must not have another shape before it.
        lead = tl.arange(0, LEAD)
        is_lead = lead < LEADING
        lead_logits = tl.dot(q_main, tl.trans(load_depth(k, lead * k_n, is_lead, 0, MAIN, D, False)))
        if TAIL > 0:
            lead_k = load_depth(k, lead * k_n, is_lead, MAIN, TAIL, D, False)
            lead_logits = tl.dot(q_tail, tl.trans(lead_k), lead_logits)
        lead_logits = tl.where(is_lead[None, :], lead_logits * scale, float("-inf"))
        lead_v = load_depth(v, lead * v_n, is_lead, 0, V_MAIN, DV, False)
        lead_v_tail = load_depth(v, lead * v_n, is_lead, V_MAIN, V_TAIL, DV, False) if V_TAIL > 0 else lead_v
        no_offset = tl.zeros([BLOCK_M], tl.float32)
        peak, total, mixed, mixed_tail = weigh_tile(
            lead_logits, lead_v, lead_v_tail, peak, total, mixed, mixed_tail, no_offset, V_TAIL
        )
    for strip in range(tl.cdiv(width, KEY_COLS)):
        by_column = load_columns(columns, query, columns_n, strip, width, KEY_ROWS, KEY_COLS)
        by_row = load_rows(rows, query, rows_n, 0, height, KEY_ROWS)
        for y0 in range(0, height, KEY_ROWS):
            key, there = key_places(y0, strip, height, width, KEY_ROWS, KEY_COLS, LEADING)
            k_main = load_depth(k, key * k_n, there, 0, MAIN, D, WHOLE)
            logits = tl.dot(q_main, tl.trans(k_main))
            if TAIL > 0:
                k_tail = load_depth(k, key * k_n, there, MAIN, TAIL, D, WHOLE)
                logits = tl.dot(q_tail, tl.trans(k_tail), logits)
            v_main = load_depth(v, key * v_n, there, 0, V_MAIN, DV, WHOLE)
            v_tail = load_depth(v, key * v_n, there, V_MAIN, V_TAIL, DV, WHOLE) if V_TAIL > 0 else v_main
            logits = logits * scale + by_column
            if KEY_ROWS == 1:
                offset = by_row
            else:
                logits += over_columns(by_row, KEY_ROWS, KEY_COLS)
                offset = tl.zeros([BLOCK_M], tl.float32)
            by_row = load_rows(rows, query, rows_n, y0 + KEY_ROWS, height, KEY_ROWS)
            peak, total, mixed, mixed_tail = weigh_tile(
                logits, v_main, v_tail, peak, total, mixed, mixed_tail, offset, V_TAIL
            )
    out += image * o_b + head * o_h
    store_depth(out, query * o_n, exists, mixed / total[:, None], 0, V_MAIN, DV)
    if V_TAIL > 0:
        store_depth(out, query * o_n, exists, mixed_tail / total[:, None], V_MAIN, V_TAIL, DV)
    lse += image_head * (2 * queries) + query
    tl.store(lse, peak, mask=exists)
    tl.store(lse + queries, tl.log2(total), mask=exists)


@triton.jit
def attend_decomposed_backward_queries(
    q, k, v, rows, columns, out, lse, grad_out, grad_q, grad_rows, grad_columns, delta,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    rows_n, columns_n, heads, queries, height, width, scale, of_a_strip,
    LEADING: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    DV: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, rows and columns; leaves delta = grad_out . out [images * heads, queries] for the keys'
    kernel. One program an (image, head, BLOCK_M queries). grad_rows has a part for every strip, of_a_strip numbers."""
    tiles = tl.cdiv(queries, BLOCK_M)
    image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = image_head // heads, image_head % heads
    place = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = place < queries
    query = tl.minimum(place, queries - 1)
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    out += image * o_b + head * o_h
    grad_out += image * g_b + head * g_h
    rows += image_head * queries * rows_n
    columns += image_head * queries * columns_n
    grad_rows += image_head * queries * rows_n
    grad_columns += image_head * queries * columns_n
    logit_scale = scale * LOG2E
    q_main = load_depth(q, query * q_n, exists, 0, MAIN, D, True)
    q_tail = load_depth(q, query * q_n, exists, MAIN, TAIL, D, True) if TAIL > 0 else q_main
    do_main = load_depth(grad_out, query * g_n, exists, 0, V_MAIN, DV, True)
    o_main = load_depth(out, query * o_n, exists, 0, V_MAIN, DV, True)
    dots = tl.sum(do_main.to(tl.float32) * o_main.to(tl.float32), 1)
    do_tail = do_main
    if V_TAIL > 0:
        do_tail = load_depth(grad_out, query * g_n, exists, V_MAIN, V_TAIL, DV, True)
        o_tail = load_depth(out, query * o_n, exists, V_MAIN, V_TAIL, DV, True)
        dots += tl.sum(do_tail.to(tl.float32) * o_tail.to(tl.float32), 1)
    tl.store(delta + image_head * queries + query, dots, mask=exists)
    lse += image_head * (2 * queries) + query
    peak = tl.load(lse) + tl.load(lse + queries)

    dq_main = tl.zeros([BLOCK_M, MAIN], tl.float32)
    dq_tail = tl.zeros([BLOCK_M, TAIL], tl.float32) if TAIL > 0 else dq_main
    if LEADING > 0:
        lead = tl.arange(0, LEAD)
        is_lead = lead < LEADING
        lead_k = load_depth(k, lead * k_n, is_lead, 0, MAIN, D, False)
        lead_k_tail = load_depth(k, lead * k_n, is_lead, MAIN, TAIL, D, False) if TAIL > 0 else lead_k
        lead_logits = tl.dot(q_main, tl.trans(lead_k))
        lead_grads = tl.dot(do_main, tl.trans(load_depth(v, lead * v_n, is_lead, 0, V_MAIN, DV, False)))
        if TAIL > 0:
            lead_logits = tl.dot(q_tail, tl.trans(lead_k_tail), lead_logits)
        if V_TAIL > 0:
            lead_v_tail = load_depth(v, lead * v_n, is_lead, V_MAIN, V_TAIL, DV, False)
            lead_grads = tl.dot(do_tail, tl.trans(lead_v_tail), lead_grads)
        lead_p = tl.exp2(tl.where(is_lead[None, :], lead_logits * logit_scale, float("-inf")) - peak[:, None])
        lead_ds = (lead_p * (lead_grads - dots[:, None])).to(q_main.dtype)
        dq_main = tl.dot(lead_ds, lead_k, dq_main)
        if TAIL > 0:
            dq_tail = tl.dot(lead_ds, lead_k_tail, dq_tail)
    for strip in range(tl.cdiv(width, KEY_COLS)):
        by_column = load_columns(columns, query, columns_n, strip, width, KEY_ROWS, KEY_COLS)
        by_row = load_rows(rows, query, rows_n, 0, height, KEY_ROWS)
        column_grads = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
        for y0 in range(0, height, KEY_ROWS):
            key, there = key_places(y0, strip, height, width, KEY_ROWS, KEY_COLS, LEADING)
            k_main = load_depth(k, key * k_n, there, 0, MAIN, D, WHOLE)
            v_main = load_depth(v, key * v_n, there, 0, V_MAIN, DV, WHOLE)
            logits = tl.dot(q_main, tl.trans(k_main))
            grads = tl.dot(do_main, tl.trans(v_main))
            if TAIL > 0:
                k_tail = load_depth(k, key * k_n, there, MAIN, TAIL, D, WHOLE)
                logits = tl.dot(q_tail, tl.trans(k_tail), logits)
            if V_TAIL > 0:
                v_tail = load_depth(v, key * v_n, there, V_MAIN, V_TAIL, DV, WHOLE)
                grads = tl.dot(do_tail, tl.trans(v_tail), grads)
            logits = logits * logit_scale + by_column
            if KEY_ROWS == 1:
                p = tl.exp2(logits + (by_row - peak)[:, None])
            else:
                p = tl.exp2(logits + over_columns(by_row - peak[:, None], KEY_ROWS, KEY_COLS))
            by_row = load_rows(rows, query, rows_n, y0 + KEY_ROWS, height, KEY_ROWS)
            ds = p * (grads - dots[:, None])
            if KEY_ROWS == 1:
                column_grads += ds
                tl.store(grad_rows + strip * of_a_strip + query * rows_n + y0, tl.sum(ds, 1), mask=exists)
            else:
                by_place = tl.reshape(ds, [BLOCK_M, KEY_ROWS, KEY_COLS])
                column_grads += tl.sum(by_place, 1)
                y = y0 + tl.arange(0, KEY_ROWS)
                tl.store(
                    grad_rows + strip * of_a_strip + query[:, None] * rows_n + y[None, :], tl.sum(by_place, 2),
                    mask=exists[:, None] & (y < height)[None, :],
                )  # fmt: skip
            ds = ds.to(q_main.dtype)
            dq_main = tl.dot(ds, k_main, dq_main)
            if TAIL > 0:
                dq_tail = tl.dot(ds, k_tail, dq_tail)
        x = strip * KEY_COLS + tl.arange(0, KEY_COLS)
        tl.store(
            grad_columns + query[:, None] * columns_n + x[None, :], column_grads,
            mask=exists[:, None] & (x < width)[None, :],
        )  # fmt: skip
    grad_q += image * dq_b + head * dq_h
    store_depth(grad_q, query * dq_n, exists, dq_main * scale, 0, MAIN, D)
    if TAIL > 0:
        store_depth(grad_q, query * dq_n, exists, dq_tail * scale, MAIN, TAIL, D)


@triton.jit
def attend_decomposed_backward_keys(
    q, k, v, rows, columns, lse, delta, grad_out, grad_k, grad_v,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    rows_n, columns_n, heads, queries, height, width, scale,
    LEADING: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    DV: tl.constexpr, V_MAIN: tl.constexpr, V_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program an (image, head, tile of keys), and one more for the LEADING keys; the
    logits are [keys, queries] here."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    strips = tl.cdiv(width, KEY_COLS)
    on_map = tl.cdiv(height, KEY_ROWS) * strips
    tiles = on_map + (1 if LEADING > 0 else 0)
    image_head = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = image_head // heads, image_head % heads
    tile = tl.program_id(0) % tiles
    strip, y0 = tile % strips, tile // strips * KEY_ROWS
    key, there = key_places(y0, strip, height, width, KEY_ROWS, KEY_COLS, LEADING)
    leading = tile >= on_map  # never without LEADING keys
    if LEADING > 0:
        slot = tl.arange(0, SLOTS)
        key = tl.where(leading, slot, key)
        there = tl.where(leading, slot < LEADING, there)
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    grad_out += image * g_b + head * g_h
    rows += image_head * queries * rows_n
    columns += image_head * queries * columns_n
    lse += image_head * (2 * queries)
    delta += image_head * queries
    logit_scale = scale * LOG2E
    k_main = load_depth(k, key * k_n, there, 0, MAIN, D, False)
    k_tail = load_depth(k, key * k_n, there, MAIN, TAIL, D, False) if TAIL > 0 else k_main
    v_main = load_depth(v, key * v_n, there, 0, V_MAIN, DV, False)
    v_tail = load_depth(v, key * v_n, there, V_MAIN, V_TAIL, DV, False) if V_TAIL > 0 else v_main
    dk_main = tl.zeros([SLOTS, MAIN], tl.float32)
    dk_tail = tl.zeros([SLOTS, TAIL], tl.float32) if TAIL > 0 else dk_main
    dv_main = tl.zeros([SLOTS, V_MAIN], tl.float32)
    dv_tail = tl.zeros([SLOTS, V_TAIL], tl.float32) if V_TAIL > 0 else dv_main
    x = strip * KEY_COLS + tl.arange(0, KEY_COLS)
    y = y0 + tl.arange(0, KEY_ROWS)
    x, y = tl.minimum(x, width - 1), tl.minimum(y, height - 1)
    if KEY_ROWS == 1:
        row = tl.minimum(y0, height - 1)
        by_row = tl.load(rows + tl.minimum(tl.arange(0, BLOCK_M), queries - 1) * rows_n + row)
    for start in range(0, queries, BLOCK_M):
        place = start + tl.arange(0, BLOCK_M)
        exists = place < queries
        query = tl.minimum(place, queries - 1)
        by_column = tl.load(columns + query[None, :] * columns_n + x[:, None]).to(tl.float32)
        if KEY_ROWS == 1:
            bias = by_column + by_row.to(tl.float32)[None, :]
            # The next ones already: triton prefetches only what it can copy four bytes at a time.
            by_row = tl.load(rows + tl.minimum(query + BLOCK_M, queries - 1) * rows_n + row)
        else:
            by_row = tl.load(rows + query[None, :] * rows_n + y[:, None]).to(tl.float32)
            bias = tl.reshape(by_row[:, None, :] + by_column[None, :, :], [SLOTS, BLOCK_M])
        if LEADING > 0:
            bias = tl.where(leading, 0.0, bias)
        peak = tl.load(lse + query, mask=exists, other=float("inf")) + tl.load(lse + queries + query)
        dots = tl.load(delta + query)
        q_main = load_depth(q, query * q_n, exists, 0, MAIN, D, True)
        do_main = load_depth(grad_out, query * g_n, exists, 0, V_MAIN, DV, True)
        logits = tl.dot(k_main, tl.trans(q_main))
        grads = tl.dot(v_main, tl.trans(do_main))
        if TAIL > 0:
            q_tail = load_depth(q, query * q_n, exists, MAIN, TAIL, D, True)
            logits = tl.dot(k_tail, tl.trans(q_tail), logits)
        if V_TAIL > 0:
            do_tail = load_depth(grad_out, query * g_n, exists, V_MAIN, V_TAIL, DV, True)
            grads = tl.dot(v_tail, tl.trans(do_tail), grads)
        # Slots beyond the map get a weight, and a gradient that nobody stores.
        p = tl.exp2(logits * logit_scale + (bias * LOG2E - peak[None, :]))
        ds = (p * (grads - dots[None, :])).to(q_main.dtype)
        p = p.to(q_main.dtype)
        dv_main = tl.dot(p, do_main, dv_main)
        dk_main = tl.dot(ds, q_main, dk_main)
        if V_TAIL > 0:
            dv_tail = tl.dot(p, do_tail, dv_tail)
        if TAIL > 0:
            dk_tail = tl.dot(ds, q_tail, dk_tail)
    grad_k += image * dk_b + head * dk_h
    grad_v += image * dv_b + head * dv_h
    store_depth(grad_k, key * dk_n, there, dk_main * scale, 0, MAIN, D)
    store_depth(grad_v, key * dv_n, there, dv_main, 0, V_MAIN, DV)
    if TAIL > 0:
        store_depth(grad_k, key * dk_n, there, dk_tail * scale, MAIN, TAIL, D)
    if V_TAIL > 0:
        store_depth(grad_v, key * dv_n, there, dv_tail, V_MAIN, V_TAIL, DV)
