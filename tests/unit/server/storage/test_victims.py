"""The hand, its counts, and the queue of victims, over one slab of eight frames."""

import numpy as np
import pytest

from momentd_server.jit import row_protocol
from momentd_server.storage import frames, victim_kernels
from momentd_server.storage.space import SLAB_BYTES

FRAMES, RECORD = 8, 16


class Slab:
    """Row k is in frame k; `state` is that of all frames."""

    def __init__(self, state: int, queue_size: int = 8) -> None:
        self.space = np.zeros(SLAB_BYTES, np.uint8)
        self.words = self.space.view(np.int64)
        self.geo = np.array([0, RECORD, FRAMES, 1024], np.int64)
        self.location = np.arange(FRAMES, dtype=np.int64) | frames.FRAME_SIGN
        self.queue = np.zeros(queue_size, np.int64)
        self.tally = np.zeros(victim_kernels.TALLY_WORDS, np.int64)
        self.hand = np.zeros(1, np.int64)
        for k in range(FRAMES):
            self.words[4 * k : 4 * k + 3] = k, state, 100 + k

    def word(self, frame: int) -> int:
        return int(self.words[4 * frame + 1])

    def use(self, frame: int) -> None:
        """As an update does; the table counts what changes by that."""
        old = self.word(frame)
        self.tally[victim_kernels.QUEUED_FRAMES] -= bool(old & frames.QUEUED)
        self.tally[frames.FRESH_FRAMES] -= old & row_protocol.USE == row_protocol.FRESH
        self.words[4 * frame + 1] = row_protocol.used(old, frames.dirty_word(1))

    def choose(self, want: int, scan: int = FRAMES, age: int = 1) -> tuple[list[int], int]:
        buffer = np.zeros(FRAMES * RECORD, np.uint8)
        rows, updates, old, out = (np.zeros(FRAMES, np.int64) for _ in range(4))
        copied, queued, _ = victim_kernels.choose(
            np.zeros(1, np.int64), self.hand, want, scan, age, self.space, self.words, self.geo,
            self.queue, self.tally, buffer, rows, updates, old, out,
        )  # fmt: skip
        return out[:copied].tolist(), queued

    def evict(self, want: int) -> list[int]:
        out = np.zeros(FRAMES, np.int64)
        found = victim_kernels.evict(
            self.queue, self.tally, want, self.location, self.words, self.geo, out
        )
        return out[:found].tolist()

    @property
    def queued(self) -> int:
        return int(self.tally[victim_kernels.QUEUED_FRAMES])


def test_clean_records_that_were_not_used_become_victims_in_order():
    slab = Slab(frames.CLEAN)
    assert slab.choose(want=3) == ([], 3)
    assert slab.queued == 3
    assert slab.evict(2) == [0, 1]
    assert slab.location[:3].tolist() == [100, 101, 2 | frames.FRAME_SIGN]
    assert slab.word(0) == 0
    assert slab.evict(5) == [2]
    assert slab.queued == 0


def test_a_victim_that_is_used_or_pinned_stays():
    slab = Slab(frames.CLEAN)
    slab.choose(want=4)
    slab.use(0)
    slab.words[4 * 1] += frames.PIN
    assert slab.evict(8) == [2, 3]
    assert slab.queued == 0
    assert slab.location[0] < 0
    # The pinned one can be chosen again, once it is not.
    slab.words[4 * 1] -= frames.PIN
    assert slab.choose(want=8)[1] == 5


def test_what_is_used_more_often_stays_for_more_turns():
    slab = Slab(frames.DIRTY)
    for frame, uses in ((5, 1), (6, 2), (7, 9)):
        for _ in range(uses):
            slab.use(frame)
    turns = {}
    for turn in range(1, 40):
        for frame in slab.choose(want=FRAMES)[0]:
            turns[frame] = turn
    assert turns == {**dict.fromkeys(range(5), 1), 5: 9, 6: 17, 7: 31}


def test_a_record_that_was_read_ahead_is_passed_once():
    slab = Slab(frames.CLEAN | row_protocol.FRESH)
    slab.tally[frames.FRESH_FRAMES] = FRAMES
    slab.use(0)
    assert slab.word(0) & row_protocol.USE == 0
    assert slab.choose(want=FRAMES) == ([0], 0)
    assert slab.tally[frames.FRESH_FRAMES] == 0
    assert slab.choose(want=FRAMES) == ([], 7)


def test_everything_dirty_is_copied_for_a_flush_and_keeps_its_count():
    slab = Slab(frames.DIRTY | row_protocol.MOST_USED)
    slab.words[4 * 3] += frames.PIN
    slab.words[4 * 4 + 1] = frames.CLEAN
    copied, queued = slab.choose(want=FRAMES, age=0)
    assert (copied, queued) == ([0, 1, 2, 3, 5, 6, 7], 0)
    assert slab.word(0) == frames.COPIED | row_protocol.MOST_USED


@pytest.mark.parametrize("used_again", [False, True])
def test_the_oldest_entry_of_a_full_queue_is_lost_and_can_be_chosen_again(used_again):
    slab = Slab(frames.CLEAN, queue_size=4)
    slab.choose(want=4)
    if used_again:
        slab.use(0)
        slab.words[4 * 0 + 1] = frames.CLEAN | row_protocol.MOST_USED
    assert slab.choose(want=2) == ([], 2)
    assert slab.queued == 4
    assert slab.evict(8) == [2, 3, 4, 5]
    assert slab.queued == 0
    assert slab.location[0] < 0


def test_entries_of_a_slab_that_left_are_taken_out():
    slab = Slab(frames.CLEAN)
    slab.choose(want=3)
    slab.queue[3] = 5 << 16
    slab.tally[victim_kernels.TAIL] = 4
    larger = np.zeros(16, np.int64)
    victim_kernels.move_queue(slab.queue, slab.tally, 5, larger)
    assert larger[:3].tolist() == [0, 1, 2]
    assert slab.tally[[victim_kernels.HEAD, victim_kernels.TAIL]].tolist() == [0, 3]
