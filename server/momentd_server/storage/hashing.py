# pyright: basic
"""The hash of a record: XXH64 of its bytes, seeded with its row; 0 if it was never changed.

A record that equals the schema's initial record hashes to 0, so a touched-but-equal table has the
digest of an untouched one. The hash knows neither family nor version, because digests compare
contents of different timelines; `fold_check` binds the family, a batch trailer the rest.

All kernels see memory as 8-byte words: records lie at multiples of 8 bytes and are multiples of 8
bytes long.
"""

from __future__ import annotations

import numpy as np


def hash_records(
    memory: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    initial: np.ndarray,
    hashes: np.ndarray,
) -> None:
    """Hash m records in place. A nogil kernel, also callable from other kernels.

    memory   uint64[w]  the space (or any buffer), viewed as words
    offsets  int64[m]   byte offset of each record in `memory`
    rows     int64[m]
    initial  uint64[record_bytes / 8]  the schema's initial record
    hashes   uint64[m]  out
    """
    raise NotImplementedError


def hash_record(memory: np.ndarray, word: int, row: int, initial: np.ndarray) -> int:
    """Kernel: the hash of the one record at word index `word`."""
    raise NotImplementedError


def hash_bytes(data: np.ndarray, seed: int) -> int:
    """XXH64 of a uint8 array of any length. For headers, trailers and catalog values."""
    raise NotImplementedError


def fold_check(record_hash: int, family: int) -> int:
    """Kernel: the 32-bit record check kept beside a location."""
    raise NotImplementedError


def fold_checks(hashes: np.ndarray, family: int, checks: np.ndarray) -> None:
    """Kernel: `fold_check` of each of uint64[m] into uint32[m]."""
    raise NotImplementedError
