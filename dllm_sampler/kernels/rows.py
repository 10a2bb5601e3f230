"""The kernels of `bookkeeping`: a program has a row of the batch or a part of one, or numbers of many rows."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_at(masked, first, last, at, there):
    """Which of the columns `at` are noise inside the block; `masked` is that of the row."""
    there = there & (at >= first) & (at < last)
    return there & (tl.load(masked + at, mask=there, other=0) != 0)


@triton.jit
def eligible_kernel(masked, positions, start, stop, out, masked_stride, position_stride, width, BLOCK: tl.constexpr):
    """One program: BLOCK positions of a row."""
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = lane < width
    at = tl.load(positions + row * position_stride + lane, mask=there, other=0)
    may = noise_at(masked + row * masked_stride, tl.load(start + row), tl.load(stop + row), at, there)
    tl.store(out + row * width + lane, may.to(tl.uint8), mask=there)


@triton.jit
def noise_kernel(
    ids, masked, start, stop, positions, tokens, ids_stride, masked_stride, empty, width, BLOCK: tl.constexpr
):
    """One program: a row's block."""
    row = tl.program_id(0).to(tl.int64)
    ids += row * ids_stride
    masked += row * masked_stride
    positions += row * width
    tokens += row * width
    lane = tl.arange(0, BLOCK)
    last = tl.load(stop + row).to(tl.int32)
    taken = tl.load(start + row).to(tl.int32) * 0
    for first in range(tl.load(start + row).to(tl.int32), last, BLOCK):
        noise = (first + lane < last) & (tl.load(masked + first + lane, mask=first + lane < last, other=0) != 0)
        place = taken + tl.cumsum(noise.to(tl.int32), 0) - 1
        kept = noise & (place < width)
        tl.store(positions + place, (first + lane).to(tl.int64), mask=kept)
        tl.store(tokens + place, tl.load(ids + first + lane, mask=kept, other=0), mask=kept)
        taken += tl.sum(noise.to(tl.int32), 0)
    filler = tl.load(ids + empty)
    for first in range(0, width, BLOCK):
        left = (first + lane >= taken) & (first + lane < width)
        tl.store(positions + first + lane, empty + lane.to(tl.int64) * 0, mask=left)
        tl.store(tokens + first + lane, filler + lane.to(tl.int64) * 0, mask=left)


@triton.jit
def noise_left_kernel(masked, start, stop, out, masked_stride, BLOCK: tl.constexpr):
    """One program: a row's block."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    last = tl.load(stop + row).to(tl.int32)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.load(start + row).to(tl.int32), last, BLOCK):
        noise = tl.load(masked + row * masked_stride + first + lane, mask=first + lane < last, other=0)
        found += (noise != 0).to(tl.int32)
    tl.store(out + row, tl.sum(found, 0).to(tl.int64))


@triton.jit
def failures(confidence, candidate_stride, candidates, lane, asked, BLOCK: tl.constexpr):
    """int32 1 where any candidate's confidence in what is asked is no number; `confidence` is that of the row."""
    fails = tl.zeros([BLOCK], tl.int32)
    for candidate in range(candidates):
        sure = tl.load(confidence + candidate * candidate_stride + lane, mask=asked, other=0.0)
        fails |= (sure != sure).to(tl.int32)
    return fails


