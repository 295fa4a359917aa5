"""Log lines: one JSON object a line on stderr.

All of the daemon logs through the standard loggers below "momentd". `log` adds named fields to an
event. Levels: `info` is a change of state, `warning` may heal, `error` means that data or a
request was lost. Nothing is logged for each request, and never row data or a whole session id.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Final, TextIO

# A peer that causes the same event again and again must not fill the disk.
BURST: Final = 20
WINDOW_S: Final = 60.0


class JsonFormatter(logging.Formatter):
    """One record as one JSON object: time, level, logger, event, its fields, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class BurstFilter(logging.Filter):
    """Lets at most `BURST` lines of one place and level pass in `WINDOW_S`; says when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # guards the field below
        # place -> (start of its window, lines in it)
        self._recent: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now_s = (str(record.msg), record.levelno), time.monotonic()
        with self._lock:
            start_s, count = self._recent.get(place, (now_s, 0))
            if now_s - start_s > WINDOW_S:
                start_s, count = now_s, 0
            self._recent[place] = (start_s, count + 1)
        if count == BURST:
            record.msg = f"{record.msg} (further ones are left out for {WINDOW_S:.0f} s)"
        return count <= BURST


class EventLog:
    """Events with fields, on a standard logger."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, *, cause: BaseException | None = None, **fields: object) -> None:
        """An event that lost something; `cause` adds its traceback."""
        self._logger.error(event, exc_info=cause, extra={"fields": fields})


log: Final = EventLog(logging.getLogger("momentd"))


def configure(stream: TextIO | None = None) -> None:
    """Send the daemon's log lines to `stream` (stderr), once for each process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(BurstFilter())
    # gRPC logs what it cannot tell its caller, e.g. bytes that are not a message.
    for name in ("momentd", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    # Nobody reads stderr any more (a closed terminal): the daemon goes on.
    logging.raiseExceptions = False
