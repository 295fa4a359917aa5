# pyright: basic
"""Kernels over frames, locations and metadata: everything the lane does besides the rules.

Words are handled as int64, so that a location's tag is its sign: negative = frame, 0 = nowhere,
positive = slot. Metadata of a frame is four words:

    0  row, with the number of pins in bits 63..48
    1  state word: update number << 8 | QUEUED (128) | use count (jit/row_protocol.py, bits 2..6)
       | state (0 free, 1 clean, 2 dirty, 3 copied)
    2  backing: the slot that holds the same bytes, or 0
    3  hash of the record's last version on disk, or 0

Every change of state is one aligned 8-byte store, fenced: bytes and metadata come before the word
that makes them count, and a location leads away from a frame before the frame is free.
"""

from typing import Final

import numpy as np

from momentd_server.jit import fence, inline_kernel, kernel, prefetch, register_warmup
from momentd_server.jit.row_protocol import FRESH, USE, used
from momentd_server.storage.space import SLAB_BYTES

CLEAN: Final = 1
DIRTY: Final = 2
COPIED: Final = 3
STATE: Final = 3
QUEUED: Final = 128
UPDATE_SHIFT: Final = 8
PIN: Final = 1 << 48
ROW_MASK: Final = PIN - 1
FRAME_SIGN: Final = -(1 << 63)
SEGMENT_SHIFT: Final = 28
SEGMENT_MASK: Final = (1 << 34) - 1  # above it is the tag
FRESH_FRAMES: Final = 3  # see `tally` in storage/victim_kernels.py
_AHEAD: Final = 16
_SLAB_WORDS: Final = SLAB_BYTES // 8

# `geo` of a kernel: int64 (slabs_at, record_bytes, frames of a slab, records_at), one for a table.


def dirty_word(update_number: int) -> int:
    """The state word of a record changed by this update, without its use count."""
    return update_number << UPDATE_SHIFT | DIRTY


@kernel
def meta_of(frame, geo):
    """Index of a frame's first metadata word."""
    return geo[0] // 8 + (frame >> 16) * _SLAB_WORDS + (frame & 0xFFFF) * 4


@kernel
def record_of(frame, geo):
    """Byte offset of a frame's record."""
    return geo[0] + (frame >> 16) * SLAB_BYTES + geo[3] + (frame & 0xFFFF) * geo[1]


@inline_kernel
def copy_bytes(source, source_at, target, target_at, nbytes):
    """target[target_at:] = source[source_at:], nbytes of them.

    Over slices, whose indices cannot be negative: the compiler makes one memory copy of it, else
    it copies byte by byte, 15 times slower.
    """
    old = source[source_at : source_at + nbytes]
    new = target[target_at : target_at + nbytes]
    for b in range(new.shape[0]):
        new[b] = old[b]


@kernel
def lookup(worker, start, stop, rows, location, words, geo, index, offset, counts):
    """Where the records of rows [start, stop) are.

    In a frame: `index` = its state word, `offset` = its record's byte offset. Else `index` = -1 and
    `offset` = the location word (a slot, or 0). counts[worker] = (missing; of the others: dirty
    already, not used yet, queued as victims).
    """
    missing = 0
    dirty = 0
    fresh = 0
    queued = 0
    for i in range(start, min(start + _AHEAD * 2, stop)):
        prefetch(location, rows[i])
    for i in range(start, stop):
        if i + _AHEAD * 2 < stop:
            prefetch(location, rows[i + _AHEAD * 2])
        if i + _AHEAD < stop:
            ahead = location[rows[i + _AHEAD]]
            if ahead < 0:
                prefetch(words, meta_of(ahead & ROW_MASK, geo))
        place = location[rows[i]]
        if place < 0:
            frame = place & ROW_MASK
            meta = meta_of(frame, geo)
            index[i] = meta + 1
            offset[i] = record_of(frame, geo)
            word = words[meta + 1]
            dirty += (word & DIRTY) >> 1
            fresh += word & USE == FRESH
            queued += (word & QUEUED) >> 7
        else:
            index[i] = -1
            offset[i] = place
            missing += 1
    counts[worker, 0] = missing
    counts[worker, 1] = dirty
    counts[worker, 2] = fresh
    counts[worker, 3] = queued


@kernel
def reserve(free, top, count, words, geo, out):
    """Takes `count` frames off the free list's end and pins them: nobody sees or steals them."""
    for k in range(count):
        frame = free[top - 1 - k]
        words[meta_of(frame, geo)] = PIN
        out[k] = frame


@kernel
def unreserve(frames, count, words, geo, free, top):
    """Puts reserved frames back on the free list."""
    for k in range(count):
        words[meta_of(frames[k], geo)] = 0
        free[top + k] = frames[k]


