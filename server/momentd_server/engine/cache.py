"""The budget: slabs, who has them, and how a request gets the frames it needs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.sharing import Needs, Sharing
from momentd_server.engine.table import MAX_VICTIMS, Table
from momentd_server.storage import frames
from momentd_server.storage.space import ROW_BYTES, SLAB_BYTES, Space
from momentd_wire.errors import OutOfMemory

log = logging.getLogger("momentd.cache")

# Slabs kept populated for the next first touches: populating one takes longer than using it.
READY_SLABS: Final = 32
_COLLAPSED_ROWS_BYTES: Final = 256 << 20


class SlabStock:
    """Slabs that no table has: ready ones are populated, raw ones take no memory yet."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._changed = threading.Condition()  # guards the fields below
        self._ready: deque[int] = deque()
        self._raw: deque[int] = deque(range(space.slabs))
        # Offsets of 2 MiB: slabs in use that are not huge pages yet, and parts of location arrays.
        self._to_collapse: deque[int] = deque()
        self._collapsing = threading.Lock()  # held from taking an offset until it is done with
        self._stopping = False
        self._refused = False  # the kernel had no memory: nothing is populated ahead for now
        self.total = space.slabs
        self._taken = 0  # slabs that tables have
        self._thread = threading.Thread(target=self._populate, name="momentd-slabs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def inherit(self, taken: Iterable[int]) -> None:
        """Before `start`: tables have these slabs already; the memory of all others is given back.

        Neighbours are given back together: most of them never had any.
        """
        mine = np.ones(self._space.slabs, np.bool_)
        mine[list(taken)] = False
        free = np.flatnonzero(mine)
        self._space.owners[free] = 0
        for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
            if run.size:
                self._space.release_slabs(int(run[0]), run.size)
        self._raw = deque(free.tolist())
        self._taken = self._space.slabs - free.size
        self._to_collapse.extend(map(self._space.slab_at, np.flatnonzero(~mine).tolist()))

    def lose(self, slab: int) -> None:
        """Before `start`: a slab whose frames are all free goes for good."""
        self._space.owners[slab] = 0
        self._space.release_slab(slab)
        self._taken -= 1
        self.total -= 1

    @property
    def free(self) -> int:
        return self.total - self._taken

    @property
    def populated(self) -> int:
        return self.total - len(self._raw)

    def take(self) -> int | None:
        """A populated slab, or None if every slab has a table or the kernel has no memory."""
        with self._changed:
            if self._ready:
                self._taken += 1
                self._changed.notify_all()
                return self._ready.popleft()
            if not self._raw:
                return None
            slab = self._raw.popleft()
        if not self._try_populate(slab):
            return None
        with self._changed:
            self._taken += 1
            self._to_collapse.append(self._space.slab_at(slab))
            self._changed.notify_all()
        return slab

    def collapse_rows(self, table: Table) -> None:
        """Makes huge pages of a table's location and check arrays, later, in the background.

        Only of whole ones inside the arrays, and not for tables so large that memory for rows which
        may never be touched would matter: their pages come as they are touched.
        """
        nbytes = table.rows * ROW_BYTES
        if nbytes <= _COLLAPSED_ROWS_BYTES:
            with self._changed:
                whole = nbytes // SLAB_BYTES
                self._to_collapse.extend(table.location_at + k * SLAB_BYTES for k in range(whole))
                self._changed.notify_all()

    def give(self, slab: int) -> None:
        """A slab whose frames are all free comes back."""
        self._space.owners[slab] = 0
        with self._changed:
            self._taken -= 1
            self._refused = False
            if len(self._ready) < READY_SLABS:
                self._ready.append(slab)
                return
        self._space.release_slab(slab)
        with self._changed:
            self._raw.append(slab)

    def forget_rows(self, table: Table) -> None:
        """A dropped table's arrays are not touched after this returns."""
        end = table.location_at + table.rows * ROW_BYTES
        with self._changed:
            kept = [at for at in self._to_collapse if not table.location_at <= at < end]
            self._to_collapse = deque(kept)
        with self._collapsing:
            pass  # the one in work is done

    def _try_populate(self, slab: int) -> bool:
        """False, and one slab fewer for good, where the kernel has no memory."""
        try:
            self._space.populate_slab(slab)
        except OutOfMemory as error:
            with self._changed:
                self.total -= 1
                self._refused = True
            log.warning("the cache shrinks to %d slabs: %s", self.total, error)
            return False
        return True

    def _populate(self) -> None:
        """Keeps ready slabs in stock, in the background, and makes them huge pages."""
        while True:
            with self._changed:
                while not self._stopping and not self._to_collapse and not self._wants_one():
                    self._changed.wait()
                if self._stopping:
                    return
                at = self._to_collapse.popleft() if self._to_collapse else None
                if at is not None:
                    self._collapsing.acquire()
                raw = self._raw.popleft() if at is None else None
            if at is not None:
                self._space.populate(at)
                self._space.collapse(at)
                self._collapsing.release()
            elif raw is not None and self._try_populate(raw):
                self._space.collapse(self._space.slab_at(raw))
                with self._changed:
                    self._ready.append(raw)

    def _wants_one(self) -> bool:
        return len(self._ready) < READY_SLABS and bool(self._raw) and not self._refused


class Cache:
    """Frames for requests. All methods are jobs of the lane, or called from one."""

    def __init__(
        self, space: Space, stock: SlabStock, tables: Callable[[], Iterable[Table]]
    ) -> None:
        self._space = space
        self._words = space.words.view(np.int64)
        self.stock = stock
        self.sharing = Sharing(space, tables, stock.give)
        self._tables = tables

    def reserve(self, table: Table, count: int, needs: Needs) -> Rows | None:
        """`count` frames that nobody sees, or None: then the cleaner must free some first."""
        if table.free_top < count:
            self.sharing.collect(table)
            self._grow(table, count)
        if table.free_top < count:
            self.sharing.ask(table, needs)
            table.evict(count - table.free_top, self._words)
        if table.free_top < count:
            self.sharing.insist(table, needs)
        if table.free_top < count:
            return None
        reserved = np.empty(count, np.int64)
        frames.reserve(table.free, table.free_top, count, self._words, table.geo, reserved)
        table.free_top -= count
        return reserved

    def give_back(self, table: Table, reserved: Rows) -> None:
        frames.unreserve(
            reserved, reserved.size, self._words, table.geo, table.free, table.free_top
        )
        table.free_top += reserved.size

    def release(self, slabs: Iterable[int]) -> None:
        """Slabs of a dropped table go back to the stock. Not in the lane."""
        for slab in slabs:
            self.stock.give(slab)

    def short_of_clean(self, table: Table) -> int:
        """Frames to clean so that the next requests of this table find two batches in stock."""
        if self.stock.free or not table.slabs.size:
            return 0
        # Of a table that has few frames not all: what is used all the time is to stay.
        wanted = max(table.demand, min(2 * table.demand, table.frames // 2))
        return max(0, min(wanted, table.frames, MAX_VICTIMS) - table.in_stock)

    def nothing_to_clean(self) -> bool:
        return not any(table.dirty for table in self._tables())

    def fresh_bytes(self) -> int:
        """What read-ahead has brought and nobody has used yet."""
        return sum(table.fresh * table.frame_bytes for table in self._tables())

    def _grow(self, table: Table, count: int) -> None:
        while table.free_top < count:
            slab = self.stock.take()
            if slab is None:
                return
            self.sharing.join(table, slab)
