"""Relative logits for the decomposed kernels: from queries and tables to rows and columns, and their gradients back.

    rows[i, y] = scale * q_i . rel_h[y - iy]        columns[i, x] = scale * q_i . rel_w[x - ix]

Queries that stand in one line share the vectors: an image row those of rel_h, an image column those of rel_w, so both
are plain products with a slice of the table. Heads that share the tables are done TOGETHER where lines are short.
"""

import triton
import triton.language as tl

from .triton_decomposed_kernels import load_depth, store_depth


@triton.jit
def line_vectors(
    table, line, head, side, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[PADDED, WIDTH]: the vectors of a table from a line to each of the `side` lines; zero beyond."""
    if TABLES_PER_HEAD:
        table += head * ((2 * side - 1) * D)
    to = tl.arange(0, PADDED)
    return load_depth(table, (side - 1 - line + to) * D, to < side, FIRST, WIDTH, D, False).to(dtype)


@triton.jit
def line_logits(
    q_main, q_tail, table, logits_at, place, exists, line, head, side, stride, scale, D: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, PADDED: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    vectors = line_vectors(table, line, head, side, D, 0, MAIN, PADDED, TABLES_PER_HEAD, q_main.dtype)
    logits = tl.dot(q_main, tl.trans(vectors))
    if TAIL > 0:
        vectors = line_vectors(table, line, head, side, D, MAIN, TAIL, PADDED, TABLES_PER_HEAD, q_main.dtype)
        logits = tl.dot(q_tail, tl.trans(vectors), logits)
    store_depth(logits_at, place * stride, exists, logits * scale, 0, PADDED, side)


@triton.jit
def relative_logits(
    q, rel_h, rel_w, rows, columns, q_b, q_h, q_n, rows_n, columns_n, heads, height, width, scale,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LINE: tl.constexpr, TOGETHER: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """rows [image_heads, pixels, rows_n] and columns alike. One program LINE queries of a row of the map, or of a
    column, of TOGETHER heads. ROWS and COLUMNS are the powers of two that height and width fit into."""
    row_parts, column_parts = tl.cdiv(width, LINE), tl.cdiv(height, LINE)
    programs = height * row_parts + width * column_parts
    image_head = (tl.program_id(0) // programs).to(tl.int64) * TOGETHER
    number = tl.program_id(0) % programs
    image, head = image_head // heads, image_head % heads
    of_row = number < height * row_parts
    number = tl.where(of_row, number, number - height * row_parts)
    parts = tl.where(of_row, row_parts, column_parts)
    line, part = number // parts, number % parts
    which = tl.arange(0, TOGETHER * LINE) // LINE
    along = part * LINE + tl.arange(0, TOGETHER * LINE) % LINE
    exists = along < tl.where(of_row, width, height)
    query = tl.where(of_row, line * width + along, along * width + line)
    q += image * q_b + head * q_h
    q_main = load_depth(q, which * q_h + query * q_n, exists, 0, MAIN, D, False)
    q_tail = load_depth(q, which * q_h + query * q_n, exists, MAIN, TAIL, D, False) if TAIL > 0 else q_main
    place = which * (height * width) + query
    first = image_head * (height * width)
    if of_row:
        line_logits(
            q_main, q_tail, rel_h, rows + first * rows_n, place, exists, line, head, height, rows_n, scale,
            D, MAIN, TAIL, ROWS, TABLES_PER_HEAD,
        )  # fmt: skip
    else:
        line_logits(
            q_main, q_tail, rel_w, columns + first * columns_n, place, exists, line, head, width, columns_n, scale,
            D, MAIN, TAIL, COLUMNS, TABLES_PER_HEAD,
        )  # fmt: skip


@triton.jit
def relative_logits_backward(
    q, rel_h, rel_w, grad_rows, grad_columns, grad_q, part_h, part_w,
    q_b, q_h, q_n, dq_b, dq_h, dq_n, rows_n, columns_n, groups, heads, height, width, scale, splits,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, OFFSETS: tl.constexpr,
    LINE: tl.constexpr, TOGETHER: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """The gradients of rows and columns into those of the queries (added to what is there) and of the tables.

    One program a row of the map and a share of the image-heads: it walks over every splits-th group of TOGETHER heads,
    or over one head's images where each has tables of its own. It owns its parts of the tables' gradients,
    part_h [programs, height, D] by the row that a query looks at and part_w [programs, 2 width - 1, D] by offset, so
    nothing is added by two programs and every result is the same every time. OFFSETS is the power of two that
    2 width - 1 fits into, LINE the one for the width.
    """
    line = tl.program_id(0) % height
    split = tl.program_id(0) // height % splits
    own_head = tl.program_id(0) // (height * splits)  # 0 for shared tables
    which = tl.arange(0, TOGETHER * LINE) // LINE
    x = tl.arange(0, TOGETHER * LINE) % LINE
    exists = x < width
    query = line * width + x
    pixels = height * width
    dtype: tl.constexpr = q.dtype.element_ty
    rows_main = line_vectors(rel_h, line, own_head, height, D, 0, MAIN, ROWS, TABLES_PER_HEAD, dtype)
    offset = tl.arange(0, OFFSETS)
    known = offset < 2 * width - 1
    table_w = rel_w + own_head * ((2 * width - 1) * D)
    columns_main = load_depth(table_w, offset * D, known, 0, MAIN, D, False).to(dtype)
    part_h_main = tl.zeros([ROWS, MAIN], tl.float32)
    part_w_main = tl.zeros([OFFSETS, MAIN], tl.float32)
    if TAIL > 0:
        rows_tail = line_vectors(rel_h, line, own_head, height, D, MAIN, TAIL, ROWS, TABLES_PER_HEAD, dtype)
        columns_tail = load_depth(table_w, offset * D, known, MAIN, TAIL, D, False).to(dtype)
        part_h_tail = tl.zeros([ROWS, TAIL], tl.float32)
        part_w_tail = tl.zeros([OFFSETS, TAIL], tl.float32)
    # The column that an offset means for a query: a sheared load makes columns offsets.
    to = offset[None, :] - (width - 1) + x[:, None]
    on_map = exists[:, None] & (to >= 0) & (to < width)
    zero = tl.full((), 0, tl.int64)  # int64: a batch may hold more than 2**31 elements
    for group in range(split, groups, splits):
        image_head = zero + group * (heads if TABLES_PER_HEAD else TOGETHER) + own_head
        image, head = image_head // heads, image_head % heads
        q_at = q + image * q_b + head * q_h
        dq_at = grad_q + image * dq_b + head * dq_h
        place = which * pixels + query
        by_row = load_depth(
            grad_rows + image_head * pixels * rows_n, place * rows_n, exists, 0, ROWS, height, False
        ).to(dtype)  # fmt: skip
        by_offset = tl.load(
            grad_columns + image_head * pixels * columns_n + place[:, None] * columns_n + to, mask=on_map, other=0.0
        ).to(dtype)  # fmt: skip
        q_main = load_depth(q_at, which * q_h + query * q_n, exists, 0, MAIN, D, False)
        dq_main = load_depth(dq_at, which * dq_h + query * dq_n, exists, 0, MAIN, D, False).to(tl.float32)
        more = tl.dot(by_row, rows_main)
        more = tl.dot(by_offset, columns_main, more)
        store_depth(dq_at, which * dq_h + query * dq_n, exists, dq_main + more * scale, 0, MAIN, D)
        part_h_main = tl.dot(tl.trans(by_row), q_main, part_h_main)
        part_w_main = tl.dot(tl.trans(by_offset), q_main, part_w_main)
        if TAIL > 0:
            q_tail = load_depth(q_at, which * q_h + query * q_n, exists, MAIN, TAIL, D, False)
            dq_tail = load_depth(dq_at, which * dq_h + query * dq_n, exists, MAIN, TAIL, D, False).to(tl.float32)
            more = tl.dot(by_row, rows_tail)
            more = tl.dot(by_offset, columns_tail, more)
            store_depth(dq_at, which * dq_h + query * dq_n, exists, dq_tail + more * scale, MAIN, TAIL, D)
            part_h_tail = tl.dot(tl.trans(by_row), q_tail, part_h_tail)
            part_w_tail = tl.dot(tl.trans(by_offset), q_tail, part_w_tail)
    part_h += tl.program_id(0).to(tl.int64) * (height * D)
    part_w += tl.program_id(0).to(tl.int64) * ((2 * width - 1) * D)
    to_row = tl.arange(0, ROWS)
    store_depth(part_h, to_row * D, to_row < height, part_h_main * scale, 0, MAIN, D)
    store_depth(part_w, offset * D, known, part_w_main * scale, 0, MAIN, D)
    if TAIL > 0:
        store_depth(part_h, to_row * D, to_row < height, part_h_tail * scale, MAIN, TAIL, D)
        store_depth(part_w, offset * D, known, part_w_tail * scale, MAIN, TAIL, D)


@triton.jit
def sum_tables(
    part_h, part_w, grad_h, grad_w, height, width, splits,
    D: tl.constexpr, D_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The parts that relative_logits_backward left, summed: grad_h [heads, 2 height - 1, D] and grad_w alike. One
    program a vector of a table: of the rows a part tells which row a query looks at, so that the offset follows."""
    rows, columns = 2 * height - 1, 2 * width - 1
    head = (tl.program_id(0) // (rows + columns)).to(tl.int64)
    number = tl.program_id(0) % (rows + columns)
    of_row = number < rows
    programs = splits * height
    depth = tl.arange(0, D_PADDED)
    total = tl.zeros([D_PADDED], tl.float32)
    for first in range(0, programs, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)
        to = tl.where(of_row, number - (height - 1) + program % height, number - rows)
        valid = (program < programs) & (to >= 0) & (to < tl.where(of_row, height, columns))
        place = (head * programs + program) * tl.where(of_row, height, columns) + to
        base = part_h if of_row else part_w
        total += tl.sum(load_depth(base, place * D, valid, 0, D_PADDED, D, False), 0)
    if of_row:
        tl.store(grad_h + (head * rows + number) * D + depth, total, mask=depth < D)
    else:
        tl.store(grad_w + (head * columns + number - rows) * D + depth, total, mask=depth < D)
