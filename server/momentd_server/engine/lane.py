"""The lane: whatever reads or writes reachable frames, locations or blocks is one job at a time.

So there are no table locks and no lock order, at most one request is half applied at any instant,
and a consistent cut is one store between two jobs. Jobs are short and touch memory only: disk I/O,
parsing and waiting stay outside.
"""

from __future__ import annotations

import threading
from collections import deque


class Lane:
    """A mutual exclusion that is handed over in order of arrival. Use as a context manager."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # guards the three fields below
        self._held = False
        self._jobs = 0  # that have ended
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *exc: object) -> None:
        with self._mutex:
            self._jobs += 1
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def progress(self) -> int | None:
        """How many jobs have ended; None if none is in work."""
        return self._jobs if self._held else None
