"""Cold reads at full queue depth: threads in nogil loops of `pread` on aligned buffers."""

from __future__ import annotations

from typing import Final

import numpy as np

BLOCK: Final = 4096

READ_OK: Final = 0
READ_MISMATCH: Final = -1  # the bytes are not those the record check was made of
READ_PAST_END: Final = -2  # the file ends before the record does


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Anonymous zeroed memory at a multiple of 4 KiB: uint8[nbytes]."""
    raise NotImplementedError


class ReadPool:
    """`threads` reader threads, shared by any number of concurrent callers of `read`."""

    def __init__(self, threads: int = 48) -> None:
        raise NotImplementedError

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
        offsets      int64[n]   byte offset of each record in its file, a multiple of 8
        rows         int64[n]
        checks       uint32[n]  the record checks beside the locations
        initial      uint8[record_bytes]  the schema's initial record (it hashes to 0)
        dest         uint8[]    8-byte aligned memory, e.g. the space
        dest_offsets int64[n]   where in `dest` each record goes, multiples of 8
        hashes_out   uint64[n]  the 64-bit hash of what was read

        Returns int32[n]: READ_OK, READ_MISMATCH, READ_PAST_END, or a positive errno.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End and join the threads. No read may be in progress."""
        raise NotImplementedError
