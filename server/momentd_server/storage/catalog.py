"""The catalog: what exists. LMDB, one environment, one writer thread, nothing per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from momentd_server.schema import Schema
from momentd_server.storage.datadir import DataDir


@dataclass(frozen=True, slots=True)
class Manifest:
    """What of a table is durable: the segments with the bytes that count, and its ancestry.

    A record counts iff its generation is in `ancestry` and its update number is not above that
    cap; the later entry wins, then the higher number.
    """

    generation: int
    step: int
    update_number: int
    segments: tuple[tuple[int, int], ...] = ()  # (segment id, counted bytes)
    ancestry: tuple[tuple[int, int], ...] = ()  # (generation, cap), oldest first


@dataclass(frozen=True, slots=True)
class TableRecord:
    id: int
    family: int
    layout: int
    name: str | None
    label: str
    run: str
    schema: Schema
    created_s: float  # seconds since the epoch
    owner: bytes | None  # session id, None for a named table
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as of an orderly stop."""

    session: bytes  # 16 bytes
    plane: str  # "local" or "grpc"
    pid: int
    pid_start: int  # clock ticks since boot, /proc/PID/stat field 22
    boot_id: str
    uid: int
    run: str
    program: str
    streams: tuple[StreamRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamRecord:
    stream: int
    number: int
    fingerprint: bytes
    outcome: bytes  # the reply message


@dataclass(frozen=True, slots=True)
class Put:
    record: TableRecord | SessionRecord


@dataclass(frozen=True, slots=True)
class DropTable:
    id: int


@dataclass(frozen=True, slots=True)
class DropSession:
    session: bytes


Change = Put | DropTable | DropSession


class Catalog:
    """All methods are thread-safe and block until what they did is durable."""

    store_id: bytes

    @classmethod
    def open(cls, datadir: DataDir) -> Catalog:
        """Open or create. Raises Incompatible, CorruptRecord, StorageFailed, OutOfSpace."""
        raise NotImplementedError

    def commit(self, changes: Sequence[Change]) -> None:
        """One durable transaction: all changes or none.

        Raises SchemaMismatch (a name used by another table), OutOfSpace (nothing changed),
        StorageFailed (final: every later call raises it too).
        """
        raise NotImplementedError

    def tables(self) -> list[TableRecord]:
        raise NotImplementedError

    def sessions(self) -> list[SessionRecord]:
        raise NotImplementedError

    def allocate_table(self) -> int:
        """A table id never given out before, from 1. Reserved in durable blocks."""
        raise NotImplementedError

    def allocate_family(self) -> int:
        raise NotImplementedError

    def allocate_segment(self) -> int:
        raise NotImplementedError

    def allocate_generation(self, family_id: int) -> int:
        """A generation number never given out in that family, from 1. One commit each."""
        raise NotImplementedError

    def next_epoch(self) -> int:
        """The number of this engine start, from 1."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
