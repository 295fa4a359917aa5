"""Requests that change records: update and scatter, journalled, and finished after a kill.

`prepare` everything that can fail, outside the lane; then one job of the lane journals the request,
does it, and stores its outcome. What a killed engine has begun is done by `roll_forward` from the
same parts, before the next engine serves anybody.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from momentd_server import rules
from momentd_server.engine.api import Progress, Rows, TableBatch, TableOutcome
from momentd_server.engine.flight import Touch
from momentd_server.engine.inherit import broken
from momentd_server.engine.journal import Described, Journal, Part, Prepared, Unfinished
from momentd_server.engine.ledger import Ledger
from momentd_server.engine.sessions import Session, Ticket
from momentd_server.engine.table import Table
from momentd_server.engine.touch import Toucher
from momentd_server.jit import Pool, row_protocol
from momentd_server.storage import blocks, frames
from momentd_server.storage.blocks import MAX_WORKERS
from momentd_server.storage.space import Space
from momentd_wire.errors import InvalidArgument, StateRolledBack

log = logging.getLogger("momentd.mutations")

# Rows whose results are announced together: fewer would cost more in hand-offs than overlap wins.
_PROGRESS_ROWS: Final = 4096
_LEAST_ROWS: Final = 512

_UPDATE: Final = "update"
_SCATTER: Final = "scatter"
_ARRAYS: Final = ("grads", "mask", "weights", "out_values", "out_factors")

# The outcome of an update, and of a scatter (step, update number), as it is stored.
Encode: TypeAlias = Callable[[list[TableOutcome]], bytes]
EncodeCounters: TypeAlias = Callable[[int, int], bytes]


@dataclass(slots=True)
class Update:
    """One table of an update, checked."""

    table: Table
    input: rules.Batch
    hyper: Any
    touch: Touch
    out_rows: Rows | None
    sent: Rows  # private copy of the row ids as sent
    step: int | None  # None: the table's counter + 1
    expected: int | None = None

    @property
    def rule(self) -> rules.Rule:
        return rules.get(self.table.schema.rule)

    def counters(self) -> tuple[int, int]:
        """In the lane: (step, update number) after it."""
        step = self.table.step + 1 if self.step is None else self.step
        return step, self.table.update_number + 1

    def outcome(self, step: int, number: int) -> TableOutcome:
        rows, given = self.touch.rows.size, self.input
        assert self.out_rows is not None
        return TableOutcome(
            step=step,
            update_number=number,
            rows=rows,
            out_rows=self.out_rows[:rows],
            out_values=None if given.out_values is None else given.out_values[:rows],
            out_factors=None if given.out_factors is None else given.out_factors[:rows],
        )

    def done(self, step: int, number: int) -> None:
        """In the lane: all rows were changed."""
        self.touch.used()
        self.table.block["update_number"] = number
        self.table.block["step"] = step

    def described(self) -> Described:
        given = self.input
        arrays = {name: getattr(given, name) for name in _ARRAYS}
        # dataclasses.asdict copies deeply, which takes longer than all the rest.
        hyper = {name: getattr(self.hyper, name) for name in type(self.hyper).__slots__}
        facts = {"hyper": hyper, "result": given.result}
        return self.table.id, arrays, facts, self.sent

    @classmethod
    def of(
        cls, table: Table, touch: Touch, plan: rules.Plan, part: Part,
        arrays: dict[str, Any], sent: Rows,
    ) -> Update:  # fmt: skip
        """The reverse of `described`."""
        given = rules.Batch(plan, result=part.facts["result"], **arrays)
        hyper = rules.get(table.schema.rule).hyper_type(**part.facts["hyper"])
        return cls(table, given, hyper, touch, None, sent, None)


@dataclass(slots=True)
class Scatter:
    """One table of a scatter, checked. Views are uint8, (rows as sent, bytes of the field)."""

    table: Table
    touch: Touch
    order: Rows
    offsets: list[int]
    views: list[np.ndarray]
    sent: Rows
    step: int | None  # None: as it is

    def counters(self) -> tuple[int, int]:
        """In the lane: (step, update number) after it."""
        step = self.table.step if self.step is None else self.step
        return step, self.table.update_number + 1

    def done(self, step: int, number: int) -> None:
        """In the lane: all rows were written."""
        self.touch.used()
        self.table.block["update_number"] = number
        self.table.block["step"] = step

    def described(self) -> Described:
        arrays = {str(k): view for k, view in enumerate(self.views)}
        return self.table.id, dict(arrays), {"offsets": self.offsets}, self.sent

    @classmethod
    def of(
        cls, table: Table, touch: Touch, order: Rows, part: Part, arrays: dict[str, Any],
        sent: Rows,
    ) -> Scatter:  # fmt: skip
        """The reverse of `described`."""
        offsets = part.facts["offsets"]
        views = [arrays[str(k)] for k in range(len(offsets))]
        return cls(table, touch, order, offsets, views, sent, None)


class Mutations:
    """Thread-safe; the caller's thread waits."""

    def __init__(self, space: Space, ledger: Ledger, toucher: Toucher, pool: Pool) -> None:
        self._space = space
        self._words = space.words.view(np.int64)
        self._ledger = ledger
        self._toucher = toucher
        self._pool = pool
        self._journal = Journal(space, ledger)

    # ------------------------------------------------------------------------------ update

    def plan_update(self, batch: TableBatch, table: Table, scratch: rules.Scratch) -> Update:
        """Everything about one table that can be refused, but for the place of its results."""
        plan = rules.plan(batch.rows, table.rows, scratch)
        if batch.out_rows is not None and batch.out_rows.size < plan.distinct:
            raise InvalidArgument(
                f"the place for {batch.out_rows.size} result rows is too small for "
                f"{plan.distinct} distinct rows",
                argument="result_rows",
            )
        checked = rules.Batch(
            plan, batch.grads, batch.mask, batch.weights, batch.out_values, batch.out_factors,
            batch.result,
        )  # fmt: skip
        return Update(
            table, checked, batch.hyper, Touch(table, plan.unique), batch.out_rows,
            scratch.private[: plan.sent], batch.step, batch.expected_update_number,
        )  # fmt: skip

    def update(
        self, items: Sequence[Update], progress: Progress | None, ticket: Ticket | None,
        encode: Encode | None,
    ) -> list[TableOutcome]:  # fmt: skip
        """Apply to all tables or to none.

        With a ticket the request is journalled, and its outcome, as `encode` writes it, is stored
        together with the effect.
        """
        self._make_room_for_results(items, ticket)
        for item in items:
            # The counter only grows, so a step that is fine for the next one is fine later.
            step = item.table.step + 1 if item.step is None else item.step
            item.rule.check_batch(item.table.schema, item.input, item.hyper, step)
            if item.out_rows is not None:  # as it is by now
                item.out_rows[: item.touch.rows.size] = item.touch.rows
        touches = [item.touch for item in items]
        if ticket is None or encode is None:
            return self._toucher.run(touches, lambda: self._apply(items, progress, None, None))
        prepared = self._journal.prepare(
            ticket, _UPDATE, [item.described() for item in items], [t.rows.size for t in touches]
        )
        try:
            return self._toucher.run(
                touches, lambda: self._apply(items, progress, prepared, encode)
            )
        finally:
            self._journal.release(prepared)

    def _make_room_for_results(self, items: Sequence[Update], ticket: Ticket | None) -> None:
        """Arrays for the results that the caller has no place for: they become the outcome's."""
        wanted: list[tuple[Update, str, tuple[int, ...], np.dtype[Any]]] = []
        for item in items:
            schema, distinct = item.table.schema, item.touch.rows.size
            if item.out_rows is None:
                wanted.append((item, "out_rows", (distinct,), np.dtype(np.int64)))
            if item.input.out_values is None and item.input.result != "none":
                shape = (distinct, schema.width)
                wanted.append((item, "out_values", shape, schema.state_dtype))
        sizes = [math.prod(shape) * dtype.itemsize for _, _, shape, dtype in wanted]
        if ticket is None or not any(sizes):
            places = [np.empty(size, np.uint8) for size in sizes]
        else:
            places = self._ledger.reserve_bulk(ticket.index, sizes)
        for (item, name, shape, dtype), place in zip(wanted, places, strict=True):
            array = place.view(dtype).reshape(shape)
            if name == "out_rows":
                item.out_rows = array
            else:
                item.input = replace(item.input, out_values=array)

    def _apply(
        self, items: Sequence[Update], progress: Progress | None, prepared: Prepared | None,
        encode: Encode | None,
    ) -> list[TableOutcome]:  # fmt: skip
        """The job of an update. Raises only before the first row changes."""
        for item in items:
            _check_number(item.table, item.expected)
        counters = [item.counters() for item in items]
        outcomes = [item.outcome(*each) for item, each in zip(items, counters, strict=True)]
        if prepared is not None and encode is not None:
            self._journal.begin(prepared, counters, encode(outcomes))
        with _must_not_fail(prepared):
            for position, item in enumerate(items):
                rows = item.touch.rows.size
                if prepared is not None and position:
                    self._journal.begin_table(position, rows)
                step, number = counters[position]
                chunk = _PROGRESS_ROWS if progress else max(rows, 1)
                for start in range(0, rows, chunk):
                    stop = min(start + chunk, rows)
                    self._apply_rows(item, step, number, start, stop)
                    if prepared is not None and stop < rows:
                        self._journal.left([(stop, rows)])
                    if progress:
                        progress(position, stop, rows)
                item.done(step, number)
            if prepared is not None:
                self._journal.finish()
                prepared.ticket.stored = True
        return outcomes

    def _apply_rows(self, item: Update, step: int, number: int, start: int, stop: int) -> None:
        table, touch, workers = item.table, item.touch, self._pool.threads
        records = rules.Records(
            space=self._space.bytes,
            words=self._space.words,
            frame_index=touch.index,
            frame_offset=touch.offset,
            word=frames.dirty_word(number),
            undo=self._space.undo(workers, table.geometry.record_bytes),
            progress=self._space.progress[:workers],
            schema=table.schema,
        )
        item.rule.apply(self._pool, records, item.input, item.hyper, step, start, stop)

    # ------------------------------------------------------------------------------ scatter

    def scatter(
        self, item: Scatter, ticket: Ticket | None, encode: EncodeCounters | None
    ) -> tuple[int, int]:
        """Write fields of distinct rows; returns (step, update number) after it."""
        if ticket is None or encode is None:
            return self._toucher.run([item.touch], lambda: self._write(item, None, None))
        prepared = self._journal.prepare(
            ticket, _SCATTER, [item.described()], [item.touch.rows.size]
        )
        try:
            return self._toucher.run([item.touch], lambda: self._write(item, prepared, encode))
        finally:
            self._journal.release(prepared)

    def _write(
        self, item: Scatter, prepared: Prepared | None, encode: EncodeCounters | None
    ) -> tuple[int, int]:
        step, number = item.counters()
        if prepared is not None and encode is not None:
            self._journal.begin(prepared, [(step, number)], encode(step, number))
        with _must_not_fail(prepared):
            self._write_rows(item, number)
            item.done(step, number)
            if prepared is not None:
                self._journal.finish()
                prepared.ticket.stored = True
        return step, number

    def _write_rows(self, item: Scatter, number: int) -> None:
        """Writes what it writes, so that it may be done twice: a torn record is whole then."""
        touch = item.touch
        for at, view in zip(item.offsets, item.views, strict=True):
            self._pool.run(
                frames.scatter_field, touch.rows.size, touch.index, touch.offset,
                frames.dirty_word(number), view, item.order, at, self._space.bytes, self._words,
                least=_LEAST_ROWS,
            )  # fmt: skip

    # ------------------------------------------------------------------------------ after a kill

    def roll_forward(
        self,
        table_of: Callable[[int], Table | None],
        session_of: Callable[[int], Session | None],
    ) -> None:
        """Finish what the last engine was applying, before anybody is served.

        A request that has ended several engines takes its tables out of use instead.
        """
        unfinished = self._journal.unfinished(session_of)
        if unfinished is None:
            return
        tables = [table_of(part.table) for part in unfinished.parts]
        if not self._journal.try_again():
            log.critical("a request has ended several daemons: its tables are taken out of use")
            for table in tables:
                if table is not None:
                    take_out_of_use(table)
            self._journal.abandon()
            return
        began_s = time.perf_counter()
        for position, table in enumerate(tables):
            if table is not None and table.broken is None:
                self._finish_table(unfinished, position, table)
        self._journal.finish()
        log.warning(
            "finished a request of %d tables that the last engine was applying, in %.1f ms",
            len(tables), 1e3 * (time.perf_counter() - began_s),
        )  # fmt: skip

    def _finish_table(self, unfinished: Unfinished, position: int, table: Table) -> None:
        step, number = unfinished.counters[position]
        part, row_ids = unfinished.parts[position], unfinished.row_ids[position]
        if table.update_number >= number:
            table.block["step"] = step  # stored after the number
            return
        arrays = {
            name: self._journal.array(place, unfinished.session)
            for name, place in part.arrays.items()
        }
        plan = rules.plan(row_ids, table.rows, rules.Scratch())
        touch = Touch(table, plan.unique)
        if not self._toucher.find(touch):
            raise RuntimeError(f"rows of a begun request are not in memory (table {table.id})")
        if unfinished.kind == _SCATTER:
            scatter = Scatter.of(table, touch, plan.order, part, arrays, row_ids)
            self._write_rows(scatter, number)
            scatter.done(step, number)
            return
        update = Update.of(table, touch, plan, part, arrays, row_ids)
        if position > unfinished.current:
            self._journal.begin_table(position, touch.rows.size)
        else:
            undo = self._space.undo(MAX_WORKERS, table.geometry.record_bytes)
            row_protocol.restore(self._space.bytes, touch.offset, undo, self._space.progress)
        left = self._journal.left_to_do()
        while left:
            self._journal.left(left)
            self._apply_rows(update, step, number, *left.pop(0))
        self._journal.left([])
        update.done(step, number)


def take_out_of_use(table: Table) -> None:
    """Nothing of it is served any more; it can be dropped."""
    table.block["state"] = blocks.TABLE_BROKEN
    table.broken = broken(table.record)


@contextlib.contextmanager
def _must_not_fail(prepared: Prepared | None) -> Generator[None]:
    """Half of a request must not be served: whatever stops it here ends the engine.

    The next one finishes the request.
    """
    try:
        yield
    except BaseException:
        if prepared is not None:
            log.critical("a request failed after its first row was changed", exc_info=True)
            os.abort()
        raise


def _check_number(table: Table, expected: int | None) -> None:
    if expected is not None and expected != table.update_number:
        raise StateRolledBack(
            f"table {table.id} is at update {table.update_number}, the caller expects {expected}: "
            "it was updated by somebody else, or the daemon went back to an earlier state",
            table=table.id,
            update_number=table.update_number,
            expected=expected,
        )
