"""Every byte that counts of one segment: header, trailers, padding, and the hash of each record.

Batches are found from the end, as always, and read whole with direct I/O; hashing runs without the
GIL, so several segments are checked at once at the speed of the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from momentd_server.storage import files, hashing
from momentd_server.storage import format as layout
from momentd_server.storage.damage import MOST_ROWS, Counts, Damage
from momentd_server.storage.diskio import aligned_buffer
from momentd_server.storage.format import BLOCK, ENTRY_BYTES, FOOTER_BYTES, SegmentHeader
from momentd_server.storage.location import GENERATION_SHIFT
from momentd_server.storage.trailers import plausible
from momentd_wire.errors import MomentdError

_PIECE_BYTES: Final = 8 << 20  # of one read: more is not faster, and is counted late
_REMEDY: Final = "restore the file from a copy, or drop its tables and go on from a checkpoint"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the catalog says about a segment."""

    header: SegmentHeader
    counted: int  # bytes that count
    initial: np.ndarray  # uint8[record_bytes], the schema's initial record
    rows: int  # rows of the largest table that uses it
    generation: int  # the last one that its family has given out
    tables: tuple[int, ...]
    snapshots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch whose trailer is right."""

    rows: np.ndarray  # int64[n]
    hashes: np.ndarray  # uint64[n]
    first_offset: int
    record_bytes: int


@dataclass(slots=True)
class SegmentReport:
    damages: list[Damage] = field(default_factory=list[Damage])
    counts: Counts = field(default_factory=Counts)


def check_segment(
    fd: int,
    path: Path,
    expected: Expected,
    *,
    was_read: Callable[[int], None] = lambda _nbytes: None,
    seen: Callable[[Batch], None] = lambda _batch: None,
) -> SegmentReport:
    """Compare a segment with its checksums; never raises for what is wrong with the file.

    fd: open for reading, direct or not. `was_read(nbytes)` is called after each read: it counts,
    waits, or raises to end the check. `seen` gets each good batch, the last one first.
    """
    check = _Check(fd, path, expected, was_read)
    try:
        check.header()
        check.batches(seen)
    except OSError as error:
        check.note(f"cannot be read: {error.strerror}; see the kernel log (dmesg); {_REMEDY}", None)
    check.report.counts.segments = 1
    return check.report


class _Check:
    def __init__(
        self, fd: int, path: Path, expected: Expected, was_read: Callable[[int], None]
    ) -> None:
        self.report = SegmentReport()
        self._fd = fd
        self._path = path
        self._expected = expected
        self._was_read = was_read
        self._buffer = aligned_buffer(_PIECE_BYTES)

    def note(self, what: str, offset: int | None, rows: np.ndarray | None = None) -> None:
        named = () if rows is None else tuple(int(row) for row in rows[:MOST_ROWS])
        count = 0 if rows is None else int(rows.size)
        expected = self._expected
        self.report.damages.append(
            Damage(what, str(self._path), offset, expected.tables, named, count, expected.snapshots)
        )

    def header(self) -> None:
        block = self._read(0, layout.HEADER_BYTES)
        try:
            found = layout.unpack_header(block.tobytes(), self._path)
        except MomentdError as error:
            self.note(error.message, 0)
            return
        if found != self._expected.header:
            self.note(
                f"the header is that of segment {found.segment} of family {found.family}, layout "
                f"{found.layout}, {found.record_bytes} bytes a record, store "
                f"{found.store_id.hex()}: the file does not belong here; {_REMEDY}",
                0,
            )

    def batches(self, seen: Callable[[Batch], None]) -> None:
        end = self._expected.counted
        length = os.fstat(self._fd).st_size
        if length < end:
            self.note(f"has {length} bytes, {end} count: it was cut short; {_REMEDY}", length)
            return
        while end > layout.HEADER_BYTES:
            footer = layout.unpack_footer(self._read(end - BLOCK, end)[-FOOTER_BYTES:])
            if footer is None or not plausible(footer, self._expected.header, end):
                self.note(
                    f"no batch ends at byte {end}: neither it nor what lies before it can be "
                    f"checked; {_REMEDY}",
                    end - FOOTER_BYTES,
                )
                return
            batch = self._batch(footer, end)
            if batch is not None:
                seen(batch)
            end = footer.batch_start

    def _batch(self, footer: layout.Footer, end: int) -> Batch | None:
        data = self._read(footer.batch_start, end)
        tail = data[footer.records_bytes :]
        columns = ENTRY_BYTES * footer.records
        # Copies, as where trailers are read: the kernels are compiled for arrays of their own.
        entries = tail[:columns].copy().view(np.uint64)
        last = tail[-FOOTER_BYTES:].copy()
        self.report.counts.batches += 1
        self.report.counts.records += footer.records
        if layout.trailer_digest(entries, last, self._expected.header.segment) != footer.digest:
            self.note(
                f"the trailer of the batch at byte {footer.batch_start} does not match its hash: "
                f"its {footer.records} records cannot be told; {_REMEDY}",
                footer.batch_start + footer.records_bytes,
            )
            return None
        if tail[columns:-FOOTER_BYTES].any():
            at = columns + int(tail[columns:-FOOTER_BYTES].argmax())
            self.note(
                "the padding of a batch is not zero: no record is concerned, but something wrote "
                "to the file or the disk loses bits",
                footer.batch_start + footer.records_bytes + at,
            )
        rows, versions, hashes = entries.reshape(3, footer.records)
        batch = Batch(
            rows.view(np.int64), hashes, footer.batch_start, self._expected.header.record_bytes
        )
        self._records(batch, data[: footer.records_bytes])
        self._references(batch, versions)
        return batch

    def _records(self, batch: Batch, records: np.ndarray) -> None:
        """Each record against its hash in the trailer."""
        size = batch.record_bytes
        offsets = np.arange(batch.rows.size, dtype=np.int64) * size
        found = np.empty(batch.rows.size, np.uint64)
        initial = self._expected.initial.view(np.uint64)
        hashing.hash_records(records.view(np.uint64), offsets, batch.rows, initial, found)
        wrong = np.flatnonzero(found != batch.hashes)
        if wrong.size:
            self.note(
                f"{wrong.size} of {batch.rows.size} records of the batch at byte "
                f"{batch.first_offset} do not match their hash: a request that needs the newest "
                f"of them gets CorruptRecord, everything else goes on; {_REMEDY}",
                batch.first_offset + int(offsets[wrong[0]]),
                batch.rows[wrong],
            )

    def _references(self, batch: Batch, versions: np.ndarray) -> None:
        """Rows that the tables have, and generations that the family has given out."""
        strange = (batch.rows < 0) | (batch.rows >= self._expected.rows)
        if strange.any():
            self.note(
                f"the batch has row {batch.rows[strange][0]}, its largest table has "
                f"{self._expected.rows} rows: catalog and file do not belong together; {_REMEDY}",
                batch.first_offset,
                batch.rows[strange],
            )
        unknown = versions >> GENERATION_SHIFT > self._expected.generation
        if unknown.any():
            generation = int(versions[unknown][0] >> GENERATION_SHIFT)
            self.note(
                f"the batch has records of generation {generation}, the catalog has given out "
                f"{self._expected.generation}: catalog and file do not belong together; {_REMEDY}",
                batch.first_offset,
                batch.rows[unknown],
            )

    def _read(self, start: int, end: int) -> np.ndarray:
        """Bytes [start, end), multiples of 4 KiB, in aligned memory until the next read."""
        if end - start > self._buffer.size:
            self._buffer = aligned_buffer(end - start)
        data = self._buffer[: end - start]
        for at in range(0, data.size, _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            got = files.read_up_to(self._fd, piece, start + at)
            # What a file that was cut meanwhile lacks: no checksum matches it.
            piece[got:] = 0
            self.report.counts.bytes += got
            self._was_read(got)
        return data
