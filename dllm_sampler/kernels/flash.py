"""The two kernels of `attention`: running sums over tiles of keys (flash attention), and the sum over programs."""

# Pyright takes reductions for tuples, and scans for functions that never return.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _attend(query, key, value, allowed, scale, peak, total, acc):
    """Return the running maximum, sum and output of a tile of queries after one more tile of keys."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(allowed, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return highest, total * fade + tl.sum(weight, 1), acc


_ROWS = tl.constexpr(32)  # looked at together, by a warp


@triton.jit
def _place(bounds, batch, entries, tile, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row of a tile of queries (`batch` for none), and its number there. Fillers go with the last row."""
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
def attention_kernel(
    q, k, v, keys, values, bounds, positions, segment, end, until, unread, out, peaks, totals,
    entries, batch, columns, scale,
    G: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_M queries of one row and of the G heads of one key head to this program's part of the keys."""
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
    visible = columns - 1  # the number of columns that any of the queries sees
    if end is not None:
        visible = tl.minimum(tl.load(end + b).to(tl.int32), visible)
    if until is not None:
        past = tl.load(until + start + m, mask=live, other=0).to(tl.int32)
        visible = tl.minimum(visible, tl.max(past, 0))
    if segment is not None:
        segment += start
        own = tl.load(segment + m, mask=live, other=0).to(tl.int32)

    stored = 0
    if keys is not None:
        keys += b * columns * width + head * DH
        values += b * columns * width + head * DH
        stored = tl.cdiv(visible, BLOCK_N)
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
            column = t * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = column < visible
            if unread is not None:
                seen = seen & (tl.load(unread + b * columns + column, mask=seen, other=1) == 0)
            allowed = seen[None]
            if until is not None:
                allowed = allowed & (column[None] < past[:, None])
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
            column = tl.load(positions + j, mask=j < count, other=columns).to(tl.int32)
            allowed = (column < visible)[None]
            if until is not None:
                allowed = allowed & (column[None] < past[:, None])
            if segment is not None:
                its = tl.load(segment + j, mask=j < count, other=0).to(tl.int32)
                allowed = allowed & (its[None] == own[:, None])
            inside = (j < count)[:, None] & (d[None] < DH)
            key = tl.load(k + j[:, None] * width + d[None], mask=inside, other=0.0)
            value = tl.load(v + j[:, None] * width + d[None], mask=inside, other=0.0)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)

    # The row's bounds and the addresses of the output are worked out again, from what the compiler cannot know to be
    # the same numbers: kept since the queries were read, they would fill registers all along, and spill.
    packed = (tile + tl.minimum(last, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    m = packed // G
    again = bounds + b + tl.minimum(last, 0)
    start = tl.load(again).to(tl.int32)
    count = tl.load(again + 1).to(tl.int32) - start
    there = (m < count) | ((b == batch - 1) & (m < entries - start))
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
    """Combine the parts of LINES lines of the output. A line is one head of one entry."""
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
