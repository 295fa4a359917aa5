"""What the catalog holds, as values, and their bytes: JSON, then the hash of key and JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from momentd_server.schema import FieldSpec, Schema
from momentd_server.storage.hashing import hash_bytes
from momentd_wire.errors import CorruptRecord

_HASH_BYTES: Final = 8
_CONTENT_BYTES: Final = 16


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
    """A table as of its last commit."""

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
    made_by: str = ""  # the numbered request that made it; see engine/sessions.py, Ticket


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One table of a snapshot, as of its cut."""

    id: bytes  # 16 bytes: a digest of the content, the same wherever the content is the same
    table: int  # of which it was taken
    label: str
    family: int
    layout: int
    schema: Schema
    manifest: Manifest
    rows_touched: int


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A consistent cut of tables of a run. Everything it lists is durable."""

    name: str
    run: str
    created_s: float  # seconds since the epoch
    pinned: bool  # only a person deletes it
    tables: tuple[TableSnapshot, ...]


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """The last outcome of one stream of a session."""

    stream: int
    number: int
    fingerprint: bytes
    outcome: bytes  # the reply message


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


def content_id(schema: Schema, step: int, digest: int) -> bytes:
    """128 bits that are the same for the same content: schema, step and records.

    `digest`: sum of the records' hashes modulo 2**64, over row and bytes; a record that equals its
    initial value counts 0, as one that was never touched.
    """
    text = json.dumps([asdict(schema), step, digest], separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_CONTENT_BYTES).digest()


def seal(key: bytes, body: dict[str, Any]) -> bytes:
    """A value of the catalog. LMDB checks nothing itself, so each value carries its own hash."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return text + hash_bytes(key + text).to_bytes(_HASH_BYTES, "little")


def unseal(key: bytes, value: bytes, path: object) -> dict[str, Any]:
    """The body of a value. Raises CorruptRecord."""
    text = value[:-_HASH_BYTES]
    if len(value) < _HASH_BYTES or hash_bytes(key + text) != value_hash(value):
        raise CorruptRecord(
            f"{path}: the entry {key!r} does not match its hash; restore the file from a copy",
            path=path,
            key=key.hex(),
        )
    return json.loads(text)


def value_hash(value: bytes) -> int:
    """The hash that a sealed value carries."""
    return int.from_bytes(value[-_HASH_BYTES:], "little")


def snapshot_body(snapshot: SnapshotRecord) -> dict[str, Any]:
    return {
        "name": snapshot.name,
        "run": snapshot.run,
        "created_s": snapshot.created_s,
        "pinned": snapshot.pinned,
        "tables": [
            {
                "id": table.id.hex(),
                "table": table.table,
                "label": table.label,
                "family": table.family,
                "layout": table.layout,
                "schema": _schema_body(table.schema),
                "manifest": _manifest_body(table.manifest),
                "rows_touched": table.rows_touched,
            }
            for table in snapshot.tables
        ],
    }


def snapshot_of(body: dict[str, Any]) -> SnapshotRecord:
    tables = tuple(
        TableSnapshot(
            id=bytes.fromhex(table["id"]),
            table=table["table"],
            label=table["label"],
            family=table["family"],
            layout=table["layout"],
            schema=_schema_of(table["schema"]),
            manifest=_manifest_of(table["manifest"]),
            rows_touched=table["rows_touched"],
        )
        for table in body["tables"]
    )
    return SnapshotRecord(body["name"], body["run"], body["created_s"], body["pinned"], tables)


def _manifest_body(manifest: Manifest) -> dict[str, Any]:
    return {
        "generation": manifest.generation,
        "step": manifest.step,
        "update_number": manifest.update_number,
        "segments": manifest.segments,
        "ancestry": manifest.ancestry,
    }


def _manifest_of(manifest: dict[str, Any]) -> Manifest:
    return Manifest(
        generation=manifest["generation"],
        step=manifest["step"],
        update_number=manifest["update_number"],
        segments=tuple((segment, counted) for segment, counted in manifest["segments"]),
        ancestry=tuple((generation, cap) for generation, cap in manifest["ancestry"]),
    )


def table_body(table: TableRecord) -> dict[str, Any]:
    return {
        "id": table.id,
        "family": table.family,
        "layout": table.layout,
        "name": table.name,
        "label": table.label,
        "run": table.run,
        "schema": _schema_body(table.schema),
        "created_s": table.created_s,
        "owner": None if table.owner is None else table.owner.hex(),
        "manifest": _manifest_body(table.manifest),
        "made_by": table.made_by,
    }


def table_of(body: dict[str, Any]) -> TableRecord:
    return TableRecord(
        id=body["id"],
        family=body["family"],
        layout=body["layout"],
        name=body["name"],
        label=body["label"],
        run=body["run"],
        schema=_schema_of(body["schema"]),
        created_s=body["created_s"],
        owner=None if body["owner"] is None else bytes.fromhex(body["owner"]),
        manifest=_manifest_of(body["manifest"]),
        made_by=body["made_by"],
    )


def session_body(session: SessionRecord) -> dict[str, Any]:
    return {
        "plane": session.plane,
        "pid": session.pid,
        "pid_start": session.pid_start,
        "boot_id": session.boot_id,
        "uid": session.uid,
        "run": session.run,
        "program": session.program,
        "streams": [
            [stream.stream, stream.number, stream.fingerprint.hex(), stream.outcome.hex()]
            for stream in session.streams
        ],
    }


def session_of(key: bytes, body: dict[str, Any]) -> SessionRecord:
    return SessionRecord(
        session=key,
        plane=body["plane"],
        pid=body["pid"],
        pid_start=body["pid_start"],
        boot_id=body["boot_id"],
        uid=body["uid"],
        run=body["run"],
        program=body["program"],
        streams=tuple(
            StreamRecord(stream, number, bytes.fromhex(fingerprint), bytes.fromhex(outcome))
            for stream, number, fingerprint, outcome in body["streams"]
        ),
    )


def _schema_body(schema: Schema) -> dict[str, Any]:
    return {
        "rows": schema.rows,
        "width": schema.width,
        "rule": schema.rule,
        "fields": [[f.name, f.dtype, f.width, f.initial] for f in schema.fields],
    }


def _schema_of(body: dict[str, Any]) -> Schema:
    fields = tuple(FieldSpec(*field) for field in body["fields"])
    return Schema(body["rows"], body["width"], fields, body["rule"])
