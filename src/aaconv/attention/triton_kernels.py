"""Fused 2-D relative attention, forward and backward: the Triton kernels alone.

They read what `pack` has laid out (see triton_pack). A product of depth 16 or 32 gives q k + rows with the map's edge
in it, and cols is what it accumulates onto: it stays the same down a strip. The ones beside the values sum the weights
in the forward, and take off do . o in the backward. No mask, no unaligned load, no arithmetic on a logit but its
exponential: in half precision what is taken off a logit is in the product, and so is the scale log2(e) / sqrt(D), the
exponential being in base 2 (KEY_SCALE in `pack`). In float32 SCALE holds it, and both enter with the exponential.
"""

import triton
import triton.language as tl

from .triton_pack import (  # noqa: F401  pack: so that all kernels are found here
    find_head,
    let_the_next_begin,
    load_columns,
    load_pixels,
    load_rows,
    load_slots,
    load_tile,
    pack,
    store_pixels,
    wait_for_the_last,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """total + a b. In float32 the product is summed apart: one long chain of additions would lose digits."""
    if EXACT:
        # max_num_imprecise_acc has no meaning for float32, but without it triton turns this into the chain after all
        return total + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def weigh(s, lse, pixel, valid, PIXELS: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, AXIS: tl.constexpr):
    """The weights of logits s, which have the log-sum-exp in them. Not in float32: there its two parts are taken off
    one by one, because their sum would round them."""
    if EXACT:
        peak = tl.expand_dims(tl.load(lse + pixel, mask=valid, other=float("inf")), AXIS)
        s = (s * SCALE - peak) - tl.expand_dims(tl.load(lse + PIXELS + pixel, mask=valid, other=0.0), AXIS)
    return tl.exp2(s)


@triton.jit
def multiply(a, b, EXACT: tl.constexpr):
    """a b. In float32 rounded at once: fused with an addition that two threads do, each with its own part first, it
    would give the two other sums of the same numbers, and only one of these is kept."""
    return tl.fma(a, b, 0.0) if EXACT else a * b


@triton.jit
def mix_values(
    q, queries, keys, values, pixel, inside, peak,
    H: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, STRIPS: tl.constexpr, VALUES: tl.constexpr,
    ONES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, DV_PAD: tl.constexpr,
    FIRST_KEYS: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, DV_PAD]: the values under weights exp2(logit - peak), not yet divided by their sum, that sum, the peak.
    ONLINE follows the largest logit from tile to tile, which is always safe and takes twice the instructions."""
    SLOTS: tl.constexpr = KEY_ROWS * KEY_COLS
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL + strip * KEY_COLS, pixel, inside,
            STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE, RELATIVE,
        )  # fmt: skip
        if FIRST_KEYS and not ONLINE:
            columns -= peak[:, None]
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail, k = load_tile(keys, first, SLOTS, MAIN, TAIL)
            v = load_slots(values + first * VALUES, SLOTS, VALUES, DV_PAD)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = add_product(columns, q_tail, tl.trans(k_tail), PRECISION, EXACT)
            if MAIN > 0:
                s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
            if ONLINE:
                new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
                fade = tl.exp2(peak - new_peak)
                mixed *= fade[:, None]
                total *= fade  # nothing yet with ONES
                peak = new_peak
            p = tl.exp2(s * SCALE - peak[:, None]) if ONLINE else tl.exp2(s)
            mixed = add_product(mixed, p.to(v.dtype), v, PRECISION, EXACT)
            if not ONES:
                total += tl.sum(p, 1)
    if ONES:  # then the sum stands beside the mixed values
        total = tl.sum(tl.where((tl.arange(0, DV_PAD) == DV)[None, :], mixed, 0.0), 1)
    return mixed, total, peak


@triton.jit(do_not_specialize=["first_image_head"])
def attend_forward(
    qkv, queries, keys, values, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, ONES: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, FIRST_KEYS: tl.constexpr, SMALLEST_SUM: tl.constexpr, LARGEST_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, DV_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, query tile). lse is [image_heads, 2, H W]: what is taken off the logits and the
    logarithm of the sum over that, both in base 2.

    Softmax is the same whatever is taken off the logits, as long as nothing overflows or vanishes. In bfloat16, which
    has float32's range, that may be nothing. float16 has not: with FIRST_KEYS the largest logit of the first keys is
    taken off, in the products from the start. A sum that comes out too large or too small is done again, online.
    Not in float32, where what is left of a logit should be small, so that no digit of it is lost: online at once.
    """
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
    q = pixel  # unused
    if MAIN > 0:
        q = load_pixels(qkv + image * STRIDE_B + head * D, pixel * STRIDE_P, inside, D, MAIN)

    wait_for_the_last(OVERLAP)  # for `pack`
    if FIRST_KEYS:
        q_tail = load_rows(queries, pixel, inside, STRIDE, TAIL, WHOLE)
        k_tail, k = load_tile(keys, 0, KEY_COLS, MAIN, TAIL)
        s = load_columns(queries + GROUPS * TAIL, pixel, inside, STRIDE, BLOCK_M, 1, KEY_COLS, WHOLE, RELATIVE)
        s = add_product(s, q_tail, tl.trans(k_tail), PRECISION, EXACT)
        if MAIN > 0:
            s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        peak = tl.max(s, 1)
    else:
        peak = tl.full([BLOCK_M], float("-inf") if EXACT else 0.0, tl.float32)
    mixed, total, peak = mix_values(
        q, queries, keys, values, pixel, inside, peak, H, DV, MAIN, TAIL, GROUP, GROUPS, STRIDE, ROWS, STRIPS, VALUES,
        ONES, RELATIVE, SCALE, EXACT, PRECISION, WHOLE, BLOCK_M, KEY_ROWS, KEY_COLS, DV_PAD, FIRST_KEYS, EXACT,
    )  # fmt: skip
    if not EXACT:
        well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
        if tl.min(well.to(tl.int32), 0) == 0:  # also if it is not a number
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            mixed, total, peak = mix_values(
                q, queries, keys, values, pixel, inside, peak, H, DV, MAIN, TAIL, GROUP, GROUPS, STRIDE, ROWS, STRIPS,
                VALUES, ONES, RELATIVE, SCALE, EXACT, PRECISION, WHOLE, BLOCK_M, KEY_ROWS, KEY_COLS, DV_PAD,
                False, True,
            )  # fmt: skip

    out_base = out + image * (PIXELS * HEADS * DV) + head * DV
    # In float32 divided as IEEE has it: triton's own division may be two units off, as many as all the rest.
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], mixed.shape)) if EXACT else mixed / total[:, None]
    store_pixels(out_base, pixel * (HEADS * DV), inside, result, DV, DV_PAD)
    tl.store(lse + image_head * (2 * PIXELS) + pixel, peak, mask=inside)
    tl.store(lse + image_head * (2 * PIXELS) + PIXELS + pixel, tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["first_image_head"])
