"""Rebuild locations from trailers: start, restore, clone and import are this one procedure.

Two passes over the trailers and no memory beyond the two arrays themselves: the first leaves each
row's winning version in its location word, the second replaces it by the slot that has it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.jit import Pool, register_warmup
from momentd_server.schema import Schema
from momentd_server.storage import files
from momentd_server.storage import recovery_kernels as kernels
from momentd_server.storage.location import slot
from momentd_server.storage.records import Manifest
from momentd_server.storage.segments import Segment, SegmentStore, Trailer
from momentd_wire.errors import CorruptRecord, SchemaMismatch

_READ_AHEAD: Final = 4  # trailers
_THREADS: Final = min(4, os.cpu_count() or 1)  # more would wait for the memory bus
_LEAST_ROWS: Final = 1 << 17  # of a table, for each thread
_MOST_ANCESTORS: Final = (1 << kernels.RANK_BITS) - 1


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """What a rebuild found."""

    rows_touched: int
    live_records: dict[int, int]  # segment id -> records that a location points to
    digest: int  # sum of the live records' hashes, modulo 2**64
    records_read: int  # entries of trailers, live or not


def rebuild(
    store: SegmentStore,
    family_id: int,
    manifest: Manifest,
    schema: Schema,
    location: np.ndarray,
    check: np.ndarray,
) -> RebuildResult:
    """Fill location uint64[rows] and check uint32[rows], which must be all zero, in place.

    Opens the manifest's segments in the store (read-only) where they are not known yet. A record
    counts iff its generation is in the ancestry and its update number is not above that cap; the
    later entry of the ancestry wins, then the higher number. Of equal versions (a compaction's
    copies) the one in the earlier segment of the list is used.

    Raises CorruptRecord naming file and offset; the arrays' contents are then undefined.
    """
    segments = _open_segments(store, family_id, manifest, schema)
    with contextlib.closing(Pool(_THREADS, name="rebuild")) as pool:
        work = _Rebuild(store, segments, pool, _ancestry_arrays(manifest), location, check)
        work.note_versions()
        work.place(family_id)
    for segment, _ in segments:
        files.drop_cached(store.path(segment))
    touched = sum(work.live.values())
    return RebuildResult(touched, work.live, sum(work.digests) % (1 << 64), work.records_read)


class _Rebuild:
    """The two passes. Each worker of the pool has its own part of the rows."""

    def __init__(
        self,
        store: SegmentStore,
        segments: list[tuple[Segment, int]],
        pool: Pool,
        ancestry: tuple[np.ndarray, np.ndarray],
        location: np.ndarray,
        check: np.ndarray,
    ) -> None:
        self.live = dict.fromkeys((segment.id for segment, _ in segments), 0)
        self.digests = [0] * pool.threads
        self.records_read = 0
        self._store = store
        self._segments = segments
        self._pool = pool
        self._ancestry = ancestry
        self._location = location
        self._check = check

    def note_versions(self) -> None:
        for segment, trailer in _trailers(self._store, self._segments):
            self._check_rows(segment, trailer)
            self._pool.run(self._note_part, self._location.size, trailer, least=_LEAST_ROWS)
            self.records_read += trailer.rows.size

    def _note_part(self, _worker: int, start: int, stop: int, trailer: Trailer) -> None:
        kernels.note_versions(
            start, stop, trailer.rows, trailer.versions, *self._ancestry, self._location
        )

    def place(self, family_id: int) -> None:
        family = np.uint64(family_id)
        for segment, trailer in _trailers(self._store, self._segments):
            placed = [0] * self._pool.threads
            first = np.uint64(slot(segment.id, trailer.first_offset))
            nbytes = np.uint64(segment.record_bytes)
            self._pool.run(
                self._place_part,
                self._location.size,
                trailer,
                (first, nbytes, family),
                placed,
                least=_LEAST_ROWS,
            )
            self.live[segment.id] += sum(placed)

    def _place_part(
        self,
        worker: int,
        start: int,
        stop: int,
        trailer: Trailer,
        place: tuple[np.uint64, np.uint64, np.uint64],
        placed: list[int],
    ) -> None:
        count, digest = kernels.place(
            start,
            stop,
            trailer.rows,
            trailer.versions,
            trailer.hashes,
            *self._ancestry,
            *place,
            self._location,
            self._check,
        )
        placed[worker] = int(count)
        self.digests[worker] += int(digest)

    def _check_rows(self, segment: Segment, trailer: Trailer) -> None:
        lowest, highest = int(trailer.rows.min()), int(trailer.rows.max())
        bad = lowest if lowest < 0 else highest
        if 0 <= bad < self._location.size:
            return
        path = self._store.path(segment)
        raise CorruptRecord(
            f"{path}: the batch at byte {trailer.first_offset} has row {bad}, the table has "
            f"{self._location.size} rows: the catalog and the file do not belong together",
            path=path,
            offset=trailer.first_offset,
        )


def delete_unlisted(store: SegmentStore, manifests: Iterable[tuple[int, Manifest]]) -> int:
    """Delete segment files that no (family id, manifest) lists; returns the bytes freed.

    Listed files are cut after the last byte that counts for any of them: what lies behind was
    written or reserved after the last commit. Only for a start, when nobody appends or reads.
    """
    counted: dict[tuple[int, int], int] = {}
    for family_id, manifest in manifests:
        for segment_id, nbytes in manifest.segments:
            key = (family_id, segment_id)
            counted[key] = max(counted.get(key, 0), nbytes)
    freed = 0
    for family_id, segment_id, path in list(store.datadir.segment_files()):
        keep = counted.get((family_id, segment_id))
        freed += files.remove_with_folder(path) if keep is None else files.cut(path, keep)
    return freed


def _open_segments(
    store: SegmentStore, family_id: int, manifest: Manifest, schema: Schema
) -> list[tuple[Segment, int]]:
    """(segment, counted bytes) of a manifest."""
    segments: list[tuple[Segment, int]] = []
    for segment_id, counted in manifest.segments:
        segment = store.open_existing(family_id, segment_id, counted)
        if segment.record_bytes != schema.record_bytes:
            raise SchemaMismatch(
                f"{store.path(segment)} has records of {segment.record_bytes} bytes, the table's "
                f"schema has {schema.record_bytes}: the catalog and the file do not belong together"
            )
        segments.append((segment, counted))
    return segments


def _ancestry_arrays(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """uint64 generations and caps, oldest first: the index + 1 is the rank."""
    if len(manifest.ancestry) > _MOST_ANCESTORS:
        raise CorruptRecord(f"a manifest lists {len(manifest.ancestry)} ancestors, at most 2**18")
    pairs = np.array(manifest.ancestry, np.uint64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def _trailers(
    store: SegmentStore, segments: list[tuple[Segment, int]]
) -> Iterator[tuple[Segment, Trailer]]:
    """All trailers, read and checked by a second thread while the caller works on earlier ones."""
    ahead: queue.Queue[tuple[Segment, Trailer] | BaseException | None] = queue.Queue(_READ_AHEAD)
    stop = threading.Event()

    def read() -> None:
        try:
            for segment, counted in segments:
                for trailer in store.read_trailers(segment, counted):
                    ahead.put((segment, trailer))
                    if stop.is_set():
                        return
            ahead.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the caller, whatever it is
            ahead.put(error)

    thread = threading.Thread(target=read, name="rebuild-reader", daemon=True)
    thread.start()
    try:
        while (item := ahead.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting for room
            try:
                ahead.get(timeout=0.01)
            except queue.Empty:
                continue
        thread.join()


@register_warmup
def compile_rebuild() -> None:
    """The kernels of a rebuild, with its argument types."""
    rows, words = np.zeros(1, np.int64), np.zeros(1, np.uint64)
    kernels.note_versions(0, 1, rows, words, words, words, words.copy())
    zero = np.uint64(0)
    checks = np.zeros(1, np.uint32)
    kernels.place(0, 1, rows, words, words, words, words, zero, zero, zero, words.copy(), checks)
