"""Updates that are applied exactly once: numbered requests, one outstanding in each stream.

A `PendingUpdate` may be left by an exception at any instruction (Ctrl-C) and completed later. What
makes that work: a number follows from the last acknowledged one, so taking it twice gives the same;
every change of a stream is one assignment; a request is sent again under its number as often as
need be, because the daemon answers a repeated one with the stored outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from momentd._update_call import UpdateCall, UpdateInput, UpdateSpec
from momentd_wire.errors import InvalidArgument, MomentdError, StateRolledBack

if TYPE_CHECKING:
    from momentd._session import Session
    from momentd._transport import Block
    from momentd._waits import Patience

__all__ = ["PendingUpdate", "Stream", "UpdateInput", "UpdateResult", "UpdateSpec"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did to one table.

    rows: the distinct rows, int64 (m,), ascending. values: `dtype` (m, width), what to add to the
    weights. From `PendingUpdate.results` both are views, valid until `PendingUpdate.close`.
    """

    step: int
    update_number: int
    rows: np.ndarray
    values: np.ndarray


class PendingUpdate:
    """One atomic update over one or more tables, from its first byte to its acknowledgement.

    Fill `inputs`, then `send()`, then `results()` (or `progress()` first), then `close()`. Any of
    these may be left by an exception and called again; nothing is applied twice.
    """

    def __init__(self, stream: Stream, call: UpdateCall) -> None:
        self._stream = stream
        self._session = stream.session
        self._call = call
        self._place = stream._place()
        self._lost: str | None = None
        self._results: list[UpdateResult] = []
        self.specs = call.specs
        self.inputs: tuple[UpdateInput, ...] = call.inputs
        self.number: int | None = None
        """Sequence number in the stream; None before the first `send`."""

    def __repr__(self) -> str:
        tables = ", ".join(str(spec.table.id) for spec in self.specs)
        state = "done" if self.done else "open"
        return f"PendingUpdate(number={self.number}, tables=[{tables}], {state})"

    def send(self) -> None:
        """Give the request its number and send it; a second call makes sure that it was sent.

        A connection that is lost here is not an error yet: `results` makes a new one.
        """
        self._check_process()
        self._stream._begin(self)
        if self.number is None:
            number = self._stream._next_number()
            self._call.set_sequence(self._stream.id, number)
            self.number = number
        self._session.try_post(self._call, self._place.incarnation)

    @property
    def done(self) -> bool:
        """Whether the outcome (results or a final error) is known, without waiting."""
        return self._lost is not None or self._call.settled

    def progress(self) -> Iterator[tuple[int, int, int]]:
        """Yield (table index, start, stop): `rows[start:stop]` and `values[start:stop]` are final.

        The ranges of one table are adjacent and ascending; a new iterator starts at 0 again.
        `output(index)` gives the arrays. Raises the daemon's error like `results`. Over gRPC there
        is one range for each table, at the end.
        """
        finished = [0] * len(self.specs)
        patience = self._session.patience("an update")
        while not self.done:
            self._advance(patience)
            for index, stop in list(self._call.progress.items()):
                if stop > finished[index]:
                    start, finished[index] = finished[index], stop
                    yield index, start, stop
        for index, result in enumerate(self.results()):
            stop = result.rows.shape[0]
            if stop > finished[index]:
                yield index, finished[index], stop

    def output(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, values) of a table with room for min(n, table rows), for use with `progress`."""
        return self._call.output(index)

    def results(self) -> list[UpdateResult]:
        """Block until the outcome is known. May be called again.

        Raises the daemon's error (the update changed nothing), or DaemonUnavailable when nobody
        answered in time (the outcome is open: call again), or StateRolledBack when the daemon came
        back without this session's state (final).
        """
        if not self.done:
            patience = self._session.patience("an update")
            while not self.done:
                self._advance(patience)
        if self._lost is not None:
            raise StateRolledBack(self._lost)
        if self._results:
            return self._results
        results: list[UpdateResult] = []
        for index, table in enumerate(self._call.outcome().tables):
            rows, values = self._call.output(index)
            result = UpdateResult(
                table.step, table.update_number, rows[: table.rows], values[: table.rows]
            )
            self.specs[index].table._seen(table.step, table.update_number)
            results.append(result)
        # The outcome does not change any more.
        self._results = results
        return results

    def close(self) -> None:
        """Acknowledge: the result arrays may be reused, the next update may be made. Idempotent.

        An update that was never sent is thrown away. Raises InvalidArgument while the outcome is
        open (call `results` first).
        """
        if self.number is None:
            self._stream._forget(self)
        elif not self.done:
            raise InvalidArgument(
                f"update {self.number} has no outcome yet: call results() before close()"
            )
        else:
            self._stream._acknowledge(self, self.number)

    def _advance(self, patience: Patience) -> None:
        self._check_process()
        if self.number is None:
            raise InvalidArgument("this update was not sent: call send() first")
        try:
            self._session.advance(self._call, patience, self._place.incarnation)
        except StateRolledBack as error:
            if not self._call.settled:
                self._lost = error.message
            raise

    def _check_process(self) -> None:
        if self._place.forks != self._session.forks:
            raise StateRolledBack(
                "this update was made in the parent process, before the fork: only the parent can "
                "complete it"
            )


class _Place(NamedTuple):
    """Where a stream is. Replaced as a whole, by one assignment."""

    incarnation: int
    forks: int
    acknowledged: int = 0
    pending: PendingUpdate | None = None


class Stream:
    """A sequence of updates of one user of a session, one outstanding at a time.

    Not to be shared between threads; several streams of one session may be.
    """

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.id = number
        self._state = _Place(session.incarnation, session.forks)
        # The latest update, sent or not; it alone may use the block.
        self._latest: PendingUpdate | None = None
        self._block: Block | None = None

    def __repr__(self) -> str:
        place = self._place()
        return f"Stream({self.id}, acknowledged={place.acknowledged}, pending={place.pending})"

    @property
    def pending(self) -> PendingUpdate | None:
        """The update that was (or may have been) sent and is not closed."""
        return self._place().pending

    def new_update(
        self, specs: Sequence[UpdateSpec], *, report_progress: bool = True
    ) -> PendingUpdate:
        """Room for an update; opens the connection if need be. Nothing is sent.

        An earlier update that was never sent becomes invalid. `report_progress`: let the daemon
        tell which results are ready, for `PendingUpdate.progress`.

        Raises InvalidArgument while `pending` is not None (complete and close that first),
        LimitExceeded or OutOfMemory if the batch is larger than an arena may be.
        """
        if not specs:
            raise InvalidArgument("an update needs at least one table")
        transport = self.session.connected()
        if self._place().pending is not None:
            raise InvalidArgument(
                f"update {self._place().pending} of this stream is not closed: complete it first"
            )
        call = UpdateCall(tuple(specs), report_progress)
        block = self._block
        if block is None or block.nbytes < call.nbytes or not transport.owns(block):
            # Let go of the old one first, so that its arena can be given back.
            self._latest = self._block = block = None
            block = self.session.allocate(call.nbytes)
        call.use(block)
        update = PendingUpdate(self, call)
        self._block = block
        self._latest = update
        return update

    # The rest is for PendingUpdate. Each changes the stream by one assignment.

    def _place(self) -> _Place:
        session = self.session
        place = self._state
        if place.forks != session.forks:
            # In a forked child: what is pending is the parent's.
            place = self._state = _Place(session.incarnation, session.forks)
            self._latest = self._block = None
        elif place.incarnation != session.incarnation and place.pending is None:
            place = self._state = _Place(session.incarnation, session.forks)
        return place

    def _next_number(self) -> int:
        return self._place().acknowledged + 1

    def _begin(self, update: PendingUpdate) -> None:
        place = self._place()
        if place.pending is update:
            return
        if update is not self._latest or place.pending is not None or update.number is not None:
            raise InvalidArgument("this update is closed, or a newer one has taken its place")
        self._state = place._replace(pending=update)

    def _acknowledge(self, update: PendingUpdate, number: int) -> None:
        place = self._place()
        if place.pending is update:
            self._state = place._replace(acknowledged=number, pending=None)

    def _forget(self, update: PendingUpdate) -> None:
        """It has no number, so it was not sent."""
        if self._latest is update:
            self._latest = None
        place = self._place()
        if place.pending is update:
            self._state = place._replace(pending=None)


def complete(update: PendingUpdate) -> MomentdError | None:
    """Bring a pending update to its end; returns the daemon's refusal, if that is the outcome.

    Raises DaemonUnavailable: the update is still pending.
    """
    try:
        if not update.done:
            update.send()
        update.results()
    except MomentdError as error:
        if not update.done:
            raise
        update.close()
        return error
    update.close()
    return None
