"""Updates that are applied exactly once: numbered requests, one outstanding in each stream.

A `PendingUpdate` may be left by an exception at any instruction (Ctrl-C) and completed later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd._session import Session
    from momentd.table import Table


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """The part of an update that concerns one table.

    `count` rows are sent (duplicates allowed, 0 allowed); `dtype` is the element type of gradients
    and results, that of the table's state. `masked` asks for a mask array. `step` is the number
    bias correction counts (default: the table's counter + 1).
    """

    table: Table
    count: int
    dtype: np.dtype
    hyper: pb.SparseAdamHyper
    masked: bool = False
    step: int | None = None
    expected_update_number: int | None = None
    result: pb.ResultKind = pb.RESULT_KIND_DELTA


@dataclass(frozen=True, slots=True)
class UpdateInput:
    """Writable arrays of one table, to be filled before `PendingUpdate.send`.

    rows: int64 (n,). grads: `dtype` (n, width). mask: uint8 (n, width), or None if not asked for.
    """

    rows: np.ndarray
    grads: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did to one table.

    rows: the distinct rows, int64 (m,), ascending. values: `dtype` (m, width), what to add to the
    weights. Both are views that are valid until `PendingUpdate.close`.
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

    inputs: tuple[UpdateInput, ...]
    specs: tuple[UpdateSpec, ...]
    number: int | None
    """Sequence number in the stream; None before the first `send`."""

    def send(self) -> None:
        """Give the request its number and send it; a second call sends it again, same number."""
        raise NotImplementedError

    def progress(self) -> Iterator[tuple[int, int, int]]:
        """Yield (table index, start, stop): `rows[start:stop]` and `values[start:stop]` are final.

        The ranges of one table are adjacent and ascending; a new iterator starts at 0 again.
        `output(index)` gives the arrays. Raises the daemon's error like `results`.
        """
        raise NotImplementedError

    def output(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, values) of a table with room for min(n, table rows) rows, for use with `progress`."""
        raise NotImplementedError

    def results(self) -> list[UpdateResult]:
        """Block until the outcome is known. May be called again.

        Raises the daemon's error (the update changed nothing), or DaemonUnavailable when nobody
        answered in time (the outcome is open: call again), or SessionNotFound / StateRolledBack
        when the daemon came back without this session's state (final).
        """
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether the outcome (results or a final error) is known, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """Acknowledge: the result arrays may be reused, the next update may be made. Idempotent.

        An update that was never sent is thrown away. Raises InvalidArgument while the outcome is
        open (call `results` first).
        """
        raise NotImplementedError


class Stream:
    """A sequence of updates of one user of a session, one outstanding at a time.

    Not to be shared between threads; several streams of one session may be.
    """

    session: Session

    @property
    def pending(self) -> PendingUpdate | None:
        """The update that was (or may have been) sent and is not closed."""
        raise NotImplementedError

    def new_update(self, specs: Sequence[UpdateSpec]) -> PendingUpdate:
        """Room for an update; opens the connection if need be. Nothing is sent.

        Raises InvalidArgument while `pending` is not None: complete and close that first.
        """
        raise NotImplementedError
