"""Bulk bytes in flight over gRPC: bounded, first come first served, and never held for ever."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import grpc

from momentd_wire.errors import Cancelled, LimitExceeded
from momentd_wire.units import format_bytes

# Calls up to this size have a budget of their own: a long queue of big ones does not delay them.
SMALL_BYTES: Final = 4 << 20
SMALL_BUDGET_BYTES: Final = 64 << 20
# A caller that neither sends nor takes a piece for so long gives its place to others.
STALL_S: Final = 60.0
_POLL_S: Final = 0.5


class ByteBudget:
    """Admits calls in order of arrival while their bytes fit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: Final = limit_bytes
        self._changed = threading.Condition()  # guards the two fields below
        self._free_bytes = limit_bytes
        self._queue: deque[object] = deque()

    @property
    def used_bytes(self) -> int:
        return self.limit_bytes - self._free_bytes

    @contextmanager
    def hold(self, nbytes: int, check_alive: Callable[[], None]) -> Generator[None]:
        """Hold `nbytes` within the block. `check_alive` raises if the caller gave up waiting.

        Raises LimitExceeded for more than the whole budget.
        """
        if nbytes > self.limit_bytes:
            raise LimitExceeded(
                f"a call with {format_bytes(nbytes)} of bulk data is beyond the limit of "
                f"{format_bytes(self.limit_bytes)}: send fewer rows at once",
                limit=self.limit_bytes,
            )
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or nbytes > self._free_bytes:
                    check_alive()
                    self._changed.wait(_POLL_S)
                self._free_bytes -= nbytes
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += nbytes
                self._changed.notify_all()


class Transfers:
    """The calls that move bulk bytes now."""

    def __init__(self, limit_bytes: int) -> None:
        self.small = ByteBudget(SMALL_BUDGET_BYTES)
        self.large = ByteBudget(limit_bytes)
        self._lock = threading.Lock()  # guards the field below
        self._active: dict[int, Transfer] = {}

    @contextmanager
    def admit(self, nbytes: int, context: grpc.ServicerContext) -> Generator[Transfer]:
        """Wait for room, then hold it within the block.

        Raises LimitExceeded, Cancelled (the caller went away while it waited).
        """
        transfer = Transfer(context)
        budget = self.small if nbytes <= SMALL_BYTES else self.large
        with budget.hold(nbytes, transfer.check_alive):
            transfer.moved()
            with self._lock:
                self._active[id(transfer)] = transfer
            try:
                yield transfer
            finally:
                with self._lock:
                    del self._active[id(transfer)]

    def sweep(self, now_s: float | None = None) -> int:
        """Cancel calls whose peer has stalled; returns how many. Called every second or so."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            stalled = [item for item in self._active.values() if item.is_stalled(now_s)]
        for transfer in stalled:
            transfer.cancel()
        return len(stalled)


class Transfer:
    """One call that moves bulk bytes."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._moved_at_s: float | None = None

    def moved(self) -> None:
        """A piece went over the wire; the peer's turn begins."""
        self._moved_at_s = time.monotonic()

    def working(self) -> None:
        """The daemon's turn begins: the peer cannot stall now."""
        self._moved_at_s = None

    def is_stalled(self, now_s: float) -> bool:
        moved_at_s = self._moved_at_s
        return moved_at_s is not None and now_s - moved_at_s > STALL_S

    def cancel(self) -> None:
        self._context.cancel()

    def check_alive(self) -> None:
        """Raises Cancelled if nobody waits for the call any more."""
        if not self._context.is_active():
            raise Cancelled("the caller gave up, or its deadline passed, before anything changed")
