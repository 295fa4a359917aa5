"""Segments: append-only files of record batches, written and read with direct I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from momentd_server.storage.datadir import DataDir


class Trailer(NamedTuple):
    """The index of one batch."""

    rows: np.ndarray  # int64[n]
    versions: np.ndarray  # uint64[n]
    hashes: np.ndarray  # uint64[n]
    first_offset: int  # byte offset of record 0; record i lies i * record_bytes behind it
    digest_delta: int  # sum of new - old hashes, modulo 2**64


@dataclass(slots=True, eq=False)
class Segment:
    """One segment as this process knows it. One thread appends to it at a time."""

    id: int
    family: int
    layout: int
    record_bytes: int
    fill: int  # bytes that count; always a multiple of 4 KiB
    reserved: int  # bytes allocated on disk, >= fill
    durable: int = 0  # fill as of the last successful sync
    writable: bool = True

    def has_room(self, records: int) -> bool:
        """Whether a batch of that many records fits below 256 MiB."""
        raise NotImplementedError


class Pins:
    """Descriptors that stay open, and files that stay readable, until `close` (context manager)."""

    fds: np.ndarray  # int64[n], aligned with the segment ids asked for

    def __enter__(self) -> Pins:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError


class SegmentStore:
    """All segment files of a data directory."""

    failed: str | None  # the first failed sync; final, every later write or sync raises

    def __init__(self, datadir: DataDir, allocate_id: Callable[[], int]) -> None:
        raise NotImplementedError

    def create(self, family_id: int, layout_id: int, record_bytes: int) -> Segment:
        """A new empty segment with its header on disk. Raises OutOfSpace, StorageFailed."""
        raise NotImplementedError

    def open_existing(self, family_id: int, segment_id: int, counted_bytes: int) -> Segment:
        """Register a file of a manifest, read-only. Raises CorruptRecord if it is not whole."""
        raise NotImplementedError

    def get(self, segment_id: int) -> Segment:
        raise NotImplementedError

    def append(
        self,
        segment: Segment,
        records: np.ndarray,
        rows: np.ndarray,
        versions: np.ndarray,
        hashes: np.ndarray,
        digest_delta: int,
    ) -> int:
        """Write one batch; returns the byte offset of its first record and raises `segment.fill`.

        records: uint8 of n * record_bytes, from `aligned_buffer` (start at a multiple of 4 KiB).
        On OutOfSpace and StorageFailed `fill` is unchanged and the batch does not exist.
        """
        raise NotImplementedError

    def seal(self, segment: Segment) -> None:
        """No more batches: give back what was reserved beyond the fill."""
        raise NotImplementedError

    def sync(self, segments: Iterable[Segment]) -> None:
        """Make them durable, files first, then directories. A failure is final."""
        raise NotImplementedError

    def pin(self, segment_ids: np.ndarray) -> Pins:
        """Descriptors for int64[n] segment ids, kept open until the pins are closed."""
        raise NotImplementedError

    def unlink(self, segment_id: int) -> int:
        """Delete the file; pinned readers finish undisturbed. Returns the bytes freed."""
        raise NotImplementedError

    def read_trailers(self, segment: Segment) -> Iterator[Trailer]:
        """Trailers from the fill backward. Raises CorruptRecord naming file and offset."""
        raise NotImplementedError

    def page_cache_bytes(self) -> int:
        """Bytes of all segment files in the page cache; 0 where the kernel cannot say."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