@kernel
def change_pins(index, words, amount):
    """Adds `amount` pins to the frame of every row that has one. A pinned frame is not evicted."""
    for i in range(index.size):
        if index[i] >= 0:
            words[index[i] - 1] += amount * PIN


@kernel
def record_offsets(frames, geo, out):
    """Byte offset of each frame's record."""
    for k in range(frames.size):
        out[k] = record_of(frames[k], geo)


@kernel
def initialise(frames, first_touch, space, geo, initial):
    """Fills reserved frames of never-touched rows with the initial record. Nobody sees them yet."""
    nbytes = geo[1]
    for k in range(frames.size):
        if first_touch[k]:
            copy_bytes(initial, 0, space, record_of(frames[k], geo), nbytes)


@kernel
def mark_common(rows, seen, other_rows, other_seen, common):
    """common[k] = whether row k is on disk and `other` brings it from there; returns how many.

    Both lists of rows ascend; `seen` are their location words.
    """
    count = 0
    j = 0
    for k in range(rows.size):
        if seen[k] <= 0:
            continue
        while j < other_rows.size and other_rows[j] < rows[k]:
            j += 1
        if j == other_rows.size:
            break
        if other_rows[j] == rows[k] and other_seen[j] == seen[k] and not common[k]:
            common[k] = True
            count += 1
    return count


@kernel
def publish(
    missing, rows, seen, frames, hashes, pins, location, words, geo, tally, index, offset, unused
):
    """Makes fetched records reachable, if their location still is what was read.

    missing: positions in `rows`; seen: their location words; frames: the reserved frames. Frames
    that were not needed go to `unused`. `pins` are added to each record that is there then.
    Returns (unused, changed meanwhile: look up again, first touches).
    """
    n_unused = 0
    n_changed = 0
    n_first = 0
    for k in range(min(_AHEAD, missing.size)):
        prefetch(location, rows[missing[k]])
    for k in range(missing.size):
        if k + _AHEAD < missing.size:
            prefetch(location, rows[missing[k + _AHEAD]])
        i = missing[k]
        row = rows[i]
        place = location[row]
        frame = frames[k]
        if place == seen[k]:
            meta = meta_of(frame, geo)
            words[meta] = row + pins * PIN
            words[meta + 2] = place
            words[meta + 3] = hashes[k]
            if place == 0:
                words[meta + 1] = FRESH | DIRTY
                n_first += 1
            else:
                words[meta + 1] = FRESH | CLEAN
            fence()
            location[row] = frame | FRAME_SIGN
            tally[FRESH_FRAMES] += 1
        else:
            unused[n_unused] = frame
            n_unused += 1
            if place >= 0:
                n_changed += 1
                continue
            frame = place & ROW_MASK
            meta = meta_of(frame, geo)
            words[meta] += pins * PIN
        index[i] = meta + 1
        offset[i] = record_of(frame, geo)
    return n_unused, n_changed, n_first


@kernel
def count_words(index, words):
    """Of the records at `index` (those >= 0): (dirty, not used yet, queued as victims)."""
    dirty = 0
    fresh = 0
    queued = 0
    for i in range(index.size):
        if index[i] >= 0:
            word = words[index[i]]
            dirty += (word & DIRTY) >> 1
            fresh += word & USE == FRESH
            queued += (word & QUEUED) >> 7
    return dirty, fresh, queued


@kernel
def without_slab(free, top, slab):
    """Takes the frames of a slab out of a free list. Returns the new length."""
    kept = 0
    for k in range(top):
        if free[k] >> 16 != slab:
            free[kept] = free[k]
            kept += 1
    return kept


@kernel
def locate(rows, location, geo, source):
    """source[i] = byte offset of row i's record in the space, -1 if never touched, or -2 - slot.

    Returns the number of slots.
    """
    slots = 0
    for i in range(rows.size):
        place = location[rows[i]]
        if place < 0:
            source[i] = record_of(place & ROW_MASK, geo)
        elif place == 0:
            source[i] = -1
        else:
            source[i] = -2 - place
            slots += 1
    return slots


@kernel
def copy_field(worker, start, stop, source, space, field_at, initial, out):
    """Copies one field of each located record to out: uint8, (n, field bytes). Skips slots."""
    nbytes = out.shape[1]
    for i in range(start, stop):
        at = source[i]
        if at >= 0:
            copy_bytes(space, at + field_at, out[i], 0, nbytes)
        elif at == -1:
            copy_bytes(initial, field_at, out[i], 0, nbytes)


@kernel
def copy_fetched_field(which, records, record_bytes, field_at, out):
    """The same for records that were read from disk into `records`."""
    nbytes = out.shape[1]
    for k in range(which.size):
        copy_bytes(records, k * record_bytes + field_at, out[which[k]], 0, nbytes)


