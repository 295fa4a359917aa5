"""Snapshots as clients see them."""

from __future__ import annotations

from dataclasses import dataclass

from momentd_wire.v1 import momentd_pb2 as pb


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One table of a snapshot.

    id: 32 hex digits, a digest of the content: the same wherever step and records are the same.
    """

    id: str
    label: str
    rows: int
    dim: int
    step: int
    rows_touched: int
    table_id: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named, durable, consistent cut of tables.

    created_s: Unix time. pinned: only a person deletes it. nbytes: of its records; only_bytes: of
    them, those that nothing else needs. bytes_written: by the call that made it, 0 if it was there.
    """

    name: str
    run: str
    created_s: float
    pinned: bool
    tables: tuple[TableSnapshot, ...]
    nbytes: int
    only_bytes: int
    bytes_written: int = 0


def from_wire(message: pb.Snapshot, bytes_written: int = 0) -> Snapshot:
    """What the daemon says of a snapshot."""
    tables = tuple(
        TableSnapshot(
            table.id.hex(), table.label, table.schema.rows, table.schema.width, table.step,
            table.rows_touched, table.table_id,
        )
        for table in message.tables
    )  # fmt: skip
    return Snapshot(
        message.name, message.run, message.created_s, message.pinned, tables, message.bytes,
        message.bytes_only, bytes_written,
    )  # fmt: skip
