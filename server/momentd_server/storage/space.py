"""The space: one sparse memfd that holds all live state.

    header        layout and code version, engine epoch, section offsets
    blocks        tables, segments, sessions, streams: fixed-size structs (storage/blocks.py)
    journal       the one request in work: descriptor, row ids, progress and undo row per worker
    owners        of each slab: the id of the table that it serves
    slabs         2 MiB each: metadata of its frames (32 bytes each), then the records
    extents       location (8 bytes a row) and check (4 bytes a row) of each table; long outcomes

The memfd outlives the process that made it where somebody else holds its descriptor; nothing in it
is a pointer. Only slabs count against the cache: their metadata lies inside them, so the bound is
the number of slabs. All other sections are as large as could be needed and cost what is touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from momentd_server.schema import MAX_RECORD_BYTES
from momentd_server.storage import blocks
from momentd_server.storage.blocks import MAX_TABLES, MAX_WORKERS, PROGRESS_WORDS
from momentd_wire.errors import Incompatible, OutOfMemory

SLAB_BYTES: Final = 2 << 20
ROW_BYTES: Final = 12  # location and check
META_BYTES: Final = 32  # row | pins, state word, backing, hash of the last version on disk
MAX_FRAMES_PER_SLAB: Final = 1 << 16
_FIXED_BYTES: Final = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MFD_NOEXEC_SEAL: Final = 8


def create_memfd(name: str) -> int:
    """A memfd that never becomes executable; older kernels do not know the flag."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def least_cache_bytes(slab_bytes: int) -> int:
    """The smallest `cache_bytes` of a space whose slabs have that many bytes together."""
    return _FIXED_BYTES + _round_up(slab_bytes, SLAB_BYTES)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the frames of a slab lie, for one record size."""

    record_bytes: int
    frames: int
    records_at: int

    @staticmethod
    def of(record_bytes: int) -> Geometry:
        frames = min((SLAB_BYTES - 64) // (record_bytes + META_BYTES), MAX_FRAMES_PER_SLAB)
        records_at = -(-frames * META_BYTES // 64) * 64
        return Geometry(record_bytes, frames, records_at)


class Space:
    """Maps the memfd and hands out typed views. What is reachable belongs to the lane's jobs.

    `bytes`  uint8 view of everything; `words` the same as uint64. Offsets are into these.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.address = _map_aligned(fd, size)
        buffer = (ctypes.c_uint8 * size).from_address(self.address)
        self.bytes: np.ndarray = np.ctypeslib.as_array(buffer)
        self.words: np.ndarray = self.bytes[: size // 8 * 8].view("<u8")
        header = self.bytes[: blocks.HEADER_DTYPE.itemsize]
        self.header: np.ndarray = header.view(blocks.HEADER_DTYPE)
        self._extents = _Extents(0, 0)

    # ------------------------------------------------------------------------------ making

    @classmethod
    def create(cls, cache_bytes: int, *, engine_epoch: int, code_version: int = 0) -> Space:
        """A new space whose slabs take at most `cache_bytes`. Raises OutOfMemory if unmappable."""
        # Header, blocks and journal come out of the same budget.
        slabs = (cache_bytes - _FIXED_BYTES) // SLAB_BYTES
        slabs_at = _round_up(_OWNERS_AT + slabs * 8, SLAB_BYTES)
        rows_at = slabs_at + slabs * SLAB_BYTES
        fd = create_memfd("momentd-space")
        rows_bytes = 1 << 40
        while True:
            size = rows_at + rows_bytes
            try:
                os.ftruncate(fd, size)
                space = cls(fd, size)
                break
            except OSError as error:
                # A limit on address space (ulimit -v) or on file size: a smaller section serves.
                rows_bytes //= 2
                if rows_bytes < SLAB_BYTES:
                    os.close(fd)
                    raise OutOfMemory(
                        f"cannot map {size} bytes for a cache of {cache_bytes} bytes ({error}): "
                        "use a smaller --cache, or raise `ulimit -v`"
                    ) from error
        header = space.header
        header["layout_version"] = blocks.LAYOUT_VERSION
        header["code_version"] = code_version
        header["engine_epoch"] = engine_epoch
        header["slabs"] = slabs
        header["slabs_at"] = slabs_at
        header["rows_at"] = rows_at
        header["size"] = size
        header["magic"] = blocks.MAGIC
        space._attach()
        return space

    @classmethod
    def attach(cls, fd: int, *, code_version: int = 0) -> Space:
        """Maps an inherited space. Raises Incompatible for another layout or code version."""
        space = cls(fd, os.fstat(fd).st_size)
        header = space.header[0]
        found = (int(header["magic"]), int(header["layout_version"]), int(header["code_version"]))
        wanted = (blocks.MAGIC, blocks.LAYOUT_VERSION, code_version)
        if found != wanted:
            space._unmap()
            raise Incompatible(
                f"the memory of the running daemon has (magic, layout, code) {found}, this "
                f"version needs {wanted}: stop the daemon before upgrading (`momentd stop`)"
            )
        space._attach()
        return space

    def _attach(self) -> None:
        header = self.header[0]
        self.slabs = int(header["slabs"])
        self.slabs_at = int(header["slabs_at"])
        self.rows_at = int(header["rows_at"])
        self.tables = self._structs(_TABLES_AT, blocks.TABLE_DTYPE, MAX_TABLES)
        self.segments = self._structs(_SEGMENTS_AT, blocks.SEGMENT_DTYPE, blocks.MAX_SEGMENTS)
        self.sessions = self._structs(_SESSIONS_AT, blocks.SESSION_DTYPE, blocks.MAX_SESSIONS)
        self.streams = self._structs(_STREAMS_AT, blocks.STREAM_DTYPE, blocks.MAX_STREAMS)
        texts = self.view(_TEXTS_AT, _TEXT_BYTES * blocks.MAX_SESSIONS, "u1")
        self.session_texts = texts.reshape(blocks.MAX_SESSIONS, 2, -1)
        bodies = self.view(_BODIES_AT, blocks.STREAM_BODY_BYTES * blocks.MAX_STREAMS, "u1")
        self.stream_bodies = bodies.reshape(blocks.MAX_STREAMS, -1)
        self.journal = self._structs(_JOURNAL_AT, blocks.JOURNAL_DTYPE, 1)[0]
        self.journal_text = self.view(_JOURNAL_TEXT_AT, blocks.JOURNAL_TEXT_BYTES, "u1")
        self.journal_rows = self.view(_JOURNAL_ROWS_AT, blocks.JOURNAL_ROWS * 8, "<i8")
        progress = self.view(_PROGRESS_AT, _PROGRESS_BYTES, "<i8")
        self.progress = progress.reshape(MAX_WORKERS, -1)
        # Table id of each slab; 0: it serves none.
        self.owners = self.view(_OWNERS_AT, self.slabs * 8, "<u8")
        self._extents = _Extents(self.rows_at, self.size - self.rows_at)
        for block in self.tables[self.tables["id"] != 0]:
            self._extents.take_at(int(block["location_at"]), extent_bytes(int(block["rows"])))
        for block in self.streams[self.streams["extent_bytes"] != 0]:
            self._extents.take_at(int(block["extent_at"]), int(block["extent_bytes"]))
        journal = self.journal
        if int(journal["state"]) == blocks.JOURNAL_APPLYING and int(journal["extent_bytes"]):
            self._extents.take_at(int(journal["extent_at"]), int(journal["extent_bytes"]))
        self._extents.clear(self._punch)
        self._advise_huge(self.slabs_at, self.size - self.slabs_at)

    def _structs(self, at: int, dtype: np.dtype, count: int) -> np.ndarray:
        return self.bytes[at : at + dtype.itemsize * count].view(dtype)

    def view(self, at: int, nbytes: int, dtype: str) -> np.ndarray:
        """A typed view of bytes [at, at + nbytes)."""
        return self.bytes[at : at + nbytes].view(dtype)

    def undo(self, workers: int, record_bytes: int) -> np.ndarray:
        """One undo record a worker: uint8, (workers, record_bytes)."""
        at = _UNDO_AT
        return self.bytes[at : at + workers * record_bytes].reshape(workers, record_bytes)

    # ------------------------------------------------------------------------------ slabs

    def slab_at(self, slab: int) -> int:
        return self.slabs_at + slab * SLAB_BYTES

    def populate_slab(self, slab: int) -> None:
        """Allocates and maps a slab's pages. Raises OutOfMemory where the kernel refuses."""
        # Populating through the mapping honours the huge-page advice; fallocate would not.
        at = self.slab_at(slab)
        failed = _libc.madvise(self.address + at, SLAB_BYTES, _MADV_POPULATE_WRITE)
        if failed and ctypes.get_errno() == errno.EINVAL:  # before Linux 5.14
            failed = _libc.fallocate(self.fd, _FALLOC_KEEP_SIZE, at, SLAB_BYTES)
        if failed:
            code = ctypes.get_errno()
            raise OutOfMemory(f"no memory for one more slab of the cache: {os.strerror(code)}")

    def collapse(self, at: int) -> None:
        """Makes 2 MiB of populated memory one huge page where the kernel can (Linux 6.1+)."""
        # shmem honours MADV_HUGEPAGE on few systems; collapsing works regardless. Worth 30 % of an
        # update: a slab is one TLB entry instead of 512. A failure only costs speed.
        _libc.madvise(self.address + at, SLAB_BYTES, _MADV_COLLAPSE)

    def populate(self, at: int) -> None:
        """Touches 2 MiB, as far as the kernel can: huge pages are made of populated ones."""
        _libc.madvise(self.address + at, SLAB_BYTES, _MADV_POPULATE_WRITE)

    def release_slab(self, slab: int) -> None:
        """Gives a slab's pages back to the system; it reads as zeros afterwards."""
        self.release_slabs(slab, 1)

    def release_slabs(self, first: int, count: int) -> None:
        """The same for `count` slabs from `first` on."""
        self._punch(self.slab_at(first), count * SLAB_BYTES)

    def clear_slab_meta(self, slab: int, geometry: Geometry) -> None:
        at = self.slab_at(slab)
        self.bytes[at : at + geometry.frames * META_BYTES] = 0

    # ------------------------------------------------------------------------------ rows

    def allocate_rows(self, rows: int) -> tuple[int, int]:
        """An extent for one table's arrays; returns (location_at, check_at). All zero."""
        at = self._extents.take(extent_bytes(rows))
        if at is None:
            raise OutOfMemory(
                f"no address space for the locations of {rows} rows ({extent_bytes(rows)} bytes): "
                "drop tables that are not needed, or raise `ulimit -v`"
            )
        return at, at + _round_up(rows * 8, 64)

    def free_rows(self, location_at: int, rows: int) -> None:
        nbytes = extent_bytes(rows)
        self._punch(location_at, nbytes)
        self._extents.give(location_at, nbytes)

    def allocate_extent(self, nbytes: int) -> tuple[int, int]:
        """(offset, size) of at least so many bytes. Raises OutOfMemory."""
        size = _round_up(nbytes, SLAB_BYTES)
        at = self._extents.take(size)
        if at is None:
            raise OutOfMemory(f"no address space for {nbytes} bytes: raise `ulimit -v`")
        return at, size

    def free_extent(self, at: int, nbytes: int) -> None:
        self._punch(at, nbytes)
        self._extents.give(at, nbytes)

    def release_journal_rows(self, rows: int) -> None:
        """Gives the pages of a long request's row ids back."""
        self._punch(_JOURNAL_ROWS_AT, _round_up(rows * 8, 4096))

    def allocated_bytes(self) -> int:
        """Blocks that the kernel has allocated for the whole space."""
        return os.fstat(self.fd).st_blocks * 512

    def _punch(self, at: int, nbytes: int) -> None:
        mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
        if _libc.fallocate(self.fd, mode, at, nbytes):
            raise OSError(ctypes.get_errno(), "cannot punch a hole into the space")

    def _advise_huge(self, at: int, nbytes: int) -> None:
        # Honoured by some kernels at first touch; harmless elsewhere.
        _libc.madvise(self.address + at, nbytes, _MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmaps. The caller guarantees that no view is used afterwards."""
        if self.address:
            self._unmap()
            os.close(self.fd)

    def _unmap(self) -> None:
        _libc.munmap(self.address, self.size)
        self.address = 0


class _Extents:
    """First-fit allocator of [start, start + size), in 2 MiB granules. Thread-safe."""

    def __init__(self, start: int, size: int) -> None:
        self._lock = threading.Lock()  # guards the list
        self._free: list[tuple[int, int]] = [(start, size)] if size else []

    def take(self, nbytes: int) -> int | None:
        with self._lock:
            for index, (at, size) in enumerate(self._free):
                if size >= nbytes:
                    self._free[index] = (at + nbytes, size - nbytes)
                    return at
        return None

    def clear(self, punch: Callable[[int, int], None]) -> None:
        """Let all that is free read as zeros: what was given back last may not do so yet."""
        for at, size in self._free:
            if size:
                punch(at, size)

    def take_at(self, at: int, nbytes: int) -> None:
        for index, (start, size) in enumerate(self._free):
            if start <= at and at + nbytes <= start + size:
                self._free[index : index + 1] = [
                    (start, at - start),
                    (at + nbytes, start + size - at - nbytes),
                ]
                return
        raise Incompatible(f"a table block claims bytes {at}+{nbytes} that are not free")

    def give(self, at: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        with self._lock:
            for start, size in sorted([*self._free, (at, nbytes)]):
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                elif size:
                    merged.append((start, size))
            self._free = merged


def extent_bytes(rows: int) -> int:
    """Address space of one table's location and check arrays: 12 bytes a row, in 2 MiB granules."""
    return _round_up(_round_up(rows * 8, 64) + rows * 4, SLAB_BYTES)


def _round_up(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule


def _after(at: int, nbytes: int) -> int:
    """Where the section behind one of so many bytes begins."""
    return _round_up(at + nbytes, 4096)


_TABLES_AT: Final = 4096
_SEGMENTS_AT: Final = _after(_TABLES_AT, blocks.TABLE_DTYPE.itemsize * MAX_TABLES)
_SESSIONS_AT: Final = _after(_SEGMENTS_AT, blocks.SEGMENT_DTYPE.itemsize * blocks.MAX_SEGMENTS)
_STREAMS_AT: Final = _after(_SESSIONS_AT, blocks.SESSION_DTYPE.itemsize * blocks.MAX_SESSIONS)
_TEXTS_AT: Final = _after(_STREAMS_AT, blocks.STREAM_DTYPE.itemsize * blocks.MAX_STREAMS)
_TEXT_BYTES: Final = 2 * blocks.SESSION_TEXT_BYTES
_BODIES_AT: Final = _after(_TEXTS_AT, _TEXT_BYTES * blocks.MAX_SESSIONS)
_JOURNAL_AT: Final = _after(_BODIES_AT, blocks.STREAM_BODY_BYTES * blocks.MAX_STREAMS)
_JOURNAL_TEXT_AT: Final = _after(_JOURNAL_AT, blocks.JOURNAL_DTYPE.itemsize)
_JOURNAL_ROWS_AT: Final = _after(_JOURNAL_TEXT_AT, blocks.JOURNAL_TEXT_BYTES)
_PROGRESS_AT: Final = _after(_JOURNAL_ROWS_AT, blocks.JOURNAL_ROWS * 8)
_PROGRESS_BYTES: Final = MAX_WORKERS * PROGRESS_WORDS * 8
_UNDO_AT: Final = _after(_PROGRESS_AT, _PROGRESS_BYTES)
_OWNERS_AT: Final = _after(_UNDO_AT, MAX_WORKERS * MAX_RECORD_BYTES)


def _map_aligned(fd: int, size: int) -> int:
    """Maps `fd` at a 2 MiB boundary, so that huge pages are possible. Raises OSError."""
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    reserved = _mmap(0, size + SLAB_BYTES, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    at = _round_up(reserved, SLAB_BYTES)
    _mmap(at, size, read_write, _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE, fd)
    if at > reserved:
        _libc.munmap(reserved, at - reserved)
    _libc.munmap(at + _round_up(size, 4096), reserved + SLAB_BYTES - at)
    return at


def _mmap(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address or None, size, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped
