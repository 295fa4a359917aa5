# pyright: basic
"""How one row changes so that a kill at any instruction can be undone, and the request finished.

A worker that changes rows [first, last) of a batch stores, in this order:

    begin_part   progress[w, IN_WORK] = -1, then DONE_TO = FIRST = first, LAST = last
    begin_row    words[frame] = word          the frame is dirty, by this update, and used once more
                 undo[w] = record             the old bytes
                 progress[w, IN_WORK] = row   from here on the record may be torn
    (the rule writes the record and the row's result)
    end_row      progress[w, DONE_TO] = row + 1

with a compiler fence between any two, so that whatever a killed process leaves is a prefix of it.
The row in work is torn only if IN_WORK >= DONE_TO: then `restore` puts the old record back. Rows
[DONE_TO, LAST) are what remains of the part. Results are written before the row counts as done,
and a row that is done again from its old record gets the same bits.

Before a request starts, its owner calls `clear`, so that nothing is left of the one before.
"""

import numpy as np

from momentd_server.jit.compiler import inline_kernel, kernel, register_warmup
from momentd_server.jit.intrinsics import fence

IN_WORK, DONE_TO, FIRST, LAST = 0, 1, 2, 3
PROGRESS_WORDS = 8  # a cache line a worker

# Bits 2..6 of a state word: how often the record was used of late, or FRESH before its first use.
# The first use counts nothing, so what is used once only goes first; each later one counts
# USE_STEP, and the hand that looks for victims takes 1 a turn.
USE = 31 << 2
FRESH = 31 << 2
USE_STEP = 8 << 2
MOST_USED = 30 << 2


@inline_kernel
def used(old, word):
    """`word`, which has no use count, with that of the state word `old` after one more use."""
    use = np.int64(old) & USE
    return np.int64(word) | (0 if use == FRESH else min(use + USE_STEP, MOST_USED))


@inline_kernel
def begin_part(progress, worker, first, last):
    """Note that `worker` is about to change rows [first, last)."""
    fence()
    progress[worker, IN_WORK] = -1
    fence()
    progress[worker, DONE_TO] = first
    fence()
    progress[worker, FIRST] = first
    fence()
    progress[worker, LAST] = last
    fence()


@inline_kernel
def begin_row(space, at, words, frame, word, undo, progress, worker, row):
    """Make row `row` safe to change: its record is `space[at : at + undo.shape[1]]`.

    `space` and `undo` have the same element type; `at` counts elements.
    """
    fence()
    words[frame] = used(words[frame], word)
    fence()
    saved = undo[worker]
    old = space[at : at + saved.shape[0]]
    for k in range(saved.shape[0]):
        saved[k] = old[k]
    fence()
    progress[worker, IN_WORK] = row
    fence()


@inline_kernel
def end_row(progress, worker, row):
    """Note that the record and the result of row `row` are complete."""
    fence()
    progress[worker, DONE_TO] = row + 1
    fence()


@kernel
def clear(progress):
    """Forget all parts: nothing in work, nothing to do."""
    for worker in range(progress.shape[0]):
        begin_part(progress, worker, 0, 0)


@kernel
def restore(space, frame_offset, undo, progress):
    """Put back the record of each worker's row in work; returns how many were put back.

    `space` uint8, `frame_offset` int64 (m,) in bytes, by row of the batch; `undo`, `progress` as
    the dead process left them. Afterwards rows [DONE_TO, LAST) of each worker's part are as they
    were before the request. May be killed and called again.
    """
    count = 0
    for worker in range(progress.shape[0]):
        row = progress[worker, IN_WORK]
        if row < progress[worker, DONE_TO]:
            continue
        at = frame_offset[row]
        fence()
        for k in range(undo.shape[1]):
            space[at + k] = undo[worker, k]
        fence()
        progress[worker, IN_WORK] = -1
        fence()
        count += 1
    return count


@register_warmup
def _warm_up() -> None:
    progress = np.zeros((1, PROGRESS_WORDS), np.int64)
    clear(progress)
    restore(np.zeros(8, np.uint8), np.zeros(1, np.int64), np.zeros((1, 8), np.uint8), progress)


def remaining(progress: np.ndarray) -> list[tuple[int, int]]:
    """The row ranges [DONE_TO, LAST) that workers had not done, those that are not empty."""
    ranges = [(int(part[DONE_TO]), int(part[LAST])) for part in progress]
    return [(start, stop) for start, stop in ranges if start < stop]