@kernel
def scatter_field(worker, start, stop, index, offset, word, values, order, field_at, space, words):
    """Writes one field of each row: values uint8, (n, field bytes), row i's at order[i]."""
    nbytes = values.shape[1]
    for i in range(start, stop):
        words[index[i]] = used(words[index[i]], word)
        fence()
        copy_bytes(values[order[i]], 0, space, offset[i] + field_at, nbytes)


@kernel
def forget_fresh(slabs, words, geo, tally):
    """Records of these slabs that were not used yet count as used once."""
    for s in range(slabs.size):
        for i in range(geo[2]):
            at = meta_of((slabs[s] << 16) | i, geo) + 1
            if words[at] & STATE and words[at] & USE == FRESH:
                words[at] &= ~USE
                tally[FRESH_FRAMES] -= 1


@kernel
def clone_locations(start, stop, source, source_check, words, geo, location, check):
    """Copies slots of rows [start, stop); a clean frame counts as the slot that backs it.

    Returns the number of rows whose frame is dirty (there must be none).
    """
    dirty = 0
    for row in range(start, stop):
        place = source[row]
        if place < 0:
            meta = meta_of(place & ROW_MASK, geo)
            if words[meta + 1] & STATE != CLEAN:
                dirty += 1
            place = words[meta + 2]
        location[row] = place
        check[row] = source_check[row]
    return dirty


@kernel
def count_segments(slots, lowest, counts):
    """counts[segment - lowest] += 1 for every slot word."""
    for k in range(slots.size):
        if slots[k] > 0:
            counts[((slots[k] >> SEGMENT_SHIFT) & SEGMENT_MASK) - lowest] += 1


@kernel
def segment_range(slots):
    """Lowest and highest segment id among slot words; (1, 0) if there is none."""
    lowest = np.int64(1) << 40
    highest = np.int64(0)
    for k in range(slots.size):
        if slots[k] > 0:
            segment = (slots[k] >> SEGMENT_SHIFT) & SEGMENT_MASK
            lowest = min(lowest, segment)
            highest = max(highest, segment)
    if lowest > highest:
        return np.int64(1), np.int64(0)
    return lowest, highest


@kernel
def count_states(slabs, words, geo):
    """Frames of a table, for the tests' checks: (free, clean, dirty or copied, fresh, queued)."""
    free = 0
    clean = 0
    dirty = 0
    fresh = 0
    queued = 0
    for s in range(slabs.size):
        for i in range(geo[2]):
            word = words[meta_of((slabs[s] << 16) | i, geo) + 1]
            state = word & STATE
            fresh += state != 0 and word & USE == FRESH
            queued += word & QUEUED != 0
            if state == 0:
                free += 1
            elif state == CLEAN:
                clean += 1
            else:
                dirty += 1
    return free, clean, dirty, fresh, queued


@register_warmup
def _warm_up() -> None:
    """Calls every kernel once, with the types of real calls, on a slab of its own."""
    space = np.zeros(SLAB_BYTES, np.uint8)
    words = space.view(np.int64)
    geo = np.array([0, 16, 4, 1024], np.int64)
    location = np.zeros(4, np.int64)
    check = np.zeros(4, np.uint32)
    rows = np.arange(2, dtype=np.int64)
    index, offset, out, zeros = (np.zeros(2, np.int64) for _ in range(4))
    slabs, tally = np.zeros(1, np.int64), np.zeros(4, np.int64)
    free = np.arange(4, dtype=np.int64)
    initial = np.zeros(16, np.uint8)
    field = np.zeros((2, 8), np.uint8)
    buffer = np.zeros(32, np.uint8)

    lookup(0, 0, 2, rows, location, words, geo, index, offset, np.zeros((1, 4), np.int64))
    reserve(free, 4, 2, words, geo, out)
    record_offsets(out, geo, offset)
    initialise(out, zeros == 0, space, geo, initial)
    mark_common(rows, zeros, rows, zeros, np.zeros(2, np.bool_))
    publish(
        rows, rows, zeros, out, zeros, 0, location, words, geo, tally, index, offset, out.copy(),
    )  # fmt: skip
    count_words(index, words)
    change_pins(index, words, 1)
    change_pins(index, words, -1)
    scatter_field(0, 0, 2, index, offset, dirty_word(1), field, rows, 0, space, words)
    locate(rows, location, geo, offset)
    copy_field(0, 0, 2, offset, space, 0, initial, field)
    copy_fetched_field(rows, buffer, 16, 0, field)
    without_slab(free, 4, 1)
    unreserve(out, 0, words, geo, free, 0)
    clone_locations(0, 2, location, check, words, geo, location.copy(), check.copy())
    segment_range(zeros)
    count_segments(zeros, 0, zeros)
    count_states(slabs, words, geo)
    forget_fresh(slabs, words, geo, tally)
