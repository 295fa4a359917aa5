"""Read-ahead: rows that somebody will want soon come into frames, in the background, in order.

It never changes results: whoever wants a row that did not come reads it, and gets the error if
there is one. What it has brought and nobody has used yet takes at most a quarter of the cache.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from momentd_server.engine.api import Rows
from momentd_server.engine.table import Table
from momentd_server.engine.touch import Toucher
from momentd_wire.errors import MomentdError

log = logging.getLogger("momentd.prefetch")

_QUEUED: Final = 1024
# For so long rows wait for room: after that the batch that wanted them has most likely passed.
_PATIENCE_S: Final = 5.0
_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Wish:
    table: int
    generation: int
    rows: Rows  # distinct, ascending
    until_s: float


class Prefetcher:
    """A queue of wishes and the thread that fulfils them.

    `enter(table id, generation)`: a context in which the table stays.
    """

    def __init__(
        self,
        toucher: Toucher,
        enter: Callable[[int, int], AbstractContextManager[Table]],
    ) -> None:
        self._toucher = toucher
        self._enter = enter
        self._wishes: queue.Queue[_Wish | None] = queue.Queue(_QUEUED)
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="momentd-prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        try:
            self._wishes.put_nowait(None)  # wakes the thread; a full queue does so by itself
        except queue.Full:
            log.debug("stopping with a full queue")
        self._thread.join()

    def offer(self, table: Table, rows: Rows) -> bool:
        """Rows on disk, to be read when it is their turn; False if too much is waiting."""
        wish = _Wish(table.id, table.generation, rows, time.monotonic() + _PATIENCE_S)
        try:
            self._wishes.put_nowait(wish)
        except queue.Full:
            return False
        return True

    def _loop(self) -> None:
        while (wish := self._wishes.get()) is not None and not self._stopping:
            try:
                self._fulfil(wish)
            except MomentdError as error:
                # Whoever needs the rows reads them again and gets the error.
                log.info("prefetch of table %d: %s", wish.table, error)
            except Exception:
                log.exception("prefetch of table %d failed", wish.table)

    def _fulfil(self, wish: _Wish) -> None:
        rows = wish.rows
        while not self._stopping:
            # Not inside while waiting: a drop or a flush of the table would wait as well.
            with self._enter(wish.table, wish.generation) as table:
                wanted, rows = rows, self._toucher.prefetch(table, rows)
                if not rows.size:
                    return
                if rows.size < wanted.size:
                    continue
                if time.monotonic() > wish.until_s:
                    self._toucher.forget_fresh(table)
                    return
            self._toucher.wait(_RETRY_S)
