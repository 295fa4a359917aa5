# pyright: basic
"""Kernels that choose which records leave the cache, and that make room.

`choose` is the hand of a clock with use counts. It looks for records that were not used of late:
dirty ones are copied to be written, clean ones join the table's queue of victims, and so do written
ones once they are clean. `evict` takes from that queue only, so it costs what it frees. A frame's
QUEUED bit says that it has an entry; whatever is used again loses it.

`queue` of a kernel: int64, its size a power of two.
"""

from typing import Final

import numpy as np

from momentd_server.jit import fence, inline_kernel, kernel, prefetch, register_warmup
from momentd_server.jit.row_protocol import FRESH, USE
from momentd_server.storage.frames import (
    CLEAN,
    COPIED,
    DIRTY,
    FRESH_FRAMES,
    PIN,
    QUEUED,
    ROW_MASK,
    STATE,
    UPDATE_SHIFT,
    copy_bytes,
    meta_of,
    record_of,
)
from momentd_server.storage.space import SLAB_BYTES

# `tally` of a kernel: int64, one for a table. First and next entry of its queue of victims; frames
# that have an entry; frames whose record was not used yet.
HEAD: Final = 0
TAIL: Final = 1
QUEUED_FRAMES: Final = 2
TALLY_WORDS: Final = 4

_AHEAD: Final = 16


@inline_kernel
def _queue(frame, meta, word, words, geo, queue, tally):
    """Gives a clean frame an entry in the queue; the oldest entry of a full queue is lost."""
    if tally[TAIL] - tally[HEAD] == queue.size:
        oldest = meta_of(queue[tally[HEAD] & (queue.size - 1)], geo) + 1
        tally[HEAD] += 1
        if words[oldest] & QUEUED:
            words[oldest] &= ~QUEUED
            tally[QUEUED_FRAMES] -= 1
    queue[tally[TAIL] & (queue.size - 1)] = frame
    tally[TAIL] += 1
    tally[QUEUED_FRAMES] += 1
    words[meta + 1] = word | QUEUED


@kernel
def evict(queue, tally, want, location, words, geo, out):
    """Frees up to `want` frames of the queue of victims; returns how many were freed into `out`.

    An entry whose frame was used since, or is pinned, is passed over.
    """
    found = 0
    mask = queue.size - 1
    while found < want and tally[HEAD] < tally[TAIL]:
        at = tally[HEAD]
        tally[HEAD] += 1
        if at + 2 * _AHEAD < tally[TAIL]:
            prefetch(words, meta_of(queue[(at + 2 * _AHEAD) & mask], geo))
        if at + _AHEAD < tally[TAIL]:
            ahead = words[meta_of(queue[(at + _AHEAD) & mask], geo)] & ROW_MASK
            if ahead < location.size:
                prefetch(location, ahead)
        frame = queue[at & mask]
        meta = meta_of(frame, geo)
        word = words[meta + 1]
        if word & QUEUED == 0:
            continue
        tally[QUEUED_FRAMES] -= 1
        if words[meta] >= PIN:
            words[meta + 1] = word & ~QUEUED
            continue
        location[words[meta]] = words[meta + 2]
        fence()
        words[meta + 1] = 0
        out[found] = frame
        found += 1
    return found


@kernel
def move_queue(old, tally, slab, queue):
    """Moves the entries to a queue of at least that size, but for those of a slab that is free."""
    count = 0
    for at in range(tally[HEAD], tally[TAIL]):
        frame = old[at & (old.size - 1)]
        if frame >> 16 != slab:
            queue[count] = frame
            count += 1
    tally[HEAD] = 0
    tally[TAIL] = count


@kernel
def evict_slab(slab, location, words, geo, tally, out):
    """Frees all clean, unpinned frames of one slab into `out`.

    Returns (freed, dirty, otherwise in use: pinned or reserved).
    """
    freed = 0
    dirty = 0
    pinned = 0
    for i in range(geo[2]):
        frame = (slab << 16) | i
        meta = meta_of(frame, geo)
        word = words[meta + 1]
        if words[meta] >= PIN:
            pinned += 1
        elif word & STATE == CLEAN:
            tally[FRESH_FRAMES] -= word & USE == FRESH
            tally[QUEUED_FRAMES] -= (word & QUEUED) >> 7
            location[words[meta]] = words[meta + 2]
            fence()
            words[meta + 1] = 0
            out[freed] = frame
            freed += 1
        elif word & STATE != 0:
            dirty += 1
    return freed, dirty, pinned


