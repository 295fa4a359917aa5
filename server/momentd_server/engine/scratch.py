"""Memory for the plans of requests: lent, and given back to the system when nobody needs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from momentd_server.rules import Scratch

# A plan takes 56 bytes a row, of which the last use may have been the largest batch of the day.
_KEPT_S: Final = 10.0


class Scratches:
    """A request of k tables borrows k. There are as many as were in use at once of late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the list
        self._free: list[tuple[float, Scratch]] = []  # with the time of the last use, in order

    @contextmanager
    def lend(self, count: int) -> Generator[list[Scratch]]:
        """So many, for the time of one request."""
        with self._lock:
            # The ones used last: their pages are warm, and the others grow old.
            lent = [self._free.pop()[1] for _ in range(min(count, len(self._free)))]
        lent += [Scratch() for _ in range(count - len(lent))]
        try:
            yield lent
        finally:
            now_s = time.monotonic()
            with self._lock:
                self._free += [(now_s, scratch) for scratch in reversed(lent)]

    def tidy(self) -> None:
        """Forget those that were not used lately."""
        oldest_s = time.monotonic() - _KEPT_S
        with self._lock:
            self._free = [entry for entry in self._free if entry[0] >= oldest_s]

    @property
    def nbytes(self) -> int:
        """Bytes held, but for those that are lent."""
        with self._lock:
            return sum(scratch.nbytes for _, scratch in self._free)
