# pyright: basic
"""Kernels that read the space of an engine that is gone: what is in use, and whether it fits."""

import numpy as np

from momentd_server.jit import kernel, prefetch, register_warmup
from momentd_server.jit.row_protocol import FRESH, USE
from momentd_server.storage.frames import (
    COPIED,
    DIRTY,
    FRAME_SIGN,
    QUEUED,
    ROW_MASK,
    SEGMENT_MASK,
    SEGMENT_SHIFT,
    STATE,
    meta_of,
)
from momentd_server.storage.space import SLAB_BYTES

_AHEAD = 32


@kernel
def inherit_slab(slab, location, words, geo, free, top):
    """Takes over the frames of one slab: those in use are the ones that locations point to.

    Pins, places in queues and copies in work were the dead engine's: they are forgotten. Free
    frames are put on the stack `free` from `top` on. Returns (free, dirty, not used yet).
    """
    count = 0
    dirty = 0
    fresh = 0
    for i in range(geo[2] - 1, -1, -1):
        frame = (slab << 16) | i
        meta = meta_of(frame, geo)
        word = words[meta + 1]
        row = words[meta] & ROW_MASK
        if word & STATE and row < location.size and location[row] == frame | FRAME_SIGN:
            if word & STATE == COPIED:
                word = (word & ~STATE) | DIRTY
            words[meta] = row
            words[meta + 1] = word & ~QUEUED
            dirty += (word & DIRTY) >> 1
            fresh += word & USE == FRESH
        else:
            words[meta + 1] = 0
            words[meta] = 0
            free[top + count] = frame
            count += 1
    return count, dirty, fresh


@kernel
def count_rows(worker, start, stop, location, words, geo, owners, table_id, lowest, counts, found):
    """What the locations of rows [start, stop) refer to.

    counts[worker, segment - lowest] += 1 for each slot, that of a frame's backing included.
    found[worker] = (rows with a record, locations that cannot be).
    """
    touched = 0
    wrong = 0
    for row in range(start, stop):
        if row + _AHEAD < stop:
            ahead = location[row + _AHEAD]
            if ahead < 0 and (ahead & ROW_MASK) >> 16 < owners.size:
                prefetch(words, meta_of(ahead & ROW_MASK, geo))
        place = location[row]
        if place == 0:
            continue
        touched += 1
        slot = place
        if place < 0:
            frame = place & ROW_MASK
            slab = frame >> 16
            if slab >= owners.size or owners[slab] != table_id or frame & 0xFFFF >= geo[2]:
                wrong += 1
                continue
            meta = meta_of(frame, geo)
            if words[meta] & ROW_MASK != row or words[meta + 1] & STATE == 0:
                wrong += 1
                continue
            slot = words[meta + 2]
            if slot == 0:
                continue
        k = ((slot >> SEGMENT_SHIFT) & SEGMENT_MASK) - lowest
        if k < 0 or k >= counts.shape[1]:
            wrong += 1
        else:
            counts[worker, k] += 1
    found[worker, 0] += touched
    found[worker, 1] += wrong


@register_warmup
def _warm_up() -> None:
    words = np.zeros(SLAB_BYTES // 8, np.int64)
    geo = np.array([0, 16, 4, 1024], np.int64)
    location = np.zeros(4, np.int64)
    inherit_slab(0, location, words, geo, np.zeros(4, np.int64), 0)
    count_rows(
        0, 0, 4, location, words, geo, np.zeros(1, np.int64), 1, 0, np.zeros((1, 1), np.int64),
        np.zeros((1, 2), np.int64),
    )  # fmt: skip
