# pyright: basic
"""Kernels of compaction: which records of a segment are needed, and moving what refers to them.

A record is named by its slot word (storage/location.py); in a bitmap of its segment by the number
`offset // record_bytes`, which no two records of a segment share.
"""

from typing import Final

import numpy as np

from momentd_server.jit import inline_kernel, kernel, prefetch, register_warmup
from momentd_server.storage.frames import (
    CLEAN,
    ROW_MASK,
    SEGMENT_MASK,
    SEGMENT_SHIFT,
    STATE,
    meta_of,
)
from momentd_server.storage.space import SLAB_BYTES

_AHEAD: Final = 16
_OFFSET_MASK: Final = (1 << SEGMENT_SHIFT) - 1


@inline_kernel
def _segment_of(slot):
    return (slot >> SEGMENT_SHIFT) & SEGMENT_MASK


@inline_kernel
def _number(slot, record_bytes):
    return (slot & _OFFSET_MASK) // record_bytes


@inline_kernel
def _set(bits, number):
    bits[number >> 3] |= np.uint8(1 << (number & 7))


@inline_kernel
def _is_set(bits, number):
    return (bits[number >> 3] >> (number & 7)) & 1 != 0


@kernel
def _position(segments, segment, guess):
    """Where `segment` is in the ascending `segments`, or -1; `guess` is tried first."""
    if guess >= 0 and segments[guess] == segment:
        return guess
    low = 0
    high = segments.size
    while low < high:
        middle = (low + high) >> 1
        if segments[middle] < segment:
            low = middle + 1
        else:
            high = middle
    if low < segments.size and segments[low] == segment:
        return low
    return -1


@inline_kernel
def _look_ahead(rows, i, location, words, geo):
    """Random rows miss every cache: first their locations are fetched, then their metadata."""
    if i + 2 * _AHEAD < rows.size:
        prefetch(location, rows[i + 2 * _AHEAD])
    if i + _AHEAD < rows.size:
        ahead = location[rows[i + _AHEAD]]
        if ahead < 0:
            prefetch(words, meta_of(ahead & ROW_MASK, geo) + 2)


@kernel
def mark_rows(start, stop, location, words, geo, segments, bits):
    """Sets the bits of the records of rows [start, stop); a frame counts as what backs it.

    segments int64[k], ascending; bits uint8[k, n].
    """
    k = -1
    for row in range(start, stop):
        place = location[row]
        if place < 0:
            place = words[meta_of(place & ROW_MASK, geo) + 2]
        if place > 0:
            k = _position(segments, _segment_of(place), k)
            if k >= 0:
                _set(bits[k], _number(place, geo[1]))


@kernel
def count_marked(slots, record_bytes, segments, bits, counts):
    """counts[k] += the records among `slots` whose bit is set."""
    k = -1
    for i in range(slots.size):
        if slots[i] > 0:
            k = _position(segments, _segment_of(slots[i]), k)
            if k >= 0 and _is_set(bits[k], _number(slots[i], record_bytes)):
                counts[k] += 1


@kernel
def find(rows, first_slot, location, words, geo, needed, unbacked):
    """Marks records that a location or a clean frame refers to; record i's slot is
    first_slot + i * record_bytes.

    What backs a changed record will never be read again: it is let go of, and marked as unbacked.
    Returns how many were.
    """
    count = 0
    for i in range(rows.size):
        _look_ahead(rows, i, location, words, geo)
        slot = first_slot + i * geo[1]
        place = location[rows[i]]
        unbacked[i] = False
        if place == slot:
            needed[i] = True
        elif place < 0:
            meta = meta_of(place & ROW_MASK, geo)
            if words[meta + 2] == slot:
                if words[meta + 1] & STATE == CLEAN:
                    needed[i] = True
                else:
                    words[meta + 2] = 0
                    unbacked[i] = True
                    count += 1
    return count


@kernel
def find_marked(first_slot, record_bytes, bits, copied, needed):
    """Marks records whose bit is set and who were not copied yet."""
    for i in range(needed.size):
        number = _number(first_slot + i * record_bytes, record_bytes)
        if _is_set(bits, number) and not _is_set(copied, number):
            needed[i] = True


@kernel
def mark_slots(slots, chosen, record_bytes, bits):
    """Sets the bits of the chosen slots, all of one segment."""
    for i in range(slots.size):
        if chosen[i]:
            _set(bits, _number(slots[i], record_bytes))


@kernel
def are_marked(slots, record_bytes, bits, out):
    """out[i] = whether the bit of slot i is set; all slots are of one segment."""
    for i in range(slots.size):
        out[i] = _is_set(bits, _number(slots[i], record_bytes))


@kernel
def move(rows, old, new, location, words, geo, moved, unbacked):
    """Whatever refers to old[i] refers to new[i] from now on, if it is row i's.

    What backs a changed record is let go of instead, and marked as unbacked. Returns the number of
    moved and of unbacked ones.
    """
    n_moved = 0
    n_unbacked = 0
    for i in range(rows.size):
        _look_ahead(rows, i, location, words, geo)
        place = location[rows[i]]
        moved[i] = False
        unbacked[i] = False
        if place == old[i]:
            location[rows[i]] = new[i]
            moved[i] = True
            n_moved += 1
        elif place < 0:
            meta = meta_of(place & ROW_MASK, geo)
            if words[meta + 2] != old[i]:
                continue
            if words[meta + 1] & STATE == CLEAN:
                words[meta + 2] = new[i]
                moved[i] = True
                n_moved += 1
            else:
                words[meta + 2] = 0
                unbacked[i] = True
                n_unbacked += 1
    return n_moved, n_unbacked


@register_warmup
def _warm_up() -> None:
    """Calls every kernel once, with the types of real calls."""
    words = np.zeros(SLAB_BYTES // 8, np.int64)
    geo = np.array([0, 16, 4, 1024], np.int64)
    location, rows, slots = (
        np.zeros(4, np.int64),
        np.arange(2, dtype=np.int64),
        np.zeros(2, np.int64),
    )
    flags, bits = np.zeros(2, np.bool_), np.zeros((1, 8), np.uint8)
    segments = np.ones(1, np.int64)
    mark_rows(0, 4, location, words, geo, segments, bits)
    count_marked(slots, 16, segments, bits, np.zeros(1, np.int64))
    find(rows, 1, location, words, geo, flags, flags.copy())
    find_marked(1, 16, bits[0], bits[0], flags)
    mark_slots(slots, flags, 16, bits[0])
    are_marked(slots, 16, bits[0], flags)
    move(rows, slots, slots, location, words, geo, flags, flags.copy())