@triton.jit
def vouch_kernel(
    masked, positions, start, stop, done, step, bad, confidence, commit, token, now, may,
    masked_stride, position_stride, confidence_stride, candidate_stride, commit_stride, token_stride, candidates, width,
    FORBIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    first, last, live = tl.load(start + row), tl.load(stop + row), tl.load(done + row + lane * 0) == 0
    fails = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        there = begin + lane < width
        at = tl.load(positions + row * position_stride + begin + lane, mask=there, other=0)
        asked = noise_at(masked + row * masked_stride, first, last, at, there & live)
        own = confidence + row * confidence_stride
        fails |= failures(own, candidate_stride, candidates, begin + lane, asked, BLOCK)
    before = tl.load(bad + row)
    found = tl.where((before == 0) & (tl.max(fails, 0) > 0), tl.load(step + row) + 1, before)
    tl.store(now + row, found)
    for begin in range(0, width, BLOCK):
        there = begin + lane < width
        wanted = tl.load(commit + row * commit_stride + begin + lane, mask=there, other=0) != 0
        wanted = wanted & (found + lane * 0 == 0)
        if FORBIDDEN is not None:
            wanted = wanted & (tl.load(token + row * token_stride + begin + lane, mask=wanted, other=0) != FORBIDDEN)
        tl.store(may + row * width + begin + lane, wanted.to(tl.uint8), mask=there)


@triton.jit
def write_kernel(
    ids, masked, frozen, done, positions, token, commit, remask, new_ids, new_masked,
    ids_stride, masked_stride, frozen_stride, position_stride, token_stride, commit_stride, remask_stride,
    columns, width, BLOCK: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of a row, which it copies before it writes to them."""
    row, low = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = low + tl.arange(0, BLOCK)
    there = column < columns
    tl.store(new_ids + row * columns + column, tl.load(ids + row * ids_stride + column, mask=there), mask=there)
    noise = tl.load(masked + row * masked_stride + column, mask=there)
    tl.store(new_masked + row * columns + column, noise, mask=there)
    tl.debug_barrier()  # other threads of the program write to the same places
    for first in range(0, width, QUERY):
        lane = first + tl.arange(0, QUERY)
        asked = lane < width
        live = tl.load(done + row + lane * 0) == 0
        at = tl.load(positions + row * position_stride + lane, mask=asked, other=0)
        asked = asked & live & (at >= low) & (at < low + BLOCK)
        touched = tl.load(commit + row * commit_stride + lane, mask=asked, other=0) != 0
        again = touched & (lane < 0)
        if remask is not None:
            again = tl.load(remask + row * remask_stride + lane, mask=asked, other=0) != 0
            touched = touched | again
        touched = touched & (tl.load(frozen + row * frozen_stride + at, mask=touched, other=1) == 0)
        new = tl.load(token + row * token_stride + lane, mask=touched, other=0)
        tl.store(new_ids + row * columns + at, new, mask=touched)
        tl.store(new_masked + row * columns + at, again.to(tl.uint8), mask=touched)


@triton.jit
def note_kernel(
    step_map, logprob, entropy, positions, wrote, commit, was, noise, step, sure, unsure,
    position_stride, wrote_stride, commit_stride, was_stride, noise_stride, sure_stride, unsure_stride, columns, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK positions of a row."""
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = lane < width
    at = tl.load(positions + row * position_stride + lane, mask=there, other=0)
    if wrote is not None:
        fresh = tl.load(wrote + row * wrote_stride + lane, mask=there, other=0) != 0
    else:
        fresh = tl.load(commit + row * commit_stride + lane, mask=there, other=0) != 0
        before = tl.load(was + row * was_stride + at, mask=fresh, other=0)
        after = tl.load(noise + row * noise_stride + at, mask=fresh, other=0)
        fresh = fresh & (before != after)
    home = row * columns + at
    tl.store(step_map + home, tl.load(step + row) + at * 0, mask=fresh)
    sureness = tl.load(sure + row * sure_stride + lane, mask=fresh, other=1.0).to(tl.float64)
    tl.store(logprob + home, tl.log(sureness).to(logprob.dtype.element_ty), mask=fresh)
    if entropy is not None:
        spread = tl.load(unsure + row * unsure_stride + lane, mask=fresh, other=0.0)
        tl.store(entropy + home, spread.to(entropy.dtype.element_ty), mask=fresh)


@triton.jit
def advance_kernel(
    start, stop, begin, end, age, step, done, closed, finish, numbers, now, rows, lookahead, grid, BLOCK: tl.constexpr
):
    """One program: BLOCK rows. `numbers` are start, stop, age and step afterwards."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    live = tl.load(done + row, mask=there, other=1) == 0
    over = live & (tl.load(closed + row, mask=there, other=0) != 0)
    own_stop, own_end = tl.load(stop + row, mask=there, other=0), tl.load(end + row, mask=there, other=0)
    own_start = tl.where(over, own_stop, tl.load(start + row, mask=there, other=0))
    next_stop = tl.minimum(own_start + lookahead, own_end)
    if grid is not None:
        line = own_start - (own_start - tl.load(begin + row, mask=there, other=0)) % grid
        next_stop = tl.minimum(next_stop, line + grid)
    rests = (live == 0) | (own_start >= own_end)
    if finish is not None:
        rests = rests | (tl.load(finish + row, mask=there, other=0) != 0)
    tl.store(numbers + row, own_start, mask=there)
    tl.store(numbers + rows + row, tl.where(over, next_stop, own_stop), mask=there)
    own_age = tl.load(age + row, mask=there, other=0) + live.to(tl.int64)
    tl.store(numbers + 2 * rows + row, tl.where(over, 0, own_age), mask=there)
    tl.store(numbers + 3 * rows + row, tl.load(step + row, mask=there, other=0) + live.to(tl.int64), mask=there)
    tl.store(now + row, rests.to(tl.uint8), mask=there)


@triton.jit
def _most(best, numbers, live, NONE: tl.constexpr):
    return tl.maximum(best, tl.max(tl.where(live, numbers.to(tl.int64), NONE), 0))


@triton.jit
def report_kernel(
    left, start, stop, begin, end, age, done, bad, count, limit, lasts, least, later, out, rows,
    LONG: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The only program, BLOCK rows after each other. LONG: more than whether rows go on and are bad."""
    none = tl.full([], NONE, tl.int64)
    goes_on, failed = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    most, wide, young, old, far, few, part = none, none, none, none, none, none, none
    short, small, then, rest = none, none, none, none
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        there = row < rows
        live = there & (tl.load(done + row, mask=there, other=1) == 0)
        goes_on = tl.maximum(goes_on, tl.max(live.to(tl.int64), 0))
        failed = tl.maximum(failed, tl.max((tl.load(bad + row, mask=there, other=0) > 0).to(tl.int64), 0))
        if LONG:
            own_end, own_age = tl.load(end + row, mask=live, other=0), tl.load(age + row, mask=live, other=0)
            exists = own_end - tl.load(begin + row, mask=live, other=0)
            most = _most(most, tl.load(left + row, mask=live, other=0), live, NONE)
            wide = _most(
                wide, tl.load(stop + row, mask=live, other=0) - tl.load(start + row, mask=live, other=0), live, NONE
            )
            young, old = _most(young, -own_age, live, NONE), _most(old, own_age, live, NONE)
            hidden = own_end
            if limit is not None:
                hidden = tl.load(limit + row, mask=live, other=0)
            far = _most(far, hidden, live, NONE)
            computed = exists
            if count is not None:
                computed = tl.load(count + row, mask=live, other=0)
            few, part = _most(few, computed, live, NONE), _most(part, exists - computed, live, NONE)
            if lasts is not None:
                short = _most(short, -tl.load(lasts + row, mask=live, other=0), live, NONE)
                small = _most(small, -tl.load(least + row, mask=live, other=0), live, NONE)
                computed = exists
                if later is not None:
                    computed = tl.load(later + row, mask=live, other=0)
                then, rest = _most(then, computed, live, NONE), _most(rest, exists - computed, live, NONE)
    tl.store(out, goes_on.to(out.dtype.element_ty))
    tl.store(out + 1, failed.to(out.dtype.element_ty))
    if LONG:
        tl.store(out + 2, most)
        tl.store(out + 3, wide)
        tl.store(out + 4, young)
        tl.store(out + 5, old)
        tl.store(out + 6, far)
        tl.store(out + 7, few)
        tl.store(out + 8, part)
        if lasts is not None:
            tl.store(out + 9, short)
            tl.store(out + 10, small)
            tl.store(out + 11, then)
            tl.store(out + 12, rest)
