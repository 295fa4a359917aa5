# pyright: basic
"""Kernels of snapshots: which records a cut has, and which of them are still to be written.

A record is *pending* while its frame is dirty and its version is not above the cut: it belongs to
the snapshot and is in no segment yet.
"""

import numpy as np

from momentd_server.jit import fence, inline_kernel, kernel, register_warmup
from momentd_server.storage.compaction_kernels import _is_set, _number, _position, _segment_of, _set
from momentd_server.storage.frames import (
    COPIED,
    DIRTY,
    ROW_MASK,
    STATE,
    UPDATE_SHIFT,
    copy_bytes,
    meta_of,
    record_of,
)
from momentd_server.storage.space import SLAB_BYTES

_SLAB_WORDS = SLAB_BYTES // 8


@inline_kernel
def _is_pending(word, cut):
    return word & STATE == DIRTY and word >> UPDATE_SHIFT <= cut


@kernel
def mark_cut(start, stop, location, words, geo, segments, bits, cut):
    """Sets the bits of the records that rows [start, stop) have in the cut; pending ones have none.

    A frame that was changed after the cut counts as what backs it: nothing was written since.
    """
    k = -1
    for row in range(start, stop):
        place = location[row]
        if place < 0:
            meta = meta_of(place & ROW_MASK, geo)
            if _is_pending(words[meta + 1], cut):
                continue
            place = words[meta + 2]
        if place > 0:
            k = _position(segments, _segment_of(place), k)
            if k >= 0:
                _set(bits[k], _number(place, geo[1]))


@kernel
def count_shared(start, stop, location, words, geo, segments, bits, counts):
    """counts[k] += the marked records of segments[k] that rows [start, stop) refer to as well."""
    k = -1
    for row in range(start, stop):
        place = location[row]
        if place < 0:
            place = words[meta_of(place & ROW_MASK, geo) + 2]
        if place > 0:
            k = _position(segments, _segment_of(place), k)
            if k >= 0 and _is_set(bits[k], _number(place, geo[1])):
                counts[k] += 1


@kernel
def count_pending(index, words, cut):
    """How many of the records whose state words are at `index` (those >= 0) are pending."""
    count = 0
    for i in range(index.size):
        if index[i] >= 0 and _is_pending(words[index[i]], cut):
            count += 1
    return count


@inline_kernel
def _copy(frame, meta, word, space, words, geo, k, buffer, rows, updates, old, out):
    copy_bytes(space, record_of(frame, geo), buffer, k * geo[1], geo[1])
    rows[k] = words[meta] & ROW_MASK
    updates[k] = word >> UPDATE_SHIFT
    old[k] = words[meta + 3]
    fence()
    words[meta + 1] = word | COPIED
    out[k] = frame


@kernel
def copy_listed(index, cut, want, space, words, geo, buffer, rows, updates, old, out):
    """Copies up to `want` pending ones of these records, as `victim_kernels.choose` does."""
    count = 0
    for i in range(index.size):
        if count == want:
            break
        if index[i] < 0:
            continue
        meta = index[i] - 1
        word = words[meta + 1]
        if not _is_pending(word, cut):
            continue
        at = meta - geo[0] // 8
        frame = (at // _SLAB_WORDS) << 16 | (at % _SLAB_WORDS) >> 2
        _copy(frame, meta, word, space, words, geo, count, buffer, rows, updates, old, out)
        count += 1
    return count


@kernel
def copy_pending(slabs, hand, cut, want, scan, space, words, geo, buffer, rows, updates, old, out):
    """The same for the next `scan` frames of a table, from `hand[0]` on; it moves there.

    Returns how many were copied.
    """
    frames = geo[2]
    total = slabs.size * frames
    count = 0
    at = hand[0]
    end = min(at + scan, total)
    while at < end and count < want:
        frame = slabs[at // frames] << 16 | at % frames
        meta = meta_of(frame, geo)
        word = words[meta + 1]
        if _is_pending(word, cut):
            _copy(frame, meta, word, space, words, geo, count, buffer, rows, updates, old, out)
            count += 1
        at += 1
    hand[0] = at
    return count


@kernel
def mark_written(slots, updates, cut, record_bytes, bits):
    """Sets the bits of those of these slots, all of one segment, whose version the cut has."""
    count = 0
    for i in range(slots.size):
        if updates[i] <= cut:
            _set(bits, _number(slots[i], record_bytes))
            count += 1
    return count


@kernel
def count_bits(bits):
    """Bits that are set."""
    count = 0
    for i in range(bits.size):
        byte = bits[i]
        while byte:
            byte &= byte - np.uint8(1)
            count += 1
    return count


@kernel
def sum_hashes(rows, hashes, first_slot, location, words, geo):
    """Sum of the hashes of those records of a batch that are the last version written of their row.

    Of rows whose frame is changed the frame knows the hash: they are left to `sum_changed`.
    """
    total = np.uint64(0)
    for i in range(rows.size):
        slot = first_slot + i * geo[1]
        place = location[rows[i]]
        if place < 0:
            meta = meta_of(place & ROW_MASK, geo)
            if words[meta + 1] & STATE == DIRTY:
                continue
            place = words[meta + 2]
        if place == slot:
            total += hashes[i]
    return total


@kernel
def sum_changed(slabs, words, geo):
    """Sum of the hashes of the last written versions of all changed frames."""
    total = np.uint64(0)
    for s in range(slabs.size):
        for i in range(geo[2]):
            meta = meta_of((slabs[s] << 16) | i, geo)
            if words[meta + 1] & STATE == DIRTY:
                total += np.uint64(words[meta + 3])
    return total


@register_warmup
def _warm_up() -> None:
    """Calls every kernel once, with the types of real calls."""
    space = np.zeros(SLAB_BYTES, np.uint8)
    words = space.view(np.int64)
    geo = np.array([0, 16, 4, 1024], np.int64)
    location = np.zeros(4, np.int64)
    rows, zeros, out, hand, slabs, segments = (np.zeros(n, np.int64) for n in (2, 2, 2, 1, 1, 1))
    bits, buffer = np.zeros((1, 8), np.uint8), np.zeros(32, np.uint8)
    mark_cut(0, 4, location, words, geo, segments, bits, 0)
    count_shared(0, 4, location, words, geo, segments, bits, zeros)
    count_pending(zeros, words, 0)
    copy_listed(zeros - 1, 0, 2, space, words, geo, buffer, rows, zeros, zeros, out)
    copy_pending(slabs, hand, 0, 2, 4, space, words, geo, buffer, rows, zeros, zeros, out)
    mark_written(zeros[:0], zeros[:0], 0, 16, bits[0])
    count_bits(bits[0])
    sum_hashes(zeros[:0], np.zeros(0, np.uint64), 0, location, words, geo)
    sum_changed(slabs[:0], words, geo)
