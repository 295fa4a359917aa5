"""Cold reads: every record where it belongs and checked, whatever size, order and fault."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from momentd_server.storage import read_kernels
from momentd_server.storage.diskio import (
    BOUNCE_BYTES,
    READ_MISMATCH,
    READ_OK,
    READ_PAST_END,
    ReadPool,
    aligned_buffer,
)
from tests.support.segments import FAMILY, LAYOUT, flip_bit, write_batch


def _read(pool, store, batches, picks, *, checks=None, family=FAMILY):
    """Read (batch, index) pairs in that order; returns (status, records, hashes)."""
    size = batches[0].segment.record_bytes
    ids = np.array([batches[b].segment.id for b, _ in picks])
    offsets = np.array([batches[b].offsets[i] for b, i in picks], np.int64)
    rows = np.array([batches[b].rows[i] for b, i in picks], np.int64)
    if checks is None:
        checks = np.array([batches[b].checks[i] for b, i in picks], np.uint32)
    # Frames lie anywhere in the space: here backward, eight bytes apart.
    dest = aligned_buffer(len(picks) * (size + 8))
    dest_offsets = np.arange(len(picks))[::-1] * (size + 8)
    hashes = np.zeros(len(picks), np.uint64)
    initial = np.zeros(size, np.uint8)
    with store.pin(ids) as pins:
        status = pool.read(
            pins.fds, offsets, size, rows, checks, family, initial, dest, dest_offsets, hashes
        )
    records = np.stack([dest[at : at + size] for at in dest_offsets])
    return status, records, hashes


@pytest.mark.parametrize("record_bytes", [32, 40, 1024, 1032, 6144, 8 * 5001, 1 << 20])
def test_random_records_of_several_segments(store, pool, record_bytes):
    count = 200 if record_bytes < 10_000 else 6
    batches = [
        write_batch(store, store.create(FAMILY, LAYOUT, record_bytes), range(count), seed=seed)
        for seed in range(3)
    ]
    picks = [(b, i) for b in range(3) for i in range(count)]
    picks = [picks[k] for k in np.random.default_rng(0).permutation(len(picks))]
    status, records, hashes = _read(pool, store, batches, picks)
    assert (status == READ_OK).all()
    for k, (b, i) in enumerate(picks):
        np.testing.assert_array_equal(records[k], batches[b].records[i])
        assert hashes[k] == batches[b].hashes[i]


def test_one_row_wanted_twice_and_no_rows(store, pool):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, 1032), range(5))
    status, records, _ = _read(pool, store, [batch], [(0, 3), (0, 3)])
    assert (status == READ_OK).all()
    np.testing.assert_array_equal(records[0], records[1])
    none = np.zeros(0, np.int64)
    initial = np.zeros(1032, np.uint8)
    assert (
        pool.read(none, none, 1032, none, none, 1, initial, initial, none, none.view("u8")).size
        == 0
    )


def test_initial_records_are_checked_as_zero(store, pool):
    segment = store.create(FAMILY, LAYOUT, 64)
    buffer = aligned_buffer(64)
    zero = np.zeros(1, np.uint64)
    store.append(segment, buffer, np.array([4]), zero, zero, 0)
    check = np.array([read_kernels.fold_check(zero[0], np.uint64(FAMILY))], np.uint32)
    hashes = np.ones(1, np.uint64)
    with store.pin(np.array([segment.id])) as pins:
        status = pool.read(
            pins.fds,
            np.array([4096]),
            64,
            np.array([4]),
            check,
            FAMILY,
            np.zeros(64, np.uint8),
            aligned_buffer(64),
            np.zeros(1, np.int64),
            hashes,
        )
    assert (status[0], hashes[0]) == (READ_OK, 0)


def test_a_flipped_bit_condemns_its_record_only(store, pool):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, 1032), range(50))
    flip_bit(store.path(batch.segment), int(batch.offsets[20]) + 1031, 7)
    status, records, _ = _read(pool, store, [batch], [(0, i) for i in range(50)])
    assert np.flatnonzero(status).tolist() == [20]
    assert status[20] == READ_MISMATCH
    np.testing.assert_array_equal(records[19], batch.records[19])


@pytest.mark.parametrize("wrong", ["family", "row", "slot"])
def test_right_bytes_of_the_wrong_place_are_refused(store, pool, wrong):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, 1024), range(4))
    family = FAMILY + 1 if wrong == "family" else FAMILY
    checks = batch.checks[1:2]
    if wrong == "row":
        batch.rows[1] = 3
    pick = (0, 2) if wrong == "slot" else (0, 1)
    status, _, _ = _read(pool, store, [batch], [pick], checks=checks, family=family)
    assert status.tolist() == [READ_MISMATCH]


@pytest.mark.parametrize("record_bytes", [1032, 1 << 20])
def test_a_file_that_ends_too_early(store, pool, record_bytes):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, record_bytes), range(4))
    os.truncate(store.path(batch.segment), int(batch.offsets[2]) + 500)
    status, _, _ = _read(pool, store, [batch], [(0, i) for i in range(4)])
    assert status.tolist() == [READ_OK, READ_OK, READ_PAST_END, READ_PAST_END]


def test_errors_of_the_system_are_reported_by_number(store, pool):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, 1024), range(3))
    size, n = 1024, 3
    closed = os.dup(0)
    os.close(closed)
    status = pool.read(
        np.full(n, closed),
        batch.offsets,
        size,
        batch.rows,
        batch.checks,
        FAMILY,
        np.zeros(size, np.uint8),
        aligned_buffer(n * size),
        np.arange(n) * size,
        np.zeros(n, np.uint64),
    )
    assert status.tolist() == [errno.EBADF] * n


def test_concurrent_callers_get_their_own_records(store, pool):
    batches = [
        write_batch(store, store.create(FAMILY, LAYOUT, 1032), range(300), seed=seed)
        for seed in range(6)
    ]
    failures = []

    def reader(b):
        rng = np.random.default_rng(b)
        for _ in range(40):
            picks = [(b, int(i)) for i in rng.integers(0, 300, rng.integers(1, 60))]
            status, records, _ = _read(pool, store, batches, picks)
            wanted = np.stack([batches[b].records[i] for _, i in picks])
            if status.any() or not np.array_equal(records, wanted):
                failures.append(b)

    threads = [threading.Thread(target=reader, args=(b,)) for b in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_more_callers_than_lines_wait_their_turn(store):
    batch = write_batch(store, store.create(FAMILY, LAYOUT, 1024), range(64))
    pool = ReadPool(2)
    results = []

    def reader(i):
        results.append(_read(pool, store, [batch], [(0, i)])[0].tolist())

    count = 2 * read_kernels.JOBS
    threads = [threading.Thread(target=reader, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[READ_OK]] * count
    pool.close()


def test_closing_ends_the_threads():
    pool = ReadPool(5)
    names = {f"reader-{i}" for i in range(5)}
    before = [t for t in threading.enumerate() if t.name in names]
    assert len(before) >= 5
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)


def _plan(fds, offsets, record_bytes):
    fds, offsets = np.array(fds), np.array(offsets)
    order = np.argsort(fds << 40 | offsets)
    requests = np.empty((order.size, read_kernels.REQUEST_WORDS), np.int64)
    count = read_kernels.plan_requests(order, fds, offsets, record_bytes, BOUNCE_BYTES, requests)
    return requests[:count].tolist()


def test_neighbours_share_a_read():
    # One block holds both; the third touches it; the fourth is far; the fifth in another file.
    offsets = [4096, 5128, 8184, 1 << 27, 4096]
    assert _plan([5, 5, 5, 5, 6], offsets, 1032) == [
        [5, 4096, 8192, 0, 3],
        [5, 1 << 27, 4096, 3, 1],
        [6, 4096, 4096, 4, 1],
    ]


def test_one_block_between_neighbours_is_read_along():
    offsets = [4096, 3 * 4096, 6 * 4096]
    assert _plan([5, 5, 5], offsets, 1024) == [[5, 4096, 3 * 4096, 0, 2], [5, 6 * 4096, 4096, 2, 1]]


def test_a_shared_read_ends_at_the_bounce_buffer():
    planned = _plan([5] * 200, [4096 + 1024 * i for i in range(200)], 1024)
    assert [request[2] for request in planned] == [BOUNCE_BYTES, 200 * 1024 - BOUNCE_BYTES]
    assert sum(request[4] for request in planned) == 200


def test_offsets_beyond_32_bits():
    assert _plan([9], [(1 << 39) + 8], 64) == [[9, 1 << 39, 4096, 0, 1]]


# The kernels bind `pread64` by name, so a process of its own can give them another one.
_FAULTY_PREAD = """
import ctypes, errno, itertools, os, pathlib, sys
import llvmlite.binding
import numpy as np

