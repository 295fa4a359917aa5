"""Keeps Ctrl-C out of the few instructions that must not be split."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """Holds SIGINT back while its block runs; the handler is called when the block is left.

    Only the main thread runs Python signal handlers, so elsewhere (and where SIGINT has no Python
    handler) this does nothing. Re-entrant blocks are harmless: the inner one defers to the outer.
    """

    __slots__ = ("_arrived", "_previous")

    def __init__(self) -> None:
        self._previous: Any = None
        self._arrived = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if not callable(previous):
            return
        # Kept before the swap: from the swap on nothing can interrupt us, and before it there is
        # nothing to undo.
        self._previous = previous
        signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        previous = self._previous
        if previous is None:
            return
        signal.signal(signal.SIGINT, previous)
        if self._arrived:
            self._arrived = False
            previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived = True