def attend_backward_queries(
    qkv, queries, keys, values, out, lse, grad_out, grad_qkv, grads, grad_logits, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, VALUES: tl.constexpr, ONES: tl.constexpr, DELTAS: tl.constexpr, RELATIVE: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr,
    KEY_COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, without the relative part, and of their relative logits in grad_logits
    [heads in this launch, H W, COLUMNS + STRIPS * ROWS], the rows' in one part a strip. One program an (image, head,
    query tile). Leaves in grads [heads in this launch, H W, VALUES] do | -(do . o) in two parts | 0, which the keys'
    kernel reads; without ONES the two parts follow a head's [H W, VALUES], in DELTAS numbers."""
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
    lse += image_head * (2 * PIXELS)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)[:, None]
    rounded = delta.to(do.dtype)
    rest = (rounded.to(tl.float32) - delta).to(do.dtype)
    grads += local_image_head * (PIXELS * VALUES + DELTAS)
    if ONES:
        depth = tl.arange(0, VALUES)[None, :]
        do = tl.where(depth == DV, -rounded, do)
        do = tl.where(depth == DV + 1, rest, do)
    else:
        deltas = grads + PIXELS * VALUES + pixel[:, None]
        tl.store(deltas, -rounded, mask=inside[:, None])
        tl.store(deltas + DELTAS // 2, rest, mask=inside[:, None])
    store_pixels(grads, pixel * VALUES, inside, do, VALUES, VALUES)

    col = tl.arange(0, KEY_COLS)
    row = tl.arange(0, TAIL) - ROWS_AT
    grad_logits += local_image_head * (PIXELS * (COLUMNS + STRIPS * ROWS))
    grad_columns_at = grad_logits + pixel[:, None] * (COLUMNS + STRIPS * ROWS) + col[None, :]
    grad_rows_at = grad_logits + pixel[:, None] * (COLUMNS + STRIPS * ROWS) + (COLUMNS + row)[None, :]
    is_row = inside[:, None] & ((row >= 0) & (row < GROUP))[None, :]
    tail_grad = tl.zeros([BLOCK_M, TAIL], tl.float32)
    if MAIN > 0:
        q_base = qkv + image * STRIDE_B + head * D
        q = load_pixels(q_base, pixel * STRIDE_P, inside, D, MAIN)
        main_grad = tl.zeros([BLOCK_M, MAIN], tl.float32)
    wait_for_the_last(OVERLAP)  # for `pack`, which began when all before it had ended: so what is above is safe
    let_the_next_begin(OVERLAP)
    for strip in range(STRIPS):
        columns = load_columns(
            queries + GROUPS * TAIL + strip * KEY_COLS, pixel, inside,
            STRIDE, BLOCK_M, KEY_ROWS, KEY_COLS, WHOLE, RELATIVE,
        )  # fmt: skip
        grad_columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
        for y0 in range(0, H, KEY_ROWS):
            first = (strip * ROWS + y0) * KEY_COLS
            k_tail, k = load_tile(keys, first, SLOTS, MAIN, TAIL)
            v = load_slots(values + first * VALUES, SLOTS, VALUES, VALUES)
            q_tail = load_rows(queries + (y0 // GROUP) * TAIL, pixel, inside, STRIDE, TAIL, WHOLE)
            s = add_product(columns, q_tail, tl.trans(k_tail), PRECISION, EXACT)
            if MAIN > 0:
                s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
            p = weigh(s, lse, pixel, inside, PIXELS, SCALE, EXACT, 1)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            ds = multiply(p, dp if ONES else dp - delta, EXACT)
            if RELATIVE:
                grad_columns += tl.sum(tl.reshape(ds, [BLOCK_M, KEY_ROWS, KEY_COLS]), 1)
            ds = ds.to(v.dtype)
            if MAIN > 0:
                main_grad = add_product(main_grad, ds, k, PRECISION, EXACT)
            tail_grad = add_product(tail_grad, ds, k_tail, PRECISION, EXACT)
            if RELATIVE and ((y0 + KEY_ROWS) % GROUP == 0 or y0 + KEY_ROWS >= H):  # the last rows of their group
                tl.store(grad_rows_at + (strip * ROWS + y0 // GROUP * GROUP), tail_grad, mask=is_row)
                tail_grad = tl.where((row >= 0)[None, :], 0.0, tail_grad)
        if RELATIVE:
            tl.store(grad_columns_at + strip * KEY_COLS, grad_columns, mask=inside[:, None])
    grad_base = grad_qkv + image * (PIXELS * GRAD_W) + head * D
    if MAIN > 0:
        store_pixels(grad_base, pixel * GRAD_W, inside, main_grad * (SCALE * LN2), MAIN, MAIN)
    store_pixels(grad_base + MAIN, pixel * GRAD_W, inside, tail_grad * (SCALE * LN2), D - MAIN, TAIL)


@triton.jit
def load_tables(
    rel_h, rel_w, head, offset, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """[offsets, D_PAD]: these of the 2H - 1 relative vectors of the rows and, after them, the 2W - 1 of the columns."""
    of_row = offset < 2 * H - 1
    if TABLES_PER_HEAD:
        rel_h += head * ((2 * H - 1) * D)
        rel_w += head * ((2 * W - 1) * D)
    of_column = (offset >= 2 * H - 1) & (offset < 2 * H + 2 * W - 2)
    vectors = load_pixels(rel_h, offset * D, of_row, D, D_PAD)
    return vectors + load_pixels(rel_w, (offset - (2 * H - 1)) * D, of_column, D, D_PAD)


@triton.jit(do_not_specialize=["first_image_head"])
def relative_backward(
    qkv, rel_h, rel_w, grad_qkv, grad_tables, grad_logits, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, OFFSETS: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """grad_logits into the gradients of the queries (added to what is there) and of the tables. One program an
    (image, head, split): it walks over its query tiles and owns its slice of grad_tables
    [image_heads, SPLITS, 2H + 2W - 2, D], so no atomics and one result every time. It does so once for every OFFSETS of
    the tables' vectors: more have no room in its registers.
    """
    LENGTH: tl.constexpr = 2 * H + 2 * W - 2
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    ROWS: tl.constexpr = (H + GROUP - 1) // GROUP * GROUP
    split = tl.program_id(0) % SPLITS
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // SPLITS, first_image_head, HEADS)
    grad_base = grad_qkv + image * (H * W * GRAD_W) + head * D
    grad_logits += local_image_head * (H * W * (COLUMNS + STRIPS * ROWS))
    places = tl.arange(0, PLACES)[None, :]
    for first in range(0, LENGTH, OFFSETS):
        offset = first + tl.arange(0, OFFSETS)
        of_row = (offset < 2 * H - 1)[None, :]
        vectors = load_tables(rel_h, rel_w, head, offset, H, W, D, D_PAD, TABLES_PER_HEAD).to(qkv.dtype.element_ty)
        grad_vectors = tl.zeros([OFFSETS, D_PAD], tl.float32)
        for start in range(split * BLOCK_M, H * W, SPLITS * BLOCK_M):
            pixel = start + tl.arange(0, BLOCK_M)
            iy = (pixel // W)[:, None]
            ix = (pixel % W)[:, None]
            inside = pixel < H * W
            q = load_pixels(qkv + image * STRIDE_B + head * D, pixel * STRIDE_P, inside, D, D_PAD)
            exists = inside[:, None] & (places < COLUMNS + ROWS)
            pointers = grad_logits + pixel[:, None] * (COLUMNS + STRIPS * ROWS) + places
            by_place = tl.load(pointers, mask=exists, other=0.0)
            for strip in tl.static_range(1, STRIPS):
                rows = tl.load(pointers + strip * ROWS, mask=exists & (places >= COLUMNS), other=0.0)
                by_place = (by_place.to(tl.float32) + rows.to(tl.float32)).to(q.dtype)
            # the skew undone: by column and row -> by relative offset
            place = offset[None, :] + tl.where(of_row, iy - (H - 1), ix - (2 * H + W - 2))
            exists = place.to(tl.uint32, bitcast=True) < tl.where(of_row, H, W).to(tl.uint32)
            by_offset = tl.gather(by_place, (place + tl.where(of_row, COLUMNS, 0)) & (PLACES - 1), 1)
            by_offset = tl.where(exists, by_offset, 0.0).to(q.dtype)
            grad_q = tl.dot(by_offset, vectors, input_precision=PRECISION) * LOGIT_SCALE
            grad_q += load_pixels(grad_base, pixel * GRAD_W, inside, D, D_PAD).to(tl.float32)
            store_pixels(grad_base, pixel * GRAD_W, inside, grad_q, D, D_PAD)
            grad_vectors = add_product(grad_vectors, tl.trans(by_offset), q, PRECISION, EXACT)
        base = grad_tables + (image_head * SPLITS + split) * (LENGTH * D)
        store_pixels(base, offset * D, offset < LENGTH, grad_vectors * LOGIT_SCALE, D, D_PAD)
        if LENGTH > OFFSETS:
            tl.debug_barrier()  # the next offsets are added to what other threads have stored
    # It needs nothing of the keys' kernel, and runs beside it: that has waited for what this one reads, of which no
    # older copy is left, `pack` having begun anew. But who waits for this kernel means them both.
    wait_for_the_last(OVERLAP)


@triton.jit(do_not_specialize=["first_image_head"])
def attend_backward_keys(
    qkv, queries, keys, values, lse, grad_qkv, grads, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUES: tl.constexpr, ONES: tl.constexpr, DELTAS: tl.constexpr, RELATIVE: tl.constexpr, SCALE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, DV_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. One program an (image, head, key tile); logits are [slots, queries] here."""
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

    wait_for_the_last(OVERLAP)  # for the queries' kernel
    # Only now: `relative_backward` counts on the queries' kernel having ended. The last kernel lets nobody in.
    let_the_next_begin(OVERLAP and RELATIVE)
    slot = tl.arange(0, SLOTS)
    first = (local_image_head * STRIPS + strip) * (ROWS * KEY_COLS) + y0 * KEY_COLS
    keys += first * (MAIN + TAIL)
    k_tail = load_slots(keys + MAIN, SLOTS, MAIN + TAIL, TAIL)
    v = load_slots(values + first * VALUES, SLOTS, VALUES, VALUES)
    tails = queries + local_image_head * (PIXELS * STRIDE) + (y0 // GROUP) * TAIL
    columns = queries + local_image_head * (PIXELS * STRIDE) + GROUPS * TAIL + strip * KEY_COLS
    grads += local_image_head * (PIXELS * VALUES + DELTAS)
    tail_grad = tl.zeros([SLOTS, TAIL], tl.float32)
    value_grad = tl.zeros([SLOTS, DV_PAD], tl.float32)
    lse += image_head * (2 * PIXELS)
    if MAIN > 0:
        k = load_slots(keys, SLOTS, MAIN + TAIL, MAIN)
        q_base = qkv + image * STRIDE_B + head * D
        main_grad = tl.zeros([SLOTS, MAIN], tl.float32)
    if RELATIVE:
        pixel = tl.arange(0, BLOCK_M)
        q_columns = load_rows(columns, pixel, pixel < PIXELS, STRIDE, KEY_COLS, WHOLE)
    for start in range(0, PIXELS, BLOCK_M):
        pixel = start + tl.arange(0, BLOCK_M)
        inside = pixel < PIXELS
        q_tail = load_rows(tails, pixel, inside, STRIDE, TAIL, WHOLE)
        do = load_rows(grads, pixel, inside, VALUES, VALUES, WHOLE)
        if not ONES:
            deltas = grads + PIXELS * VALUES + pixel
            minus_delta = tl.load(deltas, mask=inside, other=0.0).to(tl.float32)
            minus_delta += tl.load(deltas + DELTAS // 2, mask=inside, other=0.0).to(tl.float32)
        if RELATIVE:
            s = tl.trans(q_columns).to(tl.float32)[None, :, :]
            s = tl.reshape(tl.broadcast_to(s, [KEY_ROWS, KEY_COLS, BLOCK_M]), [SLOTS, BLOCK_M])
            # the next ones already: triton prefetches only what goes into a product
            q_columns = load_rows(columns, pixel + BLOCK_M, pixel + BLOCK_M < PIXELS, STRIDE, KEY_COLS, False)
        else:
            s = tl.zeros([SLOTS, BLOCK_M], tl.float32)
        s = add_product(s, k_tail, tl.trans(q_tail), PRECISION, EXACT)
        if MAIN > 0:
            q = load_rows(q_base, pixel, inside, STRIDE_P, MAIN, WHOLE)
            s = add_product(s, k, tl.trans(q), PRECISION, EXACT)
        p = weigh(s, lse, pixel, inside, PIXELS, SCALE, EXACT, 0)
        do_part = load_rows(grads, pixel, inside, VALUES, DV_PAD, WHOLE)
        value_grad = add_product(value_grad, p.to(v.dtype), do_part, PRECISION, EXACT)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp if ONES else dp + minus_delta[None, :])).to(v.dtype)
        tail_grad = add_product(tail_grad, ds, q_tail, PRECISION, EXACT)
        if MAIN > 0:
            main_grad = add_product(main_grad, ds, q, PRECISION, EXACT)

    jy = y0 + slot // KEY_COLS
    jx = strip * KEY_COLS + slot % KEY_COLS
    on_map = (jy < H) & (jx < W)
    grad_base = grad_qkv + image * (PIXELS * GRAD_W)
    place = (jy * W + jx) * GRAD_W
    if MAIN > 0:
        store_pixels(grad_base + (HEADS + head) * D, place, on_map, main_grad * LOGIT_SCALE, MAIN, MAIN)
    store_pixels(grad_base + (HEADS + head) * D + MAIN, place, on_map, tail_grad * LOGIT_SCALE, D - MAIN, TAIL)
    store_pixels(grad_base + 2 * HEADS * D + head * DV, place, on_map, value_grad, DV, DV_PAD)
