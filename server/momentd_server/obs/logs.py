"""Log lines: one JSON object a line on stderr, with an event's name and its fields.

Levels: `info` is a change of state, `warning` may heal, `error` means that data or a request was
lost. Nothing is logged for each request, and never row data or session ids in full.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

Level = Literal["info", "warning", "error"]
# A peer that causes the same event again and again must not fill the disk.
BURST: Final = 20
WINDOW_S: Final = 60.0


class Log:
    """Writes events. Each line is one write, so lines of threads do not mix."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # guards the field below
        # event -> (start of its window, lines in it)
        self._recent: dict[str, tuple[float, int]] = {}

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, *, cause: BaseException | None = None, **fields: object) -> None:
        """An event that lost something; `cause` adds its traceback."""
        if cause is not None:
            fields["error"] = f"{type(cause).__name__}: {cause}"
            fields["traceback"] = "".join(traceback.format_exception(cause))
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: dict[str, object]) -> None:
        if not self._admit(event):
            return
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level}
        line = json.dumps({**head, "event": event, **fields}, default=str)
        stream = self._stream or sys.stderr
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):
            # Nobody reads stderr any more (a closed terminal): the daemon goes on.
            return

    def _admit(self, event: str) -> bool:
        """At most `BURST` lines of one event in `WINDOW_S`."""
        now_s = time.monotonic()
        with self._lock:
            start_s, count = self._recent.get(event, (now_s, 0))
            if now_s - start_s > WINDOW_S:
                start_s, count = now_s, 0
            self._recent[event] = (start_s, count + 1)
        return count < BURST


log: Final = Log()
