"""Raising KeyboardInterrupt at a chosen line of momentd's client, as Ctrl-C does at its worst."""

from __future__ import annotations

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

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_CLIENT) or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
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
