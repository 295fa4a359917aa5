"""What entries of the catalog that are each whole can still have wrong between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from momentd_server.schema import Schema
from momentd_server.storage.damage import Damage
from momentd_server.storage.format import BLOCK, HEADER_BYTES, SEGMENT_BYTES
from momentd_server.storage.records import Manifest, TableRecord


@dataclass(frozen=True, slots=True)
class Need:
    """A manifest, and the table or the snapshot whose it is."""

    family: int
    layout: int
    schema: Schema
    manifest: Manifest
    table: int | None
    snapshot: str | None = None
    content: bytes = b""  # of a snapshot: the digest of what it contains

    @property
    def whose(self) -> str:
        return f"table {self.table}" if self.snapshot is None else f"snapshot {self.snapshot!r}"

    @property
    def tables(self) -> tuple[int, ...]:
        return () if self.table is None else (self.table,)

    @property
    def snapshots(self) -> tuple[str, ...]:
        return () if self.snapshot is None else (self.snapshot,)


def check_entries(path: Path, tables: Iterable[TableRecord], needs: Iterable[Need]) -> list[Damage]:
    """Names, and of each manifest its segments, counted bytes and ancestry."""
    damages: list[Damage] = []
    names: dict[str, int] = {}
    for table in tables:
        other = names.setdefault(table.name, table.id) if table.name is not None else table.id
        if other != table.id:
            what = f"tables {other} and {table.id} are both {table.name!r}"
            damages.append(_damage(path, what, (other, table.id)))
    for need in needs:
        damages += [
            _damage(path, f"{need.whose} {what}", need.tables, need.snapshots)
            for what in _wrong(need.manifest)
        ]
    return damages


def _wrong(manifest: Manifest) -> Iterable[str]:
    listed = [segment for segment, _ in manifest.segments]
    if len(set(listed)) != len(listed):
        yield "lists a segment twice"
    for segment, counted in manifest.segments:
        if counted % BLOCK or not HEADER_BYTES <= counted <= SEGMENT_BYTES:
            yield f"counts {counted} bytes of segment {segment}"
    ancestors = [generation for generation, _ in manifest.ancestry]
    if len(set(ancestors)) != len(ancestors) or any(
        generation > manifest.generation for generation in ancestors
    ):
        yield f"has an ancestry that is none: {manifest.ancestry}"


def _damage(
    path: Path, what: str, tables: tuple[int, ...], snapshots: tuple[str, ...] = ()
) -> Damage:
    remedy = "restore the catalog from a copy, or drop what is concerned"
    return Damage(f"{what}: {remedy}", str(path), tables=tables, snapshots=snapshots)
