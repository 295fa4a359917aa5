"""Raising KeyboardInterrupt at a chosen line of momentd's client, as Ctrl-C does at its worst."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import momentd

_CLIENT = str(Path(momentd.__file__).parent) + os.sep


class LineCounter:
    """Counts executed lines of the client; raises at one of them, once."""

    def __init__(self, raise_at: int) -> None:
        self.raise_at = raise_at
        self.lines = 0
        self.raised_in = ""
        self._inside: list[tuple[FrameType, int]] = []

    def _leaves_lock(self, frame: FrameType) -> bool:
        """Whether this is a `with ..._lock:` line on the way out, with the lock still held.

        No signal is looked at there: the interpreter does that after the call that releases it.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if not (line.startswith("with ") and line.endswith("_lock:")):
            return False
        if (frame, frame.f_lineno) in self._inside:
            self._inside.remove((frame, frame.f_lineno))
            return True
        self._inside.append((frame, frame.f_lineno))
        return False

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_CLIENT) or frame.f_code.co_name == "__del__":
            return None
        if event == "line" and not self._leaves_lock(frame):
            self.lines += 1
            if self.lines == self.raise_at:
                self.raised_in = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


def interrupted_at(line: int, action: Callable[[], Any]) -> LineCounter | None:
    """Run `action`, raising KeyboardInterrupt at its n-th line. None: it has fewer lines."""
    counter = LineCounter(line)
    previous = sys.gettrace()
    sys.settrace(counter._trace)
    try:
        action()
    except KeyboardInterrupt:
        return counter
    finally:
        sys.settrace(previous)
    return None if counter.lines < line else counter
