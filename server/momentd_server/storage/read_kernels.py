# pyright: basic
"""The reader threads' loop: take a request, pread, copy, check. No GIL anywhere.

The control block is int64[1 + JOBS, JOB_WORDS]. Line 0: wake counter (futex), stop flag. Every
other line is one job, that is one call of `ReadPool.read`; its words are named below. A job is
handed out request by request through its ticket, `requests << 32 | next`: one atomic addition
claims a request and tells how many there are, so a slow thread can never claim a request of a
later job in the same line by a number that it got from an earlier one.
"""

from __future__ import annotations

import errno as errors
from typing import Final

import numpy as np

from momentd_server.jit import inline_kernel, kernel
from momentd_server.storage.hashing import fold_check, hash_record
from momentd_server.storage.libc import (
    array_at,
    atomic_add,
    atomic_load,
    atomic_store,
    copy,
    futex_wait,
    futex_wake,
    pread,
)

BLOCK: Final = 4096
READ_OK: Final = 0
READ_MISMATCH: Final = -1
READ_PAST_END: Final = -2

JOBS: Final = 32
JOB_WORDS: Final = 16
REQUEST_WORDS: Final = 5  # fd, first byte, bytes, first record (in `order`), records

WAKE, STOP = 0, 1
TICKET, REMAINING, REQUESTS, ORDER, RECORDS = 0, 1, 2, 3, 4
OFFSETS, ROWS, CHECKS, DEST, DEST_OFFSETS = 5, 6, 7, 8, 9
HASHES, STATUS, INITIAL, RECORD_BYTES, FAMILY, REQUEST_COUNT = 10, 11, 12, 13, 14, 15

_EINTR: Final = -errors.EINTR
_EINVAL: Final = -errors.EINVAL
_LOW_HALF: Final = 0xFFFF_FFFF


@kernel
def plan_requests(order, fds, offsets, record_bytes, most_bytes, requests):
    """Cover records, sorted by `order`, with reads of whole blocks; returns their number.

    Records whose blocks overlap, touch, or leave one block between them share one read of at most
    `most_bytes`: 4 KiB more cost a disk 5 us of bandwidth, another read 10 us of operations.
    """
    count = 0
    for k in range(order.shape[0]):
        fd = fds[order[k]]
        offset = offsets[order[k]]
        start = offset & -BLOCK
        end = (offset + record_bytes + BLOCK - 1) & -BLOCK
        if count > 0:
            last = requests[count - 1]
            joined = max(end, last[1] + last[2]) - last[1]
            if last[0] == fd and start <= last[1] + last[2] + BLOCK and joined <= most_bytes:
                last[2] = joined
                last[4] += 1
                continue
        requests[count, 0] = fd
        requests[count, 1] = start
        requests[count, 2] = end - start
        requests[count, 3] = k
        requests[count, 4] = 1
        count += 1
    return count


@kernel
def _read_blocks(fd, address, nbytes, offset):
    """Bytes read, fewer than `nbytes` only at the end of the file, or -errno."""
    done = 0
    while done < nbytes:
        got = pread(fd, address + np.uint64(done), np.uint64(nbytes - done), offset + done)
        if got == _EINTR:
            continue
        if got == _EINVAL and done % BLOCK != 0:
            break  # direct I/O stops off a block's boundary only at the end of the file
        if got < 0:
            return got
        if got == 0:
            break
        done += got
    return done


@inline_kernel
def _int64_at(job, word, index):
    """An element of one of a job's int64[n] arrays."""
    return array_at(np.uint64(job[word]), job[RECORDS], np.int64)[index]


@inline_kernel
def _set_status(job, index, status):
    array_at(np.uint64(job[STATUS]), job[RECORDS], np.int32)[index] = status


@inline_kernel
def _dest_of(job, index):
    return np.uint64(job[DEST] + _int64_at(job, DEST_OFFSETS, index))


@kernel
def _judge(job, index):
    """Check the record that now lies in `dest`; note its hash and status."""
    words = job[RECORD_BYTES] >> 3
    record = array_at(_dest_of(job, index), words, np.uint64)
    initial = array_at(np.uint64(job[INITIAL]), words, np.uint64)
    found = hash_record(record, 0, _int64_at(job, ROWS, index), initial)
    array_at(np.uint64(job[HASHES]), job[RECORDS], np.uint64)[index] = found
    wanted = array_at(np.uint64(job[CHECKS]), job[RECORDS], np.uint32)[index]
    same = fold_check(found, np.uint64(job[FAMILY])) == wanted
    _set_status(job, index, READ_OK if same else READ_MISMATCH)


