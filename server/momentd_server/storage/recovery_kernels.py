# pyright: basic
"""The two passes of a rebuild over one trailer.

Between them a location word holds a row's best version so far as `rank << 44 | update number`,
where the rank is the place of its generation in the ancestry, from 1. Its tag bits are 0, so it
cannot be taken for a slot, and it is never 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from momentd_server.jit import inline_kernel, kernel, prefetch
from momentd_server.storage.hashing import fold_check
from momentd_server.storage.location import GENERATION_SHIFT, UPDATE_MASK

RANK_BITS: Final = 18
_AHEAD: Final = 24  # rows; random rows of a large table miss every cache

_NONE = np.uint64(0)


@kernel
def _rank(generation, generations, guess):
    """The place of a generation in the ancestry, from 1; 0 if it is not there."""
    if guess > 0 and generations[guess - 1] == generation:
        return guess  # nearly always that of the record before
    for i in range(generations.shape[0] - 1, -1, -1):
        if generations[i] == generation:
            return i + 1
    return 0


@kernel
def _key(version, rank, caps):
    """The version as it is compared, or 0 if the record does not count."""
    number = version & UPDATE_MASK
    if rank == 0 or number > caps[rank - 1]:
        return _NONE
    return np.uint64(rank) << GENERATION_SHIFT | number


@inline_kernel
def _within(row, start, stop):
    """A row to prefetch: itself if it is this worker's, else one that costs nothing."""
    return min(max(row, start), stop - 1)


@kernel
def note_versions(start, stop, rows, versions, generations, caps, location):
    """First pass, for the rows in [start, stop)."""
    count = rows.shape[0]
    rank = 0
    generation = _NONE
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(location, _within(rows[i + _AHEAD], start, stop))
        row = rows[i]
        if row < start or row >= stop:
            continue
        if versions[i] >> GENERATION_SHIFT != generation or rank == 0:
            generation = versions[i] >> GENERATION_SHIFT
            rank = _rank(generation, generations, rank)
        key = _key(versions[i], rank, caps)
        location[row] = max(location[row], key)


@kernel
def place(
    start,
    stop,
    rows,
    versions,
    hashes,
    generations,
    caps,
    first_slot,
    record_bytes,
    family,
    location,
    check,
):
    """Second pass, for the rows in [start, stop): (rows placed, sum of their hashes)."""
    count = rows.shape[0]
    rank = 0
    generation = _NONE
    placed = 0
    digest = _NONE
    for i in range(count):
        if i + _AHEAD < count:
            ahead = _within(rows[i + _AHEAD], start, stop)
            prefetch(location, ahead)
            prefetch(check, ahead)
        row = rows[i]
        if row < start or row >= stop:
            continue
        if versions[i] >> GENERATION_SHIFT != generation or rank == 0:
            generation = versions[i] >> GENERATION_SHIFT
            rank = _rank(generation, generations, rank)
        key = _key(versions[i], rank, caps)
        if key != _NONE and location[row] == key:
            location[row] = first_slot + np.uint64(i) * record_bytes
            check[row] = fold_check(hashes[i], family)
            digest += hashes[i]
            placed += 1
    return placed, digest
