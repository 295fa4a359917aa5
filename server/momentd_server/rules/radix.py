# pyright: basic
"""Kernels that copy, check, sort and deduplicate row ids."""

import numpy as np

from momentd_server.jit import fence, kernel

# Measured from 1,000 to 1,000,000 rows: one more pass costs less than more places to write to.
DIGIT_BITS = 8

# Results of `arrange` that are not a number of distinct rows.
OUT_OF_RANGE, ASCENDING, TOO_WIDE = -1, -2, -3


@kernel
def arrange(rows, limit, private, words, spare, order, unique, starts, histogram):
    """Copy `rows` (n,) to `private`, check 0 <= row < limit, and sort if need be.

    Returns the number of distinct rows, with `order`, `unique` and `starts` filled as in
    `batch.Plan`; or OUT_OF_RANGE, or ASCENDING (strictly: `private` is `unique`), or TOO_WIDE
    (a row and a position do not fit one word), which leave them as they were.
    """
    count = rows.shape[0]
    for i in range(count):
        private[i] = rows[i]
    fence()  # `rows` may change under us; from here on only the copy counts

    highest, ascending = _inspect(private, count)
    if count > 0 and highest >= np.uint64(limit):
        return OUT_OF_RANGE
    if ascending:
        return ASCENDING

    position_bits = _bits(np.uint64(count - 1))
    row_bits = _bits(highest)
    if position_bits + row_bits > 64:
        return TOO_WIDE
    _pack(private, count, position_bits, words)
    source, target = words, spare
    for shift in range(position_bits, position_bits + row_bits, DIGIT_BITS):
        _sort_digit(source, target, count, shift, histogram)
        source, target = target, source
    return _deduplicate(source, count, position_bits, order, unique, starts)


@kernel
def deduplicate_pairs(rows, order, unique, starts):
    """Fill `unique` and `starts` from sorted `rows` (n,); returns the number of distinct rows."""
    distinct = 0
    for i in range(rows.shape[0]):
        if i == 0 or rows[i] != rows[i - 1]:
            unique[distinct] = rows[i]
            starts[distinct] = i
            distinct += 1
    starts[distinct] = rows.shape[0]
    return distinct


@kernel
def _bits(value):
    """Bits needed for a value; 1 for 0."""
    bits = 1
    while value > np.uint64(1):
        value >>= np.uint64(1)
        bits += 1
    return bits


@kernel
def _inspect(rows, count):
    """The highest row id, a negative one counting as huge, and whether they strictly ascend."""
    highest = np.uint64(0)
    descents = 0
    for i in range(count):
        highest = max(highest, np.uint64(rows[i]))
    for i in range(1, count):
        descents += rows[i] <= rows[i - 1]
    return highest, descents == 0


# Indices are unsigned below: for signed ones numba adds a test for negative values.


@kernel
def _pack(private, count, position_bits, words):
    """words = row << position_bits | position."""
    up = np.uint64(position_bits)
    for i in range(np.uint64(count)):
        words[i] = np.uint64(private[i]) << up | i


@kernel
def _sort_digit(source, target, count, shift, histogram):
    """One stable pass of a radix sort, least digit first, by DIGIT_BITS bits from `shift` on."""
    one = np.uint64(1)
    size = one << np.uint64(DIGIT_BITS)
    mask = size - one
    down = np.uint64(shift)
    for k in range(size):
        histogram[k] = 0
    for i in range(np.uint64(count)):
        histogram[source[i] >> down & mask] += one
    at = np.uint64(0)
    for k in range(size):
        here = histogram[k]
        histogram[k] = at
        at += here
    for i in range(np.uint64(count)):
        word = source[i]
        place = histogram[word >> down & mask]
        histogram[word >> down & mask] = place + one
        target[place] = word


@kernel
def _deduplicate(words, count, position_bits, order, unique, starts):
    """Without a branch: what stands for the current row is written again until it is complete."""
    one = np.uint64(1)
    down = np.uint64(position_bits)
    mask = (one << down) - one
    starts[0] = 0
    distinct = np.uint64(0)
    for i in range(np.uint64(count)):
        word = words[i]
        row = word >> down
        order[i] = np.int64(word & mask)
        unique[distinct] = np.int64(row)
        starts[distinct + one] = np.int64(i + one)
        last = i + one == np.uint64(count) or words[i + one] >> down != row
        distinct += np.uint64(last)
    return np.int64(distinct)
