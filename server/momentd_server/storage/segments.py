"""Segments: append-only files of record batches, written and read with direct I/O."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from momentd_server.obs.latency import Rate
from momentd_server.storage import blocks, files, trailers
from momentd_server.storage import format as layout
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.descriptors import Descriptors, Pins
from momentd_server.storage.diskio import aligned_buffer
from momentd_server.storage.failure import StorageFailure
from momentd_server.storage.format import BLOCK, SegmentHeader, Trailer
from momentd_wire.errors import CorruptRecord, InternalError, LimitExceeded, MomentdError

__all__ = ["LEAST_SEGMENT_BYTES", "Pins", "Segment", "SegmentStore", "Trailer", "fitting_bytes"]

log = logging.getLogger("momentd.segments")

LEAST_SEGMENT_BYTES: Final = 16 << 20
_KEPT_BACK: Final = 256  # free blocks
# The rate of writing is a mean over so long: spills come in bursts.
_WRITTEN_S: Final = 300


class Segment:
    """One segment as this process knows it. One thread appends to it at a time.

    What counts of it is in its block, which may outlive this process (storage/blocks.py).
    """

    __slots__ = ("_block", "header", "index", "reserved")

    def __init__(self, header: SegmentHeader, block: np.void, index: int, reserved: int) -> None:
        self.header: Final = header
        self.index: Final = index  # of its block
        self.reserved = reserved  # length of the file, >= fill
        self._block = block

    def __repr__(self) -> str:
        return f"Segment({self.id}, family={self.family}, fill={self.fill}, durable={self.durable})"

    @property
    def fill(self) -> int:
        """Bytes that count; always a multiple of 4 KiB."""
        return int(self._block["fill"])

    @fill.setter
    def fill(self, nbytes: int) -> None:
        self._block["fill"] = nbytes

    @property
    def durable(self) -> int:
        """The fill as of the last successful sync."""
        return int(self._block["durable"])

    @durable.setter
    def durable(self, nbytes: int) -> None:
        self._block["durable"] = nbytes

    @property
    def writable(self) -> bool:
        return int(self._block["state"]) == blocks.SEGMENT_OPEN

    @writable.setter
    def writable(self, writable: bool) -> None:
        self._block["state"] = blocks.SEGMENT_OPEN if writable else blocks.SEGMENT_SEALED

    @property
    def id(self) -> int:
        return self.header.segment

    @property
    def family(self) -> int:
        return self.header.family

    @property
    def layout(self) -> int:
        return self.header.layout

    @property
    def record_bytes(self) -> int:
        return self.header.record_bytes

    def detach(self) -> None:
        """The file is gone: what is still said of it is nobody's business."""
        self._block = self._block.copy()

    def has_room(self, records: int) -> bool:
        """Whether a batch of that many records still fits."""
        end = self.fill + layout.batch_bytes(records, self.record_bytes)
        return self.writable and end <= layout.SEGMENT_BYTES


