"""A small data directory with known contents, single flipped bits, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from momentd_server.storage import recovery
from momentd_server.storage.catalog import read_contents
from momentd_server.storage.catalog_check import Need
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.diskio import READ_OK, ReadPool
from momentd_server.storage.location import OFFSET_MASK, SEGMENT_MASK, SEGMENT_SHIFT
from momentd_server.storage.segments import SegmentStore
from momentd_server.storage.verify import verify_directory
from momentd_wire.errors import MomentdError
from tests.support.local_engine import adam_schema, batch, open_session, open_table, start_engine

WIDTHS = {"narrow": 3, "wide": 40}
ROWS = 300


def make_directory(path: Path) -> Path:
    """Two named tables, rows in several versions, a snapshot of each; stopped in order."""
    engine = start_engine(path)
    session = open_session(engine)
    rng = np.random.default_rng(0)
    for name, width in WIDTHS.items():
        table = open_table(engine, session, adam_schema(ROWS, width), name)
        for number in range(3):
            rows = rng.integers(0, ROWS, 120)
            grads = rng.standard_normal((rows.size, width)).astype(np.float32)
            engine.update([batch(table, rows, grads)])
            engine.flush([table.id])
            if number == 1:
                engine.create_snapshot(
                    [(table.id, table.generation)], run=None, name=f"{name} then", pinned=True
                )
    engine.stop()
    engine.close()
    return path / "data"


# Of tables and of what snapshots would be restored to: step, record of each row.
State = dict[str, tuple[int, list[bytes | None]]]


class Refused(Exception):
    """The whole directory, or a table of it, does not open."""


def read_all(path: Path, readers: ReadPool) -> tuple[State, dict[str, set[int]]]:
    """What a start finds and reads find, by the daemon's own code: and the rows that are refused.

    Raises Refused for what a start refuses.
    """
    found: State = {}
    refused: dict[str, set[int]] = {}
    try:
        datadir = DataDir.inspect(path)
    except MomentdError as error:
        raise Refused from error
    store = SegmentStore(datadir, lambda: 0)
    try:
        for need in read_contents(datadir).needs():
            rows = need.schema.rows
            location, check = np.zeros(rows, np.uint64), np.zeros(rows, np.uint32)
            recovery.rebuild(store, need.family, need.manifest, need.schema, location, check)
            name = f"{need.whose} of family {need.family}"
            found[name], refused[name] = _read_rows(store, readers, need, location, check)
    except MomentdError as error:
        raise Refused from error
    finally:
        store.close()
        datadir.close()
    return found, refused


def _read_rows(store, readers, table: Need, location, check):
    size = table.schema.record_bytes
    rows = np.flatnonzero(location).astype(np.int64)
    segments = (location[rows] >> SEGMENT_SHIFT & SEGMENT_MASK).astype(np.int64)
    offsets = (location[rows] & OFFSET_MASK).astype(np.int64)
    dest = np.zeros(max(rows.size, 1) * size, np.uint8)
    with store.pin(segments) as pins:
        status = readers.read(
            pins.fds, offsets, size, rows, check[rows], table.family, table.schema.initial_record,
            dest, np.arange(rows.size, dtype=np.int64) * size, np.zeros(rows.size, np.uint64),
        )  # fmt: skip
    records: list[bytes | None] = [None] * table.schema.rows
    bad = {int(row) for row in rows[status != READ_OK]}
    for k, row in enumerate(rows):
        if int(row) not in bad:
            records[row] = dest[k * size : (k + 1) * size].tobytes()
    return (table.manifest.step, records), bad


def same_where_not_refused(found: State, wanted: State, refused: dict[str, set[int]]) -> bool:
    """Whether everything that is not refused is what was written."""
    if found.keys() != wanted.keys():
        return False
    return all(
        found[name][0] == step
        and len(found[name][1]) == len(records)
        and all(
            found[name][1][row] == record
            for row, record in enumerate(records)
            if row not in refused[name]
        )
        for name, (step, records) in wanted.items()
    )


@dataclass(frozen=True)
class Flip:
    file: Path
    byte: int
    bit: int

    def apply(self) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.byte)
            old = file.read(1)[0]
            file.seek(self.byte)
            file.write(bytes([old ^ 1 << self.bit]))


@dataclass
class Tally:
    """What became of flips."""

    flips: int = 0
    refused: int = 0  # the directory or a table does not open
    rows_refused: int = 0  # only rows of which the record is damaged
    harmless: int = 0  # nobody reads that byte
    silent: list[Flip] = field(default_factory=list)  # another content was taken for the right one
    missed: list[Flip] = field(default_factory=list)  # `verify` found nothing where it counts


class Harness:
    """Flips single bits, one at a time; looks what the daemon's code and `verify` make of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tally = Tally()
        self._readers = ReadPool(2)
        self._wanted, refused = read_all(path, self._readers)
        assert not any(refused.values())
        assert not verify_directory(path).damages
        # Every byte of a segment counts up to what the catalog says, its padding included.
        datadir = DataDir.inspect(path)
        try:
            self._counted: dict[Path, int] = {}
            for need in read_contents(datadir).needs():
                for segment, counted in need.manifest.segments:
                    file = datadir.segment_path(need.family, segment)
                    self._counted[file] = max(counted, self._counted.get(file, 0))
        finally:
            datadir.close()

    def close(self) -> None:
        self._readers.close()

    @property
    def segments(self) -> dict[Path, int]:
        """Files and the bytes of them that count."""
        return self._counted

    @property
    def catalog(self) -> Path:
        return self.path / "catalog" / "data.mdb"

    @property
    def marker(self) -> Path:
        return self.path / "FORMAT"

    def choose(self, rng: np.random.Generator) -> Flip:
        """Segments, by their bytes beyond what counts as well, headers, catalog, marker."""
        kind = rng.choice(["record", "record", "beyond", "header", "trailer", "catalog", "meta",
                           "marker"])  # fmt: skip
        file = list(self._counted)[int(rng.integers(len(self._counted)))]
        if kind == "catalog":
            file = self.catalog
        elif kind in ("meta", "marker"):
            file = self.catalog if kind == "meta" else self.marker
        size = file.stat().st_size
        low, high = 0, size
        if kind == "record":
            high = self._counted[file]
        elif kind == "header":
            high = 4096
        elif kind == "trailer":
            low = self._counted[file] - 4096
        elif kind == "meta":
            high = 2 * 4096
        return Flip(file, int(rng.integers(low, high)), int(rng.integers(8)))

    def look(self, flip: Flip) -> None:
        """Apply a flip, look, take it back, and count what became of it."""
        flip.apply()
        try:
            noticed = self._noticed(flip)
            counts = noticed or flip.byte < self._counted.get(flip.file, 0)
            if counts and not self._verify_finds():
                self.tally.missed.append(flip)
            self.tally.flips += 1
        finally:
            flip.apply()

    def _noticed(self, flip: Flip) -> bool:
        try:
            found, refused = read_all(self.path, self._readers)
        except Refused:
            self.tally.refused += 1
            return True
        if not same_where_not_refused(found, self._wanted, refused):
            self.tally.silent.append(flip)
            return True
        if any(refused.values()):
            self.tally.rows_refused += 1
            return True
        self.tally.harmless += 1
        return False

    def _verify_finds(self) -> bool:
        try:
            return bool(verify_directory(self.path, threads=1).damages)
        except MomentdError:
            return True
