"""Arenas: memory that a session shares with the daemon for bulk rows.

The daemon makes each arena as a memfd, reserves all of its pages at once and seals its size, so
neither side can be hit by SIGBUS. It has no name; the kernel frees it with its last user.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from momentd_server.keeper import Kept
from momentd_server.obs import machine
from momentd_server.storage.space import create_memfd
from momentd_wire import limits
from momentd_wire.errors import LimitExceeded, OutOfMemory
from momentd_wire.units import format_bytes

if TYPE_CHECKING:
    from momentd_server.engine.sessions import Session

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Left to everybody else when an arena is made.
MEMORY_RESERVE_BYTES: Final = 64 << 20


class Arena:
    """One memfd, mapped. `memory` is writable and `nbytes` long until `close`."""

    def __init__(self, number: int, nbytes: int, fd: int | None = None) -> None:
        """Makes and seals it, or maps the one that an earlier engine made. Raises OutOfMemory."""
        self.number: Final = number
        self.nbytes: Final = nbytes
        self.fd: Final = create_memfd(f"momentd-arena-{number}") if fd is None else fd
        try:
            if fd is None:
                _reserve(self.fd, nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            # Mapped with its page tables filled: no page fault in a request.
            self.memory: Final = mmap.mmap(
                self.fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
            view = np.frombuffer(self.memory, np.uint8)
            self.address: Final[int] = view.__array_interface__["data"][0]
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Let go of the memory; arrays that still view it keep it mapped until they are gone."""
        os.close(self.fd)
        try:
            self.memory.close()
        except BufferError:
            # A view lives on in a reference that is about to end; the mapping ends with it.
            return


class ArenaBudget:
    """Arena bytes of one daemon and of each session. Thread-safe."""

    def __init__(self, *, session_bytes: int, total_bytes: int, kept: Kept | None = None) -> None:
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self._kept = kept or Kept()
        self._lock = threading.Lock()  # guards the field below and Session.arena_bytes
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def make(self, session: Session, wanted_bytes: int) -> Arena:
        """One more arena for a session, of `wanted_bytes` rounded up to 2 MiB.

        Raises LimitExceeded (the session's share, or all arenas), OutOfMemory.
        """
        granule = limits.ARENA_GRANULE
        nbytes = max(1, -(-wanted_bytes // granule)) * granule
        self._charge(session, nbytes)
        try:
            _check_memory(nbytes)
            session.arenas_made += 1
            arena = Arena(session.arenas_made, nbytes)
        except BaseException:
            self._refund(session, nbytes)
            raise
        # Before the client knows of it, so that a request in it can always be finished.
        self._kept.keep(kept_name(session.id, arena.number), arena.fd)
        session.arenas[arena.number] = arena
        session.note()
        return arena

    def adopt(self, session: Session) -> None:
        """Count the arenas that a session has from an earlier engine."""
        for arena in session.arenas.values():
            with self._lock:
                self._used_bytes += arena.nbytes
                session.arena_bytes += arena.nbytes

    def free(self, session: Session, arena: Arena) -> None:
        """Close an arena and give its bytes back."""
        session.arenas.pop(arena.number, None)
        session.note()
        self._kept.drop(kept_name(session.id, arena.number))
        arena.close()
        self._refund(session, arena.nbytes)

    def _charge(self, session: Session, nbytes: int) -> None:
        with self._lock:
            if session.arena_bytes + nbytes > self._session_bytes:
                raise LimitExceeded(
                    f"an arena of {format_bytes(nbytes)} is too large: this session has "
                    f"{format_bytes(session.arena_bytes)} of {format_bytes(self._session_bytes)}; "
                    "use smaller batches, or start the daemon with a higher --arena",
                    limit=self._session_bytes,
                )
            if self._used_bytes + nbytes > self._total_bytes:
                raise LimitExceeded(
                    f"an arena of {format_bytes(nbytes)} is too large: all sessions together have "
                    f"{format_bytes(self._used_bytes)} of {format_bytes(self._total_bytes)}",
                    limit=self._total_bytes,
                )
            self._used_bytes += nbytes
            session.arena_bytes += nbytes

    def _refund(self, session: Session, nbytes: int) -> None:
        with self._lock:
            self._used_bytes -= nbytes
            session.arena_bytes -= nbytes


def kept_name(session_id: bytes, number: int) -> str:
    """The name under which the keeper holds an arena."""
    return f"arena/{session_id.hex()}/{number}"


def take_inherited(session: Session, numbers: Iterable[tuple[int, int]], kept: Kept) -> None:
    """Map the arenas (number, bytes) that an earlier engine made for a session."""
    for number, nbytes in numbers:
        fd = kept.take(kept_name(session.id, number))
        if fd is not None:  # else it was being given back
            session.arenas[number] = Arena(number, nbytes, fd)


def _check_memory(nbytes: int) -> None:
    available = machine.memory_available_bytes()
    if nbytes + MEMORY_RESERVE_BYTES > available:
        raise OutOfMemory(
            f"an arena of {format_bytes(nbytes)} does not fit the memory: "
            f"{format_bytes(available)} are available, {format_bytes(MEMORY_RESERVE_BYTES)} of "
            "them stay free; use smaller batches or a smaller --cache",
            available=available,
        )


def _reserve(fd: int, nbytes: int) -> None:
    """Allocate all pages now, so that a full machine is an error here and not a signal later."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.ENOMEM}:
            raise OutOfMemory(
                f"an arena of {format_bytes(nbytes)} could not be reserved: {error.strerror}; "
                "use smaller batches or a smaller --cache"
            ) from error
        raise