plan = iter(sys.argv[2].split(","))
calls = []
libc = ctypes.CDLL(None, use_errno=True)
kind = dict(use_errno=True)
@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64,
                  **kind)
def pread64(fd, buffer, nbytes, offset):
    step = next(plan, "all")
    calls.append((step, nbytes, offset))
    if step.startswith("E"):
        ctypes.set_errno(getattr(errno, step))
        return -1
    wanted = nbytes if step == "all" else min(int(step), nbytes)
    data = os.pread(fd, wanted, offset)
    ctypes.memmove(buffer, data, len(data))
    return len(data)

llvmlite.binding.add_symbol("pread64", ctypes.cast(pread64, ctypes.c_void_p).value)

from momentd_server.storage.diskio import ReadPool, aligned_buffer
from tests.support.segments import open_store, write_batch

store = open_store(pathlib.Path(sys.argv[1]))
batch = write_batch(store, store.create(3, 1, 1032), range(20))
fd = os.open(store.path(batch.segment), os.O_RDONLY)
dest, n = aligned_buffer(20 * 1032), 20
pool = ReadPool(1)
status = pool.read(np.full(n, fd), batch.offsets, 1032, batch.rows, batch.checks, 3,
                   np.zeros(1032, np.uint8), dest, np.arange(n) * 1032, np.zeros(n, np.uint64))
assert next(plan, None) is None, "the kernel did not call as often as planned"
good = [bool((dest.reshape(n, 1032)[i] == batch.records[i]).all()) for i in range(n)]
print(status.tolist(), good.count(True))
"""


def _read_with_faults(tmp_path, plan):
    done = subprocess.run(
        [sys.executable, "-c", _FAULTY_PREAD, str(tmp_path / "data"), plan],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    status, _, good = done.stdout.strip().rpartition(" ")
    return [int(s) for s in status.strip("[]").split(",")], int(good)


@pytest.mark.parametrize("plan", ["EINTR,EINTR,all", "4096,8192,all", "EINTR,4096,EINTR,4096,all"])
def test_interrupted_and_short_reads_are_continued(tmp_path, plan):
    assert _read_with_faults(tmp_path, plan) == ([READ_OK] * 20, 20)


def test_a_failed_shared_read_is_tried_record_by_record(tmp_path):
    # The 20 records share one read, which fails; alone, only the third cannot be read.
    status, good = _read_with_faults(tmp_path, "EIO,all,all,EIO")
    assert status == [0, 0, errno.EIO] + [0] * 17
    assert good == 19
