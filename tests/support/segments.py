"""Batches of random records for tests of segments, reads and rebuilds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from momentd_server.schema import FieldSpec, Schema
from momentd_server.storage import hashing
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.diskio import aligned_buffer
from momentd_server.storage.location import version
from momentd_server.storage.segments import Segment, SegmentStore

FAMILY, LAYOUT = 3, 1


def schema_of(record_bytes: int, rows: int = 1000, initial: float = 0.0) -> Schema:
    width = record_bytes // 4
    return Schema(rows, width, (FieldSpec("state", "float32", width, initial),), "sparse_adam")


def open_store(path: Path) -> SegmentStore:
    """A store on a new data directory, with segment ids from 1."""
    counter = itertools.count(1)
    return SegmentStore(DataDir.open(path), lambda: next(counter))


@dataclass
class Written:
    """A batch as it was appended."""

    segment: Segment
    rows: np.ndarray
    versions: np.ndarray
    records: np.ndarray  # uint8 (n, record_bytes)
    hashes: np.ndarray
    checks: np.ndarray
    first_offset: int

    @property
    def offsets(self) -> np.ndarray:
        return self.first_offset + np.arange(self.rows.size) * self.segment.record_bytes


def write_batch(
    store: SegmentStore,
    segment: Segment,
    rows: list[int] | np.ndarray,
    *,
    generation: int = 1,
    numbers: list[int] | int = 1,
    seed: int = 0,
    digest_delta: int = 0,
) -> Written:
    rows = np.asarray(rows, np.int64)
    size = segment.record_bytes
    buffer = aligned_buffer(rows.size * size)
    buffer[:] = np.random.default_rng(seed).integers(1, 255, buffer.size)
    hashes = hash_all(buffer, rows, size)
    checks = np.zeros(rows.size, np.uint32)
    hashing.fold_checks(hashes, np.uint64(segment.family), checks)
    versions = np.array(
        [version(generation, int(n)) for n in np.broadcast_to(numbers, rows.size)], np.uint64
    )
    first = store.append(segment, buffer, rows, versions, hashes, digest_delta)
    records = buffer.reshape(rows.size, size).copy()
    return Written(segment, rows, versions, records, hashes, checks, first)


def hash_all(buffer: np.ndarray, rows: np.ndarray, record_bytes: int) -> np.ndarray:
    hashes = np.zeros(rows.size, np.uint64)
    initial = np.zeros(record_bytes // 8, np.uint64)
    offsets = np.arange(rows.size) * record_bytes
    hashing.hash_records(buffer.view(np.uint64), offsets, rows, initial, hashes)
    return hashes


def flip_bit(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))
