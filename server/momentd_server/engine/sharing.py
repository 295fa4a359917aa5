"""Slabs that change tables: towards fair shares, and to who cannot do without.

A slab that is to go is *leaving*: its frames are handed out no more, the cleaner writes what is
dirty in it, and as soon as all its frames are free it joins the table that it is promised to. So a
table grows while it works on, and nothing is taken from a request in work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.table import Table
from momentd_server.storage import frames, victim_kernels
from momentd_server.storage.space import Space

# A table that nobody used for so long gives its slabs to whoever asks.
IDLE_S: Final = 5.0

# Slabs that a request needs of each of its tables, by id: none of them is taken for another.
Needs = Mapping[int, int]


class Sharing:
    """All methods are jobs of the lane, or called from one.

    Runs have equal shares of the cache, and the tables of a run equal shares of that. What a table
    does not ask for others keep: only who must evict asks.
    """

    def __init__(
        self, space: Space, tables: Callable[[], Iterable[Table]], give: Callable[[int], None]
    ) -> None:
        self._space = space
        self._words = space.words.view(np.int64)
        self._tables = tables
        self._give = give  # a slab whose frames are all free, back to the stock

    def ask(self, table: Table, needs: Needs) -> None:
        """A table that must evict asks for one slab, of who has most above its share."""
        if table.promised:
            return
        shares = self._shares(table)
        victim = self._richest(table, shares, needs)
        # A move that makes both more equal, so that none goes back.
        if victim is None or _excess(victim, shares) - _excess(table, shares) <= 1:
            return
        # Else its next request would take it back.
        if shares[victim.id] and (victim.staying - 1) * victim.geometry.frames < victim.demand:
            return
        self._promise(victim, table)

    def insist(self, table: Table, needs: Needs) -> None:
        """A request needs more slabs than its table has: from whoever has them."""
        shares = self._shares(table)
        while table.staying + table.promised < needs.get(table.id, 0):
            victim = self._richest(table, shares, needs)
            if victim is None:
                return
            self._promise(victim, table)

    def _richest(self, table: Table, shares: dict[int, float], needs: Needs) -> Table | None:
        return max(
            (other for other in self._others(table) if other.staying > needs.get(other.id, 0)),
            key=lambda other: _excess(other, shares),
            default=None,
        )

    def collect(self, table: Table) -> None:
        """Slabs that are promised to the table join it if they are free by now."""
        if table.promised:
            for other in self._others(table):
                for slab in [s for s, taker in other.leaving.items() if taker is table]:
                    self.empty(other, slab)

    def empty(self, victim: Table, slab: int) -> bool:
        """Frees what is clean in a leaving slab; whether it has left with that."""
        if slab not in victim.leaving:
            return False
        freed: Rows = np.empty(victim.geometry.frames, np.int64)
        _, dirty, pinned = victim_kernels.evict_slab(
            slab, victim.location, self._words, victim.geo, victim.tally, freed
        )
        if dirty or pinned:
            return False
        taker = victim.leaving.pop(slab)
        victim.free_top = frames.without_slab(victim.free, victim.free_top, slab)
        victim.remove_slab(slab)
        taker.promised -= 1
        if taker.dropped:
            self._give(slab)
        else:
            self.join(taker, slab)
        return True

    def join(self, table: Table, slab: int) -> None:
        """A slab whose frames are all free joins a table."""
        self._space.clear_slab_meta(slab, table.geometry)
        # Only now: what another table's frames left there must not be taken for this one's.
        self._space.owners[slab] = table.id
        table.add_slab(slab)

    def _promise(self, victim: Table, taker: Table) -> None:
        # In turn, so that no slab is asked for twice in a row.
        size = victim.slabs.size
        start = victim.slabs_offered % size
        at = next(k % size for k in range(start, start + size) if self._stays(victim, k % size))
        victim.slabs_offered = at + 1
        slab = int(victim.slabs[at])
        victim.leaving[slab] = taker
        taker.promised += 1
        victim.free_top = frames.without_slab(victim.free, victim.free_top, slab)
        self.empty(victim, slab)

    def _stays(self, table: Table, at: int) -> bool:
        return int(table.slabs[at]) not in table.leaving

    def _others(self, table: Table) -> list[Table]:
        return [other for other in self._tables() if other is not table and other.slabs.size]

    def _shares(self, asking: Table) -> dict[int, float]:
        """Slabs that each table may have when all want more; an idle one none."""
        oldest_s = time.monotonic() - IDLE_S
        tables = list(self._tables())
        wanting = [t for t in tables if t is asking or (t.slabs.size and t.last_used_s >= oldest_s)]
        tables_of = Counter(table.record.run for table in wanting)
        shares = dict.fromkeys((table.id for table in tables), 0.0)
        for table in wanting:
            shares[table.id] = self._space.slabs / len(tables_of) / tables_of[table.record.run]
        return shares


def _excess(table: Table, shares: Mapping[int, float]) -> float:
    return table.staying - shares[table.id]