@kernel
def choose(
    slabs,
    hand,
    want,
    max_scan,
    age,
    space,
    words,
    geo,
    queue,
    tally,
    buffer,
    rows,
    updates,
    old,
    out,
):
    """The hand: takes `age` from use counts, finds up to `want` records that have none left.

    Dirty ones are copied into `buffer` (uint8, >= want * record_bytes) and marked copied; clean
    ones join the queue of victims. old: hash of each copied record's last version on disk.
    age 0: every dirty record is copied, used or pinned or not, and nothing else is done.
    Returns (copied, queued, frames scanned).
    """
    frames = geo[2]
    nbytes = geo[1]
    total = slabs.size * frames
    copied = 0
    queued = 0
    scanned = 0
    at = hand[0] % total
    while scanned < max_scan and copied + queued < want:
        scanned += 1
        frame = (slabs[at // frames] << 16) | (at % frames)
        at += 1
        if at == total:
            at = 0
        meta = meta_of(frame, geo)
        word = words[meta + 1]
        state = word & STATE
        if age == 0:
            if state != DIRTY:
                continue
        else:
            if state in (0, COPIED) or word & QUEUED or words[meta] >= PIN:
                continue
            use = word & USE
            if use == FRESH:
                tally[FRESH_FRAMES] -= 1
                words[meta + 1] = word & ~USE
                continue
            if use:
                words[meta + 1] = (word & ~USE) | max(use - (age << 2), 0)
                continue
            if state == CLEAN:
                _queue(frame, meta, word, words, geo, queue, tally)
                queued += 1
                continue
        copy_bytes(space, record_of(frame, geo), buffer, copied * nbytes, nbytes)
        rows[copied] = words[meta] & ROW_MASK
        updates[copied] = word >> UPDATE_SHIFT
        old[copied] = words[meta + 3]
        fence()
        words[meta + 1] = word | COPIED
        out[copied] = frame
        copied += 1
    hand[0] = at
    return copied, queued, scanned


@kernel
def publish_spill(
    frames,
    rows,
    updates,
    slots,
    hashes,
    checks,
    victims,
    check,
    words,
    geo,
    queue,
    tally,
    old_slots,
):
    """Backs copied frames by their new slots; those still as copied become clean.

    victims: they join the queue of victims then, unless they are pinned.
    Returns the number of frames that became clean; old_slots holds what backed each of those.
    """
    cleaned = 0
    for k in range(frames.size):
        meta = meta_of(frames[k], geo)
        word = words[meta + 1]
        # The digest's chain goes on from the version on disk, changed meanwhile or not.
        words[meta + 3] = hashes[k]
        if word & STATE != COPIED or word >> UPDATE_SHIFT != updates[k]:
            continue
        old_slots[cleaned] = words[meta + 2]
        check[rows[k]] = checks[k]
        words[meta + 2] = slots[k]
        fence()
        word = (word & ~STATE) | CLEAN
        if victims and words[meta] < PIN:
            _queue(frames[k], meta, word, words, geo, queue, tally)
        else:
            words[meta + 1] = word
        cleaned += 1
    return cleaned


@kernel
def withdraw_copies(frames, updates, words, geo):
    """A spill failed: copied frames are plainly dirty again."""
    for k in range(frames.size):
        meta = meta_of(frames[k], geo)
        word = words[meta + 1]
        if word & STATE == COPIED and word >> UPDATE_SHIFT == updates[k]:
            words[meta + 1] = (word & ~STATE) | DIRTY


@register_warmup
def _warm_up() -> None:
    """Calls every kernel once, with the types of real calls, on a slab of its own."""
    space = np.zeros(SLAB_BYTES, np.uint8)
    words = space.view(np.int64)
    geo = np.array([0, 16, 4, 1024], np.int64)
    location, check = np.zeros(4, np.int64), np.zeros(4, np.uint32)
    rows = np.arange(2, dtype=np.int64)
    slabs, hand, out, zeros = (np.zeros(n, np.int64) for n in (1, 1, 2, 2))
    queue, tally = np.zeros(4, np.int64), np.zeros(TALLY_WORDS, np.int64)
    buffer = np.zeros(32, np.uint8)

    choose(
        slabs, hand, 2, 8, 0, space, words, geo, queue, tally, buffer, rows, zeros, zeros, out,
    )  # fmt: skip
    withdraw_copies(out, zeros, words, geo)
    publish_spill(
        out, rows, zeros, zeros, zeros, np.zeros(2, np.uint32), True, check, words, geo, queue,
        tally, zeros,
    )  # fmt: skip
    evict(queue, tally, 0, location, words, geo, out)
    move_queue(queue, tally, 1, queue.copy())
    evict_slab(0, location, words, geo, tally, np.zeros(4, np.int64))
