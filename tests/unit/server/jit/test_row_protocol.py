"""What a kill leaves behind can be restored and finished: by hand, and with real kills."""

import os
import subprocess
import sys

import numpy as np
import pytest

from momentd_server.jit import mutable_alias, row_protocol


def state(rows=4, workers=2, record=16):
    progress = np.zeros((workers, row_protocol.PROGRESS_WORDS), np.int64)
    row_protocol.clear(progress)
    return {
        "space": np.arange(rows * record, dtype=np.uint8),
        "frame_offset": np.arange(rows)[::-1] * record,
        "undo": np.zeros((workers, record), np.uint8),
        "progress": progress,
    }


def test_nothing_is_restored_before_a_row_and_after_it():
    memory = state()
    before = memory["space"].copy()
    assert row_protocol.restore(**memory) == 0
    row_protocol.begin_part(memory["progress"], 0, 0, 2)
    assert row_protocol.restore(**memory) == 0
    assert row_protocol.remaining(memory["progress"]) == [(0, 2)]
    row_protocol.end_row(memory["progress"], 0, 0)
    assert row_protocol.restore(**memory) == 0
    assert row_protocol.remaining(memory["progress"]) == [(1, 2)]
    np.testing.assert_array_equal(memory["space"], before)


def test_the_row_in_work_of_each_worker_is_restored():
    memory = state()
    before = memory["space"].copy()
    words = np.zeros(4, np.uint64)
    for worker, (first, row) in enumerate([(0, 1), (2, 2)]):
        row_protocol.begin_part(memory["progress"], worker, first, first + 2)
        for done in range(first, row):
            row_protocol.end_row(memory["progress"], worker, done)
        at = memory["frame_offset"][row]
        row_protocol.begin_row(
            memory["space"], at, words, row, np.uint64(7), memory["undo"], memory["progress"],
            worker, row,
        )  # fmt: skip
        memory["space"][at : at + 9] = 255
    first_use = 7 | row_protocol.USE_STEP
    assert words.tolist() == [0, first_use, first_use, 0]
    assert row_protocol.restore(**memory) == 2
    np.testing.assert_array_equal(memory["space"], before)
    assert row_protocol.remaining(memory["progress"]) == [(1, 2), (2, 4)]
    assert row_protocol.restore(**memory) == 0


def test_uses_are_counted_from_the_second_on_and_up_to_a_limit():
    word = row_protocol.used(np.uint64(row_protocol.FRESH | 1), 7 << 8 | 2)
    assert word == 7 << 8 | 2
    counts = []
    for _ in range(5):
        word = row_protocol.used(word | 128, 8 << 8 | 2)
        assert word & ~row_protocol.USE == 8 << 8 | 2
        counts.append(word >> 2 & 31)
    assert counts == [8, 16, 24, 30, 30]


def test_read_only_arrays_of_any_size_have_an_alias():
    frozen = np.frombuffer(b"\x01\x00\x02\x00", np.int16)
    alias = mutable_alias(frozen)
    assert alias.flags.writeable
    assert alias.ctypes.data == frozen.ctypes.data
    assert alias.tolist() == [1, 2]
    assert mutable_alias(np.frombuffer(b"", np.int16)).shape == (0,)
    own = np.zeros(2)
    assert mutable_alias(own) is own


# The parent forks a child that updates shared memory with two threads, kills it after a random
# time, restores, finishes the update itself, and compares with an update that was left alone.
_KILLS = """
import mmap, os, signal, sys, time
import numpy as np
from momentd_server import rules
from momentd_server.jit import Pool, row_protocol
from momentd_server.schema import Schema

ROWS, WIDTH = 1_500, 512
rule = rules.get("sparse_adam")
schema = Schema(ROWS, WIDTH, rule.field_specs(WIDTH, "float32"), rule.name)
random = np.random.default_rng(0)

def shared(shape, dtype):
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize), dtype).reshape(shape)

frames = random.permutation(ROWS)
plan = rules.plan(random.integers(0, ROWS, 2 * ROWS), ROWS, rules.Scratch())
m = plan.distinct
records = rules.Records(
    space=shared(ROWS * schema.record_bytes, np.uint8), words=shared(ROWS, np.uint64),
    frame_index=frames[:m], frame_offset=frames[:m] * schema.record_bytes, word=3 << 8 | 2,
    undo=shared((2, schema.record_bytes), np.uint8), progress=shared((2, 8), np.int64),
    schema=schema,
)
out = shared((m, WIDTH), np.float32)
grads = random.standard_normal((2 * ROWS, WIDTH)).astype(np.float32)
batch = rules.Batch(plan, grads, out_values=out)
hyper = rules.SparseAdamHyper(0.01)
before = random.random((ROWS, schema.record_bytes // 4)).astype(np.float32).view(np.uint8).ravel()

def reset():
    records.space[:] = before
    records.words[:] = 0
    out[:] = np.nan
    row_protocol.clear(records.progress)

def apply(pool, start, stop):
    rule.apply(pool, records, batch, hyper, 2, start, stop)

for _ in range(3):
    reset()
    begin = time.perf_counter()
    apply(Pool(1), 0, m)
duration = time.perf_counter() - begin
expected_space, expected_out = records.space.copy(), out.copy()
ready = shared(1, np.int64)
restored = unfinished = kills = 0
while (restored < 20 or unfinished < 10) and kills < 3_000:
    kills += 1
    reset()
    ready[0] = 0
    # On a busy machine the second thread begins late: some kills come late as well.
    delay = random.uniform(0, duration * (1 + kills % 3))
    child = os.fork()
    if child == 0:
        pool = Pool(2)
        ready[0] = 1
        apply(pool, 0, m)
        os._exit(0)
    while not ready[0]:
        time.sleep(0)
    begin = time.perf_counter()
    while time.perf_counter() - begin < delay:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    restored += row_protocol.restore(
        records.space, records.frame_offset, records.undo, records.progress
    )
    # Each record is the old one or the new one, never anything between; and so is what is said.
    old = before.reshape(ROWS, -1)[frames[:m]]
    new = expected_space.reshape(ROWS, -1)[frames[:m]]
    now = records.space.reshape(ROWS, -1)[frames[:m]]
    is_new = (now == new).all(axis=1)
    assert (is_new | (now == old).all(axis=1)).all(), "a torn record"
    ranges = row_protocol.remaining(records.progress)
    todo = np.zeros(m, bool)
    for start, stop in ranges:
        todo[start:stop] = True
    begun = records.progress[:, row_protocol.LAST] > 0
    assert not is_new[todo].any(), "a row that is not done has changed"
    if begun.all():
        assert is_new[~todo].all(), "a row that is done has not changed"
        assert (out[~todo] == expected_out[~todo]).all(), "a row that is done has no result"
        unfinished += bool(ranges)
        marks = records.words[frames[:m]][is_new] & np.uint64(~row_protocol.USE & (1 << 64) - 1)
        assert (marks == records.word).all(), "changed but not marked"
        for start, stop in ranges:
            apply(Pool(1), start, stop)
        assert (records.space == expected_space).all()
        assert (out == expected_out).all()
print(restored, unfinished)
"""


@pytest.mark.timeout(120)
def test_killed_updates_are_finished_as_if_nothing_had_happened():
    run = subprocess.run(
        [sys.executable, "-c", _KILLS],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    restored, unfinished = map(int, run.stdout.split())
    assert restored >= 20
    assert unfinished >= 10
