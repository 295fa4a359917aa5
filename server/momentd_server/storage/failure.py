"""The first sync that failed. It is final: what the kernel dropped afterwards cannot be known.

The kernel may have thrown away what it could not write, and reports success the next time. So
whoever learns of a failure declares it here, and from then on nothing is called durable any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from momentd_wire.errors import StorageFailed

log = logging.getLogger("momentd.storage")

_INHERITED = "a sync of the data directory failed under an earlier engine of this daemon"
_REMEDY = (
    "nothing is made durable any more. Reads go on: save what you need by `full_state_dict()`. "
    "Then check the disk (dmesg), end the daemon (`momentd stop --discard`) and start it again: it "
    "comes back with what was committed before"
)


class StorageFailure:
    """One for a data directory: segments and catalog share it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._text: str | None = None
        self._header: np.ndarray | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def text(self) -> str | None:
        """What happened and what to do; None as long as nothing did."""
        return self._text

    def keep_in(self, header: np.ndarray) -> None:
        """Note it in the header of the space as well, and take over what is noted there.

        The space outlives the engine: the next one on the same memory must refuse likewise.
        """
        with self._lock:
            self._header = header
            if self._text is not None:
                header["fsync_failed"] = 1
            elif header["fsync_failed"][0]:
                self._text = f"{_INHERITED}; {_REMEDY}"

    def when_it_fails(self, listener: Callable[[], None]) -> None:
        """Call it once, in the thread that meets the failure; at once if that was before."""
        with self._lock:
            self._listeners.append(listener)
            failed = self._text is not None
        if failed:
            listener()

    def declare(self, what: str) -> StorageFailed:
        """A sync failed: the flag first, then everybody who waits. Returns the error to raise."""
        with self._lock:
            first = self._text is None
            if first:
                if self._header is not None:
                    self._header["fsync_failed"] = 1
                self._text = f"{what}; {_REMEDY}"
            listeners = list(self._listeners) if first else []
        if first:
            log.error("%s", self._text)
        for listener in listeners:
            listener()
        return self.error()

    def error(self) -> StorageFailed:
        """The error of every later call."""
        return StorageFailed(str(self._text))

    def refuse(self) -> None:
        """Raises StorageFailed after a failure."""
        if self._text is not None:
            raise self.error()
