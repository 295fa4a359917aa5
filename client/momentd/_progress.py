"""How far a long transfer is, for people: one line on standard error, where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from momentd_wire.state_file import Advance
from momentd_wire.units import format_bytes

_REFRESH_S: Final = 0.2
_WIDTH: Final = 24


@contextmanager
def progress(what: str, total: int) -> Generator[Advance]:
    """A bar of `total` bytes; it goes away when the context ends."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    bar = _Bar(what, total)
    try:
        yield bar.advance
    finally:
        bar.clear()


class _Bar:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(1, total)
        self._done = 0
        self._began_s = self._shown_s = time.monotonic()
        self._length = 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now_s = time.monotonic()
        if now_s - self._shown_s < _REFRESH_S:
            return
        self._shown_s = now_s
        share = min(1.0, self._done / self._total)
        full = round(_WIDTH * share)
        speed = format_bytes(round(self._done / (now_s - self._began_s)))
        text = (
            f"momentd: {self._what} [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%} of "
            f"{format_bytes(self._total)}, {speed}/s"
        )
        self._length = max(self._length, len(text))
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()

    def clear(self) -> None:
        if self._length:
            sys.stderr.write("\r" + " " * self._length + "\r")
            sys.stderr.flush()


def _ignore(_nbytes: int) -> None:
    pass
