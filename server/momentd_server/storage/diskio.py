"""Cold reads at full queue depth: threads in nogil loops of `pread` on aligned buffers."""

from __future__ import annotations

import mmap
import queue
import threading
from typing import Final

import numpy as np

from momentd_server.jit import register_warmup
from momentd_server.storage import read_kernels as kernels
from momentd_server.storage.format import BLOCK, round_up
from momentd_server.storage.read_kernels import READ_MISMATCH, READ_OK, READ_PAST_END

__all__ = [
    "BLOCK",
    "READ_MISMATCH",
    "READ_OK",
    "READ_PAST_END",
    "ReadPool",
    "aligned_buffer",
]

# Also the largest single read: room for neighbours in a sorted batch, and 48 of them are 6 MB.
BOUNCE_BYTES: Final = 128 * 1024
READER_THREADS: Final = 48


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Private zeroed memory at a multiple of 4 KiB: uint8[nbytes]."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(round_up(nbytes), BLOCK), flags=flags)
    return np.frombuffer(memory, np.uint8)[:nbytes]


class ReadPool:
    """`threads` reader threads, shared by any number of concurrent callers of `read`.

    A caller hands its whole request over by filling one line of the control block and waking the
    readers by a futex; it sleeps outside the GIL until the last record is there.
    """

    def __init__(self, threads: int = READER_THREADS) -> None:
        self._control = np.zeros((1 + kernels.JOBS, kernels.JOB_WORDS), np.int64)
        self._bounce = aligned_buffer(threads * BOUNCE_BYTES)
        self._compile()
        self._free_lines: queue.SimpleQueue[int] = queue.SimpleQueue()
        for line in range(1, 1 + kernels.JOBS):
            self._free_lines.put(line)
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"reader-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _compile(self) -> None:
        """Compile or load the loop here: a thread that failed to would leave callers waiting."""
        self._control[0, kernels.STOP] = 1
        self._serve(0)
        self._control[0, kernels.STOP] = 0

    def _serve(self, index: int) -> None:
        bounce = self._bounce.ctypes.data + index * BOUNCE_BYTES
        kernels.serve(self._control, self._control.ctypes.data, bounce, BOUNCE_BYTES)

    def read(
        self,
        fds: np.ndarray,
        offsets: np.ndarray,
        record_bytes: int,
        rows: np.ndarray,
        checks: np.ndarray,
        family: int,
        initial: np.ndarray,
        dest: np.ndarray,
        dest_offsets: np.ndarray,
        hashes_out: np.ndarray,
    ) -> np.ndarray:
        """Read n records, check each, return when all are done. Never raises for a disk error.

        fds          int64[n]   descriptors (see `SegmentStore.pin`)
        offsets      int64[n]   byte offset of each record in its file
        rows         int64[n]
        checks       uint32[n]  the record checks beside the locations
        initial      uint8[record_bytes]  the schema's initial record (it hashes to 0), contiguous
        dest         uint8[]    8-byte aligned memory, e.g. the space
        dest_offsets int64[n]   where in `dest` each record goes, multiples of 8
        hashes_out   uint64[n]  the 64-bit hash of what was read, contiguous

        Returns int32[n]: READ_OK, READ_MISMATCH, READ_PAST_END, or a positive errno.
        """
        status = np.zeros(rows.size, np.int32)
        if rows.size == 0:
            return status
        fds = np.ascontiguousarray(fds, np.int64)
        offsets = np.ascontiguousarray(offsets, np.int64)
        order = np.argsort(fds << 40 | offsets)
        requests = np.empty((rows.size, kernels.REQUEST_WORDS), np.int64)
        count = int(
            kernels.plan_requests(order, fds, offsets, record_bytes, BOUNCE_BYTES, requests)
        )
        # Held until the job is done: the readers know these arrays by address only.
        arrays = {
            kernels.REQUESTS: requests,
            kernels.ORDER: order,
            kernels.OFFSETS: offsets,
            kernels.ROWS: np.ascontiguousarray(rows, np.int64),
            kernels.CHECKS: np.ascontiguousarray(checks, np.uint32),
            kernels.DEST: dest,
            kernels.DEST_OFFSETS: np.ascontiguousarray(dest_offsets, np.int64),
            kernels.HASHES: hashes_out,
            kernels.STATUS: status,
            kernels.INITIAL: initial,
        }
        scalars = {
            kernels.RECORDS: rows.size,
            kernels.RECORD_BYTES: record_bytes,
            kernels.FAMILY: family,
            kernels.REQUEST_COUNT: count,
        }
        self._run(arrays, scalars, count)
        return status

    def _run(self, arrays: dict[int, np.ndarray], scalars: dict[int, int], count: int) -> None:
        line = self._free_lines.get()
        try:
            for word, array in arrays.items():
                self._control[line, word] = array.ctypes.data
            for word, value in scalars.items():
                self._control[line, word] = value
            kernels.run_job(self._control.ctypes.data, line, count, len(self._threads))
        finally:
            self._free_lines.put(line)

    def close(self) -> None:
        """End and join the threads. No read may be in progress."""
        self._control[0, kernels.STOP] = 1
        kernels.wake_readers(self._control.ctypes.data, len(self._threads))
        for thread in self._threads:
            thread.join()


@register_warmup
def _compile() -> None:
    """Every kernel of a cold read, with the argument types of `ReadPool`."""
    pool = ReadPool(1)
    one = np.zeros(1, np.int64)
    record = aligned_buffer(64)
    pool.read(one - 1, one, 64, one, one, 1, record, record, one, one.view(np.uint64))
    pool.close()