@kernel
def _deliver(job, index, bounce, start, got):
    """Copy one record out of the bounce buffer, which holds `got` bytes from file byte `start`."""
    skip = _int64_at(job, OFFSETS, index) - start
    if got < 0:
        _set_status(job, index, -got)
    elif got < skip + job[RECORD_BYTES]:
        _set_status(job, index, READ_PAST_END)
    else:
        copy(_dest_of(job, index), bounce + np.uint64(skip), np.uint64(job[RECORD_BYTES]))
        _judge(job, index)


@kernel
def _read_alone(job, index, fd, bounce, bounce_bytes):
    """Read one record by itself, in pieces where it is larger than the bounce buffer."""
    offset = _int64_at(job, OFFSETS, index)
    done = 0
    while done < job[RECORD_BYTES]:
        at = offset + done
        start = at & -BLOCK
        wanted = min(bounce_bytes, (offset + job[RECORD_BYTES] - start + BLOCK - 1) & -BLOCK)
        got = _read_blocks(fd, bounce, wanted, start)
        if got < 0:
            _set_status(job, index, -got)
            return
        useful = min(got - (at - start), job[RECORD_BYTES] - done)
        if useful <= 0:
            _set_status(job, index, READ_PAST_END)
            return
        target = _dest_of(job, index) + np.uint64(done)
        copy(target, bounce + np.uint64(at - start), np.uint64(useful))
        done += useful
    _judge(job, index)


@kernel
def _serve_request(job, number, bounce, bounce_bytes):
    words = job[REQUEST_COUNT] * REQUEST_WORDS
    requests = array_at(np.uint64(job[REQUESTS]), words, np.int64)
    order = array_at(np.uint64(job[ORDER]), job[RECORDS], np.int64)
    at = number * REQUEST_WORDS
    fd = np.int32(requests[at])
    start, nbytes = requests[at + 1], requests[at + 2]
    first, count = requests[at + 3], requests[at + 4]
    got = 0
    alone = nbytes > bounce_bytes
    if not alone:
        got = _read_blocks(fd, bounce, nbytes, start)
        # Records that shared a failed read may be readable one by one.
        alone = got < 0 and count > 1
    for k in range(first, first + count):
        if alone:
            _read_alone(job, order[k], fd, bounce, bounce_bytes)
        else:
            _deliver(job, order[k], bounce, start, got)


@kernel
def _claim(ticket):
    """The number of a request that is now ours, or -1."""
    word = atomic_load(ticket)
    if (word & _LOW_HALF) >= (word >> 32):
        return -1
    word = atomic_add(ticket, 1)
    number = word & _LOW_HALF
    return number if number < (word >> 32) else -1


@kernel
def serve(control, control_address, bounce, bounce_bytes):
    """A reader thread: one request of each job in turn, until the stop flag is set."""
    line_bytes = np.uint64(8 * JOB_WORDS)
    wake = np.uint64(control_address) + np.uint64(8 * WAKE)
    stop = np.uint64(control_address) + np.uint64(8 * STOP)
    while True:
        seen = atomic_load(wake)
        if atomic_load(stop) != 0:
            return
        busy = False
        for line in range(1, control.shape[0]):
            address = np.uint64(control_address) + np.uint64(line) * line_bytes
            number = _claim(address + np.uint64(8 * TICKET))
            if number < 0:
                continue
            busy = True
            _serve_request(control[line], number, np.uint64(bounce), bounce_bytes)
            remaining = address + np.uint64(8 * REMAINING)
            if atomic_add(remaining, -1) == 1:
                futex_wake(remaining, np.uint64(1))
        if not busy:
            futex_wait(wake, np.uint64(seen & _LOW_HALF))


@kernel
def run_job(control_address, line, requests, threads):
    """Offer the job in a line, whose words are filled in, and wait until it is done."""
    base = np.uint64(control_address)
    address = base + np.uint64(line * 8 * JOB_WORDS)
    remaining = address + np.uint64(8 * REMAINING)
    atomic_store(remaining, requests)
    atomic_store(address + np.uint64(8 * TICKET), requests << 32)
    wake_readers(control_address, min(threads, requests))
    while True:
        left = atomic_load(remaining)
        if left == 0:
            return
        futex_wait(remaining, np.uint64(left & _LOW_HALF))


@kernel
def wake_readers(control_address, threads):
    wake = np.uint64(control_address) + np.uint64(8 * WAKE)
    atomic_add(wake, 1)
    futex_wake(wake, np.uint64(threads))