def fitting_bytes(needed_bytes: int) -> int:
    """How long a table of so many needed bytes lets a segment become.

    Only ended segments are compacted, so an open one must be small beside the table.
    """
    return min(max(needed_bytes // 4, LEAST_SEGMENT_BYTES), layout.SEGMENT_BYTES)


class SegmentStore:
    """All segment files of a data directory. Thread-safe, but for appends to one segment."""

    def __init__(
        self,
        datadir: DataDir,
        allocate_id: Callable[[], int],
        failure: StorageFailure | None = None,
        table: NDArray[np.void] | None = None,
    ) -> None:
        """`table`: where the segments' blocks are, SEGMENT_DTYPE; default: in memory of its own."""
        self.datadir = datadir
        self.failure = failure or StorageFailure()  # the catalog's too, if it is given
        self._blocks = _Blocks(
            np.zeros(blocks.MAX_SEGMENTS, blocks.SEGMENT_DTYPE) if table is None else table
        )
        # Bytes handed to the disk, headers and trailers included.
        self.written = Rate(seconds=_WRITTEN_S)
        self._allocate_id = allocate_id
        self._lock = threading.Lock()  # guards the two fields below
        self._segments: dict[int, Segment] = {}
        self._unsynced_families: set[int] = set()
        # Held while directories are synced: what one call takes out of the set, another must await.
        self._syncing = threading.Lock()
        self._descriptors = Descriptors(self._open_descriptor)

    # -- life of a segment ------------------------------------------------------------------

    def create(self, family_id: int, layout_id: int, record_bytes: int) -> Segment:
        """A new empty segment with its header on disk. Raises OutOfSpace, StorageFailed."""
        self.failure.refuse()
        segment_id = self._allocate_id()
        header = SegmentHeader(
            self.datadir.store_id, family_id, segment_id, layout_id, record_bytes
        )
        path = self.datadir.segment_path(family_id, segment_id)
        with self._lock:  # so that no unlink removes the folder in between
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                fd = files.open_direct(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            except OSError as error:
                raise files.storage_error(error, "create", path) from error
            self._unsynced_families.add(family_id)
        try:
            files.reserve(fd, 0, layout.FIRST_RESERVE)
            _write_header(fd, header)
            reserved = os.fstat(fd).st_size
        except OSError as error:
            os.close(fd)
            with self._lock:
                files.remove_with_folder(path)
            raise files.storage_error(error, "create", path) from error
        segment = self._blocks.add(header, layout.HEADER_BYTES, reserved, writable=True)
        self._descriptors.add(segment_id, fd)
        with self._lock:
            self._segments[segment_id] = segment
        self.written.add(layout.HEADER_BYTES)
        return segment

    def open_existing(self, family_id: int, segment_id: int, counted_bytes: int) -> Segment:
        """Register a file that a manifest lists, read-only; known ones are returned as they are.

        Raises CorruptRecord if it is missing, damaged or shorter than what counts.
        """
        with self._lock:
            known = self._segments.get(segment_id)
        if known is not None:
            if counted_bytes > known.fill:  # another table counts more of the same file
                _check_length(self.path(known), known.reserved, counted_bytes)
                known.fill = known.durable = counted_bytes
            return known
        path = self.datadir.segment_path(family_id, segment_id)
        header, length = _read_header(path)
        if (header.store_id, header.family, header.segment) != (
            self.datadir.store_id,
            family_id,
            segment_id,
        ):
            raise CorruptRecord(
                f"{path} holds segment {header.segment} of family {header.family} "
                f"of store {header.store_id.hex()}: it does not belong here",
                path=path,
                offset=0,
            )
        _check_length(path, length, counted_bytes)
        segment = self._blocks.add(header, counted_bytes, length, writable=False)
        segment.durable = counted_bytes
        with self._lock:
            kept = self._segments.setdefault(segment_id, segment)
        if kept is not segment:
            self._blocks.remove(segment)
        return kept

    def inherit(self) -> None:
        """Take over the segments that an earlier process left in the blocks; all are sealed.

        One whose file is missing, damaged or short stays unknown: its records cannot be read.
        Raises StorageFailed if one cannot be cut to what counts.
        """
        for segment in self._blocks.inherit(self._inherited):
            with self._lock:
                self._segments[segment.id] = segment
                # Whether their directories were synced is not known.
                self._unsynced_families.add(segment.family)
            segment.writable = False
            files.cut(self.path(segment), segment.fill)
            segment.reserved = segment.fill

    def _inherited(self, block: np.void, index: int) -> Segment | None:
        family_id, segment_id, fill = (int(block[name]) for name in ("family", "id", "fill"))
        path = self.datadir.segment_path(family_id, segment_id)
        try:
            header, length = _read_header(path)
            _check_length(path, length, fill)
        except CorruptRecord as error:
            log.error("segment %d of family %d: %s", segment_id, family_id, error)
            return None
        return Segment(header, block, index, length)

    def get(self, segment_id: int) -> Segment:
        """A registered segment. Raises InternalError for an unknown one."""
        with self._lock:
            segment = self._segments.get(segment_id)
        if segment is None:
            raise InternalError(f"segment {segment_id} is not known; this is a bug, report it")
        return segment

    def knows(self, segment_id: int) -> bool:
        """Whether it is registered: not unlinked, and its file was found."""
        with self._lock:
            return segment_id in self._segments

    def segments(self) -> list[Segment]:
        """All registered segments."""
        with self._lock:
            return list(self._segments.values())

    def seal(self, segment: Segment) -> None:
        """No more batches: give back what was reserved beyond the fill."""
        segment.writable = False
        with self._descriptors.pin([segment.id]) as pins:
            try:
                os.ftruncate(int(pins.fds[0]), segment.fill)
            except OSError as error:
                raise files.storage_error(error, "shorten", self.path(segment)) from error
        segment.reserved = segment.fill

    def unlink(self, segment_id: int) -> int:
        """Delete the file; pinned readers finish undisturbed. Returns the bytes freed."""
        segment = self.get(segment_id)
        path = self.path(segment)
        with self._lock:
            self._segments.pop(segment_id, None)
            freed = files.remove_with_folder(path)
            self._blocks.remove(segment)
            if not path.parent.exists():
                self._unsynced_families.discard(segment.family)
        self._descriptors.forget(segment_id)
        return freed

    # -- writing ----------------------------------------------------------------------------

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
        rows int64[n], versions uint64[n], hashes uint64[n]; digest_delta: sum of new - old hashes.
        On OutOfSpace and StorageFailed `fill` is unchanged and the batch does not exist.
        """
        self.failure.refuse()
        if not segment.has_room(rows.size) or rows.size == 0:
            raise InternalError(
                f"a batch of {rows.size} records does not fit segment {segment.id} "
                f"({segment.fill} of {layout.SEGMENT_BYTES} bytes used); this is a bug, report it"
            )
        start = segment.fill
        body = records[: rows.size * segment.record_bytes]
        whole, tail = trailers.build_tail(
            segment.header, start, body, rows, versions, hashes, digest_delta
        )
        end = start + whole + tail.size
        with self._descriptors.pin([segment.id]) as pins:
            fd = int(pins.fds[0])
            try:
                self._reserve(segment, fd, end)
                files.write_all(fd, body[:whole], start)
                files.write_all(fd, tail, start + whole)
            except OSError as error:
                raise files.storage_error(error, "write", self.path(segment)) from error
        segment.fill = end
        segment.reserved = max(segment.reserved, end)
        self.written.add(end - start)
        return start

    def _reserve(self, segment: Segment, fd: int, end: int) -> None:
        """Allocate up to `end`: in doubling steps, or as little as needed on a full disk."""
        if end <= segment.reserved:
            return
        wanted = max(end, min(2 * segment.reserved, layout.SEGMENT_BYTES))
        for target in dict.fromkeys((wanted, end)):
            try:
                supported = files.reserve(fd, segment.reserved, target - segment.reserved)
            except OSError:
                if target == end:
                    raise
                continue
            segment.reserved = target if supported else segment.reserved
            return

    def sync(self, segments: Iterable[Segment]) -> None:
        """Make them durable, files first, then directories. Raises StorageFailed; that is final.

        After a failed sync the kernel may have dropped what it could not write and report
        success the next time, so it is never tried again. A file that is unlinked meanwhile is
        left out: nobody needs it.
        """
        self.failure.refuse()
        for segment in segments:
            if segment.fill > segment.durable:
                try:
                    self._sync_file(segment)
                except MomentdError:
                    if self.failure.text is not None or self.knows(segment.id):
                        raise
        with self._syncing:
            self._sync_directories()

    def _sync_directories(self) -> None:
        with self._lock:
            # Taken before the sync: a file made during it needs the next one.
            families, self._unsynced_families = self._unsynced_families, set()
        folders = [self.datadir.family_path(family) for family in families]
        try:
            for folder in folders:
                # One that is gone was dropped meanwhile, with its last segment.
                with contextlib.suppress(FileNotFoundError):
                    files.sync_directory(folder)
            if folders:
                files.sync_directory(self.datadir.families_path)
        except OSError as error:
            what = f"cannot sync {self.datadir.families_path}: {error.strerror}"
            raise self.failure.declare(what) from error

    def _sync_file(self, segment: Segment) -> None:
        fill = segment.fill
        with self._descriptors.pin([segment.id]) as pins:
            try:
                os.fdatasync(int(pins.fds[0]))
            except OSError as error:
                what = f"cannot sync {self.path(segment)}: {error.strerror}"
                raise self.failure.declare(what) from error
        segment.durable = max(segment.durable, fill)

    # -- reading ----------------------------------------------------------------------------

    def pin(self, segment_ids: np.ndarray) -> Pins:
        """Descriptors for int64[n] segment ids, open until the pins are closed.

        Also keeps the contents readable if the file is unlinked meanwhile.
        """
        return self._descriptors.pin(segment_ids)

    def read_trailers(self, segment: Segment, end: int | None = None) -> Iterator[Trailer]:
        """The trailers of the batches before `end` (default: the fill), from the last backward.

        Raises CorruptRecord naming file and offset.
        """
        return trailers.read_backward(
            self.path(segment), segment.header, segment.fill if end is None else end
        )

    def page_cache_bytes(self) -> int:
        """Bytes of all segment files in the page cache; 0 where the kernel cannot say (< 6.5)."""
        return sum(files.cached_bytes(self.path(segment)) for segment in self.segments())

    def disk_bytes(self) -> int:
        """Bytes that the registered segments take on disk, reserved ones included."""
        return sum(segment.reserved for segment in self.segments())

    def close(self) -> None:
        """Close all descriptors. Nothing is synced."""
        self._descriptors.close()

    def path(self, segment: Segment) -> Path:
        """Where its file is."""
        return self.datadir.segment_path(segment.family, segment.id)

    def _open_descriptor(self, segment_id: int) -> int:
        segment = self.get(segment_id)
        path = self.path(segment)
        try:
            return files.open_direct(path, os.O_RDWR if segment.writable else os.O_RDONLY)
        except OSError as error:
            raise files.storage_error(error, "open", path) from error


class _Blocks:
    """Which blocks of segments are free. Thread-safe."""

    def __init__(self, table: NDArray[np.void]) -> None:
        self._table = table
        self._lock = threading.Lock()  # guards the two fields below
        # First in, first out, and some are kept back: who still holds an unlinked segment has time
        # to see that its block is not its own any more.
        self._free: deque[int] = deque()
        self._used = 0  # those behind it were never used

    def add(self, header: SegmentHeader, fill: int, reserved: int, *, writable: bool) -> Segment:
        """Raises LimitExceeded."""
        with self._lock:
            if not self._free and self._used == self._table.size:
                raise LimitExceeded(
                    f"there are {self._used} segment files, which is the limit: drop tables or "
                    "delete snapshots",
                    limit=self._used,
                )
            unused = len(self._free) < _KEPT_BACK and self._used < self._table.size
            index = self._used if unused else self._free.popleft()
            self._used = max(self._used, index + 1)
        block = self._table[index]
        block["id"], block["family"] = header.segment, header.family
        block["layout"], block["record_bytes"] = header.layout, header.record_bytes
        block["fill"], block["durable"] = fill, 0
        segment = Segment(header, block, index, reserved)
        segment.writable = writable
        return segment

    def remove(self, segment: Segment) -> None:
        segment.detach()
        self._table[segment.index]["state"] = blocks.SEGMENT_FREE
        with self._lock:
            self._free.append(segment.index)

    def inherit(self, read: Callable[[np.void, int], Segment | None]) -> Iterator[Segment]:
        """The segments of all blocks in use; those that `read` refuses are freed."""
        used = np.flatnonzero(self._table["state"] != blocks.SEGMENT_FREE)
        with self._lock:
            self._used = int(used[-1]) + 1 if used.size else 0
            self._free = deque(np.setdiff1d(np.arange(self._used), used).tolist())
        for index in used.tolist():
            block = self._table[index]
            segment = read(block, index)
            if segment is not None:
                yield segment
            else:
                block["state"] = blocks.SEGMENT_FREE
                self._free.append(index)


def _write_header(fd: int, header: SegmentHeader) -> None:
    block = aligned_buffer(BLOCK)
    block[:] = np.frombuffer(layout.pack_header(header), np.uint8)
    files.write_all(fd, block, 0)


def _read_header(path: Path) -> tuple[SegmentHeader, int]:
    """The header of a file and the file's length."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise CorruptRecord(
            f"{path} is missing; restore the file from a copy, or drop its tables", path=path
        ) from None
    except OSError as error:
        raise files.storage_error(error, "open", path) from error
    try:
        block = os.pread(fd, layout.HEADER_BYTES, 0)
        return layout.unpack_header(block, path), os.fstat(fd).st_size
    except OSError as error:
        raise files.storage_error(error, "read", path) from error
    finally:
        os.close(fd)


def _check_length(path: Path, length: int, counted_bytes: int) -> None:
    if counted_bytes % BLOCK or counted_bytes < layout.HEADER_BYTES or length < counted_bytes:
        raise CorruptRecord(
            f"{path} has {length} bytes, the catalog counts {counted_bytes}: it was cut short; "
            "restore the file from a copy, or drop its tables",
            path=path,
            offset=length,
        )
