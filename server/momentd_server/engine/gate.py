"""Who is in a table: requests share it; drop, clone and flush have it alone."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from momentd_wire.errors import TableNotFound


class Gate:
    """Shared entry until somebody asks for the table alone; then newcomers wait."""

    def __init__(self, table_id: int) -> None:
        self._table_id = table_id
        self._changed = threading.Condition()  # guards the three fields below
        self._inside = 0
        self._closed = False
        self._dropped = False

    def enter(self) -> None:
        """Raises TableNotFound once the table is dropped."""
        with self._changed:
            while self._closed and not self._dropped:
                self._changed.wait()
            if self._dropped:
                raise TableNotFound(f"table {self._table_id} was dropped", table=self._table_id)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside == 0 and self._closed:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Waits for those inside; raises TableNotFound once the table is dropped."""
        with self._changed:
            while self._closed and not self._dropped:
                self._changed.wait()
            if self._dropped:
                raise TableNotFound(f"table {self._table_id} was dropped", table=self._table_id)
            self._closed = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()

    def drop(self) -> None:
        """Called by who has the table alone: all who wait, and all who come, find it dropped."""
        with self._changed:
            self._dropped = True
            self._changed.notify_all()
