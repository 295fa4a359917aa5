"""Batch trailers: made for an append, read backward from the bytes that count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from momentd_server.storage import files
from momentd_server.storage import format as layout
from momentd_server.storage.diskio import aligned_buffer
from momentd_server.storage.format import BLOCK, SegmentHeader, Trailer
from momentd_wire.errors import CorruptRecord

# Most trailers of an 8 MiB batch of 1 KiB records come whole with one read of this size.
_FIRST_READ: Final = 256 * 1024


def build_tail(
    header: SegmentHeader,
    batch_start: int,
    body: np.ndarray,
    rows: np.ndarray,
    versions: np.ndarray,
    hashes: np.ndarray,
    digest_delta: int,
) -> tuple[int, np.ndarray]:
    """What follows the whole blocks of a batch's records, in aligned memory.

    Returns (bytes of `body` in whole blocks, the rest of the batch: last records, trailer).
    """
    whole = body.size // BLOCK * BLOCK
    rest = body.size - whole
    tail = aligned_buffer(layout.batch_bytes(rows.size, header.record_bytes) - whole)
    tail[:rest] = body[whole:]
    layout.write_trailer(tail[rest:], header, batch_start, rows, versions, hashes, digest_delta)
    return whole, tail


def read_backward(path: Path, header: SegmentHeader, end: int) -> Iterator[Trailer]:
    """The trailers of all batches before `end`, last batch first.

    Read through the page cache, because a rebuild reads them twice. Raises CorruptRecord,
    StorageFailed.
    """
    try:
        fd = files.open_buffered(path, os.O_RDONLY)
    except OSError as error:
        raise files.storage_error(error, "open", path) from error
    try:
        while end > layout.HEADER_BYTES:
            trailer, end = _read_one(fd, path, header, end)
            yield trailer
    except OSError as error:
        raise files.storage_error(error, "read", path) from error
    finally:
        os.close(fd)


def _read_one(fd: int, path: Path, header: SegmentHeader, end: int) -> tuple[Trailer, int]:
    """The trailer of the batch that ends at `end`, and where that batch starts."""
    chunk_start = max(layout.HEADER_BYTES, end - _FIRST_READ)
    chunk = _read(fd, path, chunk_start, end)
    footer_bytes = chunk[-layout.FOOTER_BYTES :]
    footer = layout.unpack_footer(footer_bytes)
    if footer is None or not plausible(footer, header, end):
        raise _damaged(path, end, "no batch ends there")
    entries_start = footer.batch_start + footer.records_bytes
    if entries_start < chunk_start:
        chunk = np.concatenate((_read(fd, path, entries_start, chunk_start), chunk))
        chunk_start = entries_start
    at = entries_start - chunk_start
    # A copy: eight-byte aligned, and the chunk can go.
    entries = chunk[at : at + layout.ENTRY_BYTES * footer.records].copy().view(np.uint64)
    if layout.trailer_digest(entries, footer_bytes.copy(), header.segment) != footer.digest:
        raise _damaged(path, end, "the trailer does not match its hash")
    rows, versions, hashes = entries.reshape(3, footer.records)
    trailer = Trailer(
        rows.view(np.int64), versions, hashes, footer.batch_start, footer.digest_delta
    )
    return trailer, footer.batch_start


def plausible(footer: layout.Footer, header: SegmentHeader, end: int) -> bool:
    """Whether a footer can be believed so far as to read what it describes."""
    return (
        footer.family == header.family
        and footer.layout == header.layout
        and 0 < footer.records <= layout.SEGMENT_BYTES
        and footer.records_bytes == footer.records * header.record_bytes
        and footer.batch_start >= layout.HEADER_BYTES
        and footer.batch_start % BLOCK == 0
        and footer.batch_start + layout.batch_bytes(footer.records, header.record_bytes) == end
    )


def _read(fd: int, path: Path, start: int, end: int) -> np.ndarray:
    data = np.empty(end - start, np.uint8)
    if files.read_up_to(fd, data, start) != data.size:
        raise _damaged(path, end, "the file ends before")
    return data


def _damaged(path: Path, end: int, what: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path}: damaged batch before byte {end}: {what}; "
        "restore the file from a copy, or drop its tables",
        path=path,
        offset=end,
    )
