"""The journal: the one request that is being applied, so that another engine can finish it.

A request is written here, in the lane, before its first record changes: what is to be done, the
checked row ids, and the answer that it will have got. Large arrays are not copied: those in arenas
are named by their place there, and the client leaves them alone until it has the answer. While the
rule works, each worker notes its progress row by row (jit/row_protocol.py). So whatever a killed
engine leaves is a prefix of the request, and the next one does the rest.

Stores are in the order of the lines: each is a call into numpy, past which no compiler moves it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from momentd_server.engine.api import Rows
from momentd_server.engine.ledger import Ledger
from momentd_server.engine.sessions import Session, Ticket
from momentd_server.jit import row_protocol
from momentd_server.storage import blocks
from momentd_server.storage.space import Space
from momentd_wire.errors import LimitExceeded

# Engines that a request may kill: then it is its fault.
MOST_ATTEMPTS: Final = 3
# Row ids of longer requests are given back to the system.
_KEPT_ROWS: Final = 1 << 16
_ALIGN: Final = 64
_COUNTER_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies: byte `at` of an arena, of the space, or of the journal's extent."""

    where: Literal["arena", "space", "extent"]
    arena: int
    at: int
    shape: tuple[int, ...]
    dtype: str

    def plain(self) -> list[Any]:
        return [self.where, self.arena, self.at, self.shape, self.dtype]

    @staticmethod
    def of(plain: list[Any]) -> Place:
        """The reverse of `plain`."""
        where, arena, at, shape, dtype = plain
        return Place(where, arena, at, tuple(shape), dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be done to one table."""

    table: int
    arrays: dict[str, Place | None]
    facts: dict[str, Any]  # whatever else the job needs, as plain values
    rows: int  # as sent

    def plain(self) -> list[Any]:
        arrays = {name: place and place.plain() for name, place in self.arrays.items()}
        return [self.table, arrays, self.facts, self.rows]

    @staticmethod
    def of(plain: list[Any]) -> Part:
        """The reverse of `plain`."""
        table, arrays, facts, rows = plain
        places = {name: place and Place.of(place) for name, place in arrays.items()}
        return Part(table, places, facts, rows)


# (table id, arrays by name, other facts, private row ids) of one table of a request.
Described: TypeAlias = tuple[int, dict[str, "np.ndarray | None"], dict[str, Any], Rows]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be journalled: made outside the lane."""

    ticket: Ticket
    text: bytes
    row_ids: tuple[Rows, ...]
    distinct: tuple[int, ...]  # rows of each table
    extent: tuple[int, int]  # (offset, bytes); (0, 0): there is none


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a killed engine has left."""

    kind: str
    session: Session | None
    parts: list[Part]
    row_ids: list[Rows]
    counters: list[tuple[int, int]]  # (step, update number) of each table afterwards
    current: int  # index of the table in work


class Journal:
    """All but `prepare` and `release` are called in the lane, or before anything is served."""

    def __init__(self, space: Space, ledger: Ledger) -> None:
        self._space = space
        self._ledger = ledger
        self._block = space.journal

    # ------------------------------------------------------------------------------ writing

    def prepare(
        self,
        ticket: Ticket,
        kind: str,
        parts: Sequence[Described],
        distinct: Sequence[int],
    ) -> Prepared:
        """Each table of a request, and its number of distinct rows.

        Raises LimitExceeded, OutOfMemory.
        """
        rows = sum(part[3].size for part in parts)
        if rows > blocks.JOURNAL_ROWS:
            raise LimitExceeded(
                f"a request of {rows} rows is beyond the limit of {blocks.JOURNAL_ROWS}: use "
                "smaller batches",
                limit=blocks.JOURNAL_ROWS,
            )
        inputs: list[np.ndarray] = []
        described = [
            Part(
                table,
                {name: self._place(array, ticket.session, inputs) for name, array in named.items()},
                facts,
                row_ids.size,
            )
            for table, named, facts, row_ids in parts
        ]
        extent = self._copy(inputs)
        text = json.dumps([kind, [part.plain() for part in described]]).encode()
        return Prepared(ticket, text, tuple(part[3] for part in parts), tuple(distinct), extent)

    def _place(
        self, array: np.ndarray | None, session: Session, inputs: list[np.ndarray]
    ) -> Place | None:
        if array is None:
            return None
        address: int = array.__array_interface__["data"][0]
        shape, dtype = array.shape, array.dtype.str
        for arena in session.arenas.values():
            if 0 <= address - arena.address <= arena.nbytes - array.nbytes:
                return Place("arena", arena.number, address - arena.address, shape, dtype)
        if 0 <= address - self._space.address <= self._space.size - array.nbytes:
            return Place("space", 0, address - self._space.address, shape, dtype)
        at = sum(_aligned(other.nbytes) for other in inputs)
        inputs.append(array)
        return Place("extent", 0, at, shape, dtype)

    def _copy(self, inputs: Sequence[np.ndarray]) -> tuple[int, int]:
        nbytes = sum(_aligned(array.nbytes) for array in inputs)
        if not nbytes:
            return 0, 0
        at, size = self._space.allocate_extent(nbytes)
        start = at
        for array in inputs:
            self._space.view(start, array.nbytes, "u1")[:] = array.reshape(-1).view(np.uint8)
            start += _aligned(array.nbytes)
        return at, size

    def begin(self, prepared: Prepared, counters: Sequence[tuple[int, int]], body: bytes) -> None:
        """From here on the request will be done, whoever does it.

        counters: (step, update number) of each table afterwards; body: the answer. Raises
        LimitExceeded.
        """
        block, ticket, text = self._block, prepared.ticket, prepared.text
        packed = text + np.array(counters, np.int64).tobytes() + body
        if len(packed) > blocks.JOURNAL_TEXT_BYTES:
            raise LimitExceeded(
                f"a request of {len(counters)} tables is too long to be noted: use fewer at once"
            )
        self._space.journal_text[: len(packed)] = np.frombuffer(packed, np.uint8)
        at = 0
        for row_ids in prepared.row_ids:
            self._space.journal_rows[at : at + row_ids.size] = row_ids
            at += row_ids.size
        block["attempts"], block["stream"] = 0, ticket.index + 1
        block["number"] = ticket.number
        block["fingerprint"] = np.frombuffer(ticket.fingerprint, np.uint8)
        block["tables"] = len(counters)
        block["text_bytes"], block["body_bytes"] = len(text), len(body)
        block["extent_at"], block["extent_bytes"] = prepared.extent
        self.begin_table(0, prepared.distinct[0])
        block["state"] = blocks.JOURNAL_APPLYING

    def begin_table(self, index: int, rows: int) -> None:
        """The table before it is done, counters included; this one has so many distinct rows."""
        # While `current` is still the old one, its counters say that it is done.
        self.left([(0, rows)])
        self._block["current"] = index

    def left(self, ranges: Sequence[tuple[int, int]]) -> None:
        """These rows of the table in work are still to be done, and nobody works on any."""
        block = self._block
        other = 1 - int(block["which"])
        for k, part in enumerate(ranges):
            block["todo"][other, k] = part
        block["ranges"][other] = len(ranges)
        block["which"] = other
        # Until this has an effect, the old progress speaks of rows that are not in the list.
        row_protocol.clear(self._space.progress)

    def finish(self) -> None:
        """Everything is done: the outcome is stored with it."""
        block = self._block
        if int(block["stream"]):
            at = int(block["text_bytes"]) + _COUNTER_BYTES * int(block["tables"])
            body = self._space.journal_text[at : at + int(block["body_bytes"])].tobytes()
            fingerprint = block["fingerprint"].tobytes()
            self._ledger.store(int(block["stream"]) - 1, int(block["number"]), fingerprint, body)
        block["state"] = blocks.JOURNAL_IDLE

    def release(self, prepared: Prepared) -> None:
        """Not in the lane: gives memory back that only this request needed."""
        if prepared.extent[1]:
            self._space.free_extent(*prepared.extent)
        rows = sum(row_ids.size for row_ids in prepared.row_ids)
        if rows > _KEPT_ROWS:
            self._space.release_journal_rows(rows)

    # ------------------------------------------------------------------------------ reading

    def unfinished(self, session_of: Callable[[int], Session | None]) -> Unfinished | None:
        """What a killed engine was doing; None: nothing. `session_of`: by stream entry."""
        block = self._block
        if int(block["state"]) != blocks.JOURNAL_APPLYING:
            return None
        size = int(block["text_bytes"])
        kind, plain = json.loads(self._space.journal_text[:size].tobytes())
        parts = [Part.of(each) for each in plain]
        behind = self._space.journal_text[size : size + _COUNTER_BYTES * len(parts)].tobytes()
        numbers = np.frombuffer(behind, np.int64).reshape(-1, 2)
        row_ids: list[Rows] = []
        at = 0
        for part in parts:
            row_ids.append(self._space.journal_rows[at : at + part.rows].copy())
            at += part.rows
        stream = int(block["stream"])
        return Unfinished(
            kind, session_of(stream - 1) if stream else None, parts, row_ids,
            [(int(step), int(number)) for step, number in numbers], int(block["current"]),
        )  # fmt: skip

    def try_again(self) -> bool:
        """Count an attempt to finish it; False if it has killed too many engines already."""
        attempts = int(self._block["attempts"]) + 1
        self._block["attempts"] = attempts
        return attempts < MOST_ATTEMPTS

    def array(self, place: Place | None, session: Session | None) -> np.ndarray | None:
        """The array that was at a place when the request was journalled."""
        if place is None:
            return None
        if place.where == "arena":
            assert session is not None
            memory: Any = session.arenas[place.arena].memory
            return np.ndarray(place.shape, place.dtype, memory, place.at)
        base = int(self._block["extent_at"]) if place.where == "extent" else 0
        nbytes = int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
        return (
            self._space.view(base + place.at, nbytes, "u1").view(place.dtype).reshape(place.shape)
        )

    def left_to_do(self) -> list[tuple[int, int]]:
        """Ranges of the current table's rows that are not done, after `restore`."""
        block = self._block
        which = int(block["which"])
        todo = block["todo"][which, : int(block["ranges"][which])].tolist()
        done = sorted(
            (first, done) for _, done, first, last in self._space.progress[:, :4].tolist() if last
        )
        return [part for start, stop in todo for part in _without(start, stop, done)]

    def abandon(self) -> None:
        """It is not tried again; nothing of it will be answered."""
        self._block["state"] = blocks.JOURNAL_IDLE


def _without(start: int, stop: int, done: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """[start, stop) without the ranges `done`, which ascend and do not overlap."""
    at = start
    for first, last in done:
        if last <= at or first >= stop:
            continue
        if first > at:
            yield at, first
        at = last
    if at < stop:
        yield at, stop


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
