"""The two kernels of `attention`: running sums over tiles of keys (flash attention), and what adds their parts up.

No program reads a slot that another one of the launch writes: fresh keys come from the fresh tensors, their slots are
left out of the stored ones. The program that attends to a fresh tile for the first tile of queries stores it.
"""

# It takes reductions for tuples, and scans for what never returns.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(query, key, value, allowed, scale, peak, total, acc):
    """One tile of keys for one tile of queries: running maximum, sum and output."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(allowed, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return highest, total * fade + tl.sum(weight, 1), acc


@triton.jit
def _allowed(live, seen, ahead, own, grid, mask, line, mask_m, column):
    """Which queries (`live`, in blocks `own`) attend to which columns (`seen`, so far `ahead` of the first one)."""
    allowed = live[:, None] & seen[None]
    if grid is not None:
        allowed = allowed & (ahead[None] < (own[:, None] + 1) * grid)
    if mask is not None:
        shown = tl.load(mask + line[:, None] * mask_m + column[None], mask=allowed, other=0)
        allowed = allowed & (shown != 0)
    return allowed


@triton.jit
def attention_kernel(
    q, k, v, keys, values, positions, begin, limit, overwritten, mask, tree, out, peaks, totals,
    rows, width, columns, q_row, q_m, k_row, k_m, v_row, v_m, mask_row, mask_m, tree_row, tree_m, grid, share, scale,
    G: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, STORED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of the G heads of one key head, for its part of the keys."""
    tile, split = tl.program_id(0), tl.program_id(2)
    head, n = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    b = (n // share).to(tl.int64)  # the row of the slots
    d = tl.arange(0, BLOCK_D)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m = packed // G
    query_head = head * G + packed % G
    there = m < rows
    # Strides are in heads, so that the compiler knows how rows are aligned; only offsets of whole rows take 64 bits.
    q += n.to(tl.int64) * q_row * DH
    query = tl.load(
        q + m[:, None] * (q_m * DH) + query_head[:, None] * DH + d[None],
        mask=there[:, None] & (d[None] < DH),
        other=0.0,
    )
    if keys is not None:
        keys += b * columns * (HKV * DH) + head * DH
        values += b * columns * (HKV * DH) + head * DH
    if k is not None:
        k += n.to(tl.int64) * k_row * DH + head * DH
        v += n.to(tl.int64) * v_row * DH + head * DH
    at = tl.load(positions + b * width + m % width, mask=there, other=columns - 1).to(tl.int32)
    live = at < columns - 1  # fillers see nothing

    if mask is not None:
        mask += b * mask_row
    if tree is not None:
        tree += b * tree_row

    low = 0
    high = columns - 1
    if begin is not None:
        low = tl.load(begin + b).to(tl.int32)
    if limit is not None:
        high = tl.minimum(tl.load(limit + b).to(tl.int32), high)
    end = tl.max(tl.where(live, high, low), 0)  # a tile of fillers reads nothing
    own = at * 0
    if grid is not None:
        own = tl.maximum(at - low, 0) // grid
        end = tl.minimum(end, low + (tl.max(tl.where(live, own, -1), 0) + 1) * grid)

    tiles_stored = 0
    if STORED:
        tiles_stored = tl.maximum(end - low + BLOCK_N - 1, 0) // BLOCK_N
    tiles = tiles_stored
    if k is not None:
        tiles += tl.cdiv(rows, BLOCK_N)
    part = tl.cdiv(tiles, tl.num_programs(2))
    first = split * part
    last = tl.minimum(first + part, tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if STORED:
        for t in range(first, tl.minimum(last, tiles_stored)):
            column = low + t * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = column < end
            if overwritten is not None:
                seen = seen & (tl.load(overwritten + b * columns + column, mask=seen, other=1) == 0)
            allowed = _allowed(live, seen, column - low, own, grid, mask, m % width, mask_m, column)
            if mask is not None:
                seen = tl.max(allowed.to(tl.int32), 0) > 0
            slot = column[:, None] * (HKV * DH) + d[None]
            inside = seen[:, None] & (d[None] < DH)
            key = tl.load(keys + slot, mask=inside, other=0.0).to(query.dtype)
            value = tl.load(values + slot, mask=inside, other=0.0).to(query.dtype)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)
    if k is not None:
        fresh, until = tl.maximum(first, tiles_stored) - tiles_stored, last - tiles_stored
        # The tokens of a draft are few, and in cache: for matrix units, fetching them ahead would only take registers.
        half: tl.constexpr = query.dtype.primitive_bitwidth == 16
        stages: tl.constexpr = 1 if half and STORED and tree is not None else None
        for t in tl.range(fresh, until, num_stages=stages):
            j = t * BLOCK_N + tl.arange(0, BLOCK_N)
            column = tl.load(positions + b * width + j % width, mask=j < rows, other=columns - 1).to(tl.int32)
            seen = (column >= low) & (column < high)
            allowed = _allowed(live, seen, column - low, own, grid, mask, m % width, mask_m, column)
            if tree is not None:
                shown = tl.load(tree + m[:, None] * tree_m + j[None], mask=allowed, other=0)
                allowed = allowed & (shown != 0)
            inside = seen[:, None] & (d[None] < DH)
            key = tl.load(k + j[:, None] * (k_m * DH) + d[None], mask=inside, other=0.0)
            value = tl.load(v + j[:, None] * (v_m * DH) + d[None], mask=inside, other=0.0)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)
        if keys is not None:  # noqa: SIM102 (this one is known when compiling)
            if (tile == 0) & (n % share == 0):  # candidate 0 alone is stored
                for t in range(fresh, until):
                    j = t * BLOCK_N + tl.arange(0, BLOCK_N)
                    column = tl.load(positions + b * width + j, mask=j < width, other=columns - 1).to(tl.int32)
                    slot = column[:, None] * (HKV * DH) + d[None]
                    real = (column < columns - 1)[:, None] & (d[None] < DH)
                    tl.store(keys + slot, tl.load(k + j[:, None] * (k_m * DH) + d[None], mask=real), mask=real)
                    tl.store(values + slot, tl.load(v + j[:, None] * (v_m * DH) + d[None], mask=real), mask=real)

    # The addresses of the output are worked out again, from what the compiler cannot know to be the same number: kept
    # since the queries were read, they would fill registers all along.
    packed = (tile + tl.minimum(last, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    m, query_head = packed // G, head * G + packed % G
    there = m < rows
    before = (split * (tl.num_programs(1) // HKV) + n).to(tl.int64) * rows * (HKV * G)
    line = m * (HKV * G) + query_head
    if peaks is not None:
        tl.store(peaks + before + line, peak, mask=there)
        tl.store(totals + before + line, total, mask=there)
    else:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + before * DH + line[:, None] * DH + d[None], acc, mask=there[:, None] & (d[None] < DH))


_ROWS = tl.constexpr(32)  # looked at together, by a warp


@triton.jit
def _place(bounds, batch, entries, tile, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The row of a tile of queries, `batch` for none, and its place among the row's; fillers go with the last row."""
    row, before, counted = 0, 0, 0
    for start in range(0, batch, _ROWS):
        b = start + tl.arange(0, _ROWS)
        first = tl.load(bounds + b, mask=b < batch, other=entries).to(tl.int32)
        after = tl.load(bounds + b + 1, mask=b + 1 < batch, other=entries).to(tl.int32)
        tiles = ((after - first) * G + BLOCK_M - 1) // BLOCK_M
        over = (b < batch) & (counted + tl.cumsum(tiles, 0) <= tile)
        row += tl.sum(over.to(tl.int32), 0)
        before += tl.sum(tl.where(over, tiles, 0), 0)
        counted += tl.sum(tiles, 0)
    return row, tile - before


@triton.jit
def packed_kernel(
    q, k, v, keys, values, bounds, positions, segment, begin, limit, overwritten, out, peaks, totals,
    entries, batch, columns, grid, scale,
    G: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one row and of the G heads of one key head, for its part of the keys."""
    head, split = tl.program_id(0), tl.program_id(1)
    b, tile = _place(bounds, batch, entries, tl.program_id(2), G, BLOCK_M)
    if b == batch:  # the host knows no more than how many tiles there are at most; these are the last programs
        return
    b = b.to(tl.int64)  # only offsets of whole rows take 64 bits
    start = tl.load(bounds + b).to(tl.int32)
    count = tl.load(bounds + b + 1).to(tl.int32) - start
    d = tl.arange(0, BLOCK_D)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m = packed // G
    live = m < count
    width: tl.constexpr = HKV * DH
    line = m * (G * HKV) + head * G + packed % G
    query = tl.load(
        q + start.to(tl.int64) * (G * width) + line[:, None] * DH + d[None],
        mask=live[:, None] & (d[None] < DH),
        other=0.0,
    )
    positions += start
    low = 0
    high = columns - 1
    if begin is not None:
        low = tl.load(begin + b).to(tl.int32)
    if limit is not None:
        high = tl.minimum(tl.load(limit + b).to(tl.int32), high)
    end = high
    if grid is not None:
        at = tl.load(positions + m, mask=live, other=0).to(tl.int32)
        past = (tl.maximum(at - low, 0) // grid + 1) * grid  # of the query's block, counted from `low`
        end = tl.minimum(end, low + tl.max(past, 0))
    if segment is not None:
        segment += start
        own = tl.load(segment + m, mask=live, other=0).to(tl.int32)

    stored = 0
    if keys is not None:
        keys += b * columns * width + head * DH
        values += b * columns * width + head * DH
        stored = tl.maximum(end - low + BLOCK_N - 1, 0) // BLOCK_N
    tiles = stored
    if k is not None:
        k += start.to(tl.int64) * width + head * DH
        v += start.to(tl.int64) * width + head * DH
        tiles += tl.cdiv(count, BLOCK_N)
    tiles = tl.where(tile * BLOCK_M < count * G, tiles, 0)  # nothing for fillers
    part = tl.cdiv(tiles, tl.num_programs(1))
    first = split * part
    last = tl.minimum(first + part, tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if keys is not None:
        for t in range(first, tl.minimum(last, stored)):
            column = low + t * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = column < end
            if overwritten is not None:
                seen = seen & (tl.load(overwritten + b * columns + column, mask=seen, other=1) == 0)
            allowed = seen[None]
            if grid is not None:
                allowed = allowed & ((column - low)[None] < past[:, None])
            inside = seen[:, None] & (d[None] < DH)
            slot = column[:, None] * width + d[None]
            key = tl.load(keys + slot, mask=inside, other=0.0).to(query.dtype)
            value = tl.load(values + slot, mask=inside, other=0.0).to(query.dtype)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)
    if k is not None:
        # The entries of a draft are few, and in cache: for matrix units, fetching them ahead would only take registers.
        half: tl.constexpr = query.dtype.primitive_bitwidth == 16
        stages: tl.constexpr = 1 if half and segment is not None else None
        for t in tl.range(tl.maximum(first - stored, 0), last - stored, num_stages=stages):
            j = t * BLOCK_N + tl.arange(0, BLOCK_N)
            column = tl.load(positions + j, mask=j < count, other=-1).to(tl.int32)
            allowed = ((column >= low) & (column < end))[None]
            if grid is not None:
                allowed = allowed & ((column - low)[None] < past[:, None])
            if segment is not None:
                its = tl.load(segment + j, mask=j < count, other=0).to(tl.int32)
                allowed = allowed & (its[None] == own[:, None])
            inside = (j < count)[:, None] & (d[None] < DH)
            key = tl.load(k + j[:, None] * width + d[None], mask=inside, other=0.0)
            value = tl.load(v + j[:, None] * width + d[None], mask=inside, other=0.0)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)

    # The addresses of the output are worked out again, from what the compiler cannot know to be the same number: kept
    # since the queries were read, they would fill registers all along.
    packed = (tile + tl.minimum(last, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    m = packed // G
    there = m < tl.where(b == batch - 1, entries - start, count)
    acc = tl.where((m < count)[:, None], acc, 0.0)  # fillers answer zeros
    line = (split.to(tl.int64) * entries + start) * (G * HKV) + m * (G * HKV) + head * G + packed % G
    if peaks is not None:
        tl.store(peaks + line, peak, mask=there)
        tl.store(totals + line, total, mask=there)
    else:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * DH + d[None], acc, mask=there[:, None] & (d[None] < DH))


@triton.jit
def combine_kernel(
    parts, peaks, totals, out, lines, splits, DH: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr
):
    """One program: LINES lines (row, query, head) of the output, added up over the parts of the keys."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    d = tl.arange(0, BLOCK_D)
    inside = (line < lines)[:, None] & (d[None] < DH)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for split in range(splits):
        there = line + split * tl.cast(lines, tl.int64)
        its = tl.load(peaks + there, mask=line < lines, other=float("-inf"))
        highest = tl.maximum(peak, its)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weight = tl.exp2(peak - base), tl.exp2(its - base)
        total = total * fade + tl.load(totals + there, mask=line < lines, other=0.0) * weight
        part = tl.load(parts + there[:, None] * DH + d[None], mask=inside, other=0.0)
        acc = acc * fade[:, None] + part * weight[:, None]
        peak = highest
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * DH + d[None], acc, mask=inside)
