"""The file that carries the records of tables from one data directory to another.

Little-endian, version 1:

    prologue   magic (8 bytes), version (u32), bytes of the header (u32), digest of the header
    header     JSON: {"tables": [entry, ...]}, see `TableEntry`
    block*     "MBLK", table (u32), rows (u64), bytes of the payload (u64), digest of all of these
               and the payload; payload: row ids (int64), then the fields one after the other
    end        "MEND", 0, blocks (u64), rows of all blocks (u64), digest of these and of all digests
               before, in order

A digest is 16 bytes of BLAKE2b. Only rows that differ from the schema's initial record are there,
in ascending order, so the file is as large as what was touched. A file without its end is not one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np

from momentd_wire import codec
from momentd_wire.errors import CorruptRecord, InvalidArgument
from momentd_wire.v1 import momentd_pb2 as pb

MAGIC: Final = b"momentdS"
VERSION: Final = 1
# Rows are written and read in blocks of about this size.
BLOCK_BYTES: Final = 16 << 20

_PROLOGUE: Final = struct.Struct("<8sII16s")
_BLOCK: Final = struct.Struct("<4sIQQ")
_DIGEST_BYTES: Final = 16
_BLOCK_MARK: Final = b"MBLK"
_END_MARK: Final = b"MEND"
_ID: Final = np.dtype("<i8")
# Ten thousand tables; anything longer is not a header.
_MOST_HEADER_BYTES: Final = 64 << 20

Advance = Callable[[int], None]
"""Told how many more bytes are done."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """What a file says of one table beside its rows.

    Attributes:
        label: For people: the parameter's name.
        rule: Name of the update rule.
        rows: Row ids are in [0, rows).
        width: Elements of one row of the parameter.
        fields: (name, numpy dtype, width, initial value) in record order.
        step: The table's step counter.
        snapshot: The content's digest, hexadecimal; empty if whoever wrote the file did not know.
        parameter: Position among the optimizer's parameters; None if the file is of no optimizer.
        updates: The parameter's step counter, which counts updates without rows too.
    """

    label: str
    rule: str
    rows: int
    width: int
    fields: tuple[tuple[str, str, int, float], ...]
    step: int
    snapshot: str = ""
    parameter: int | None = None
    updates: int = 0

    @classmethod
    def of(
        cls,
        schema: pb.Schema,
        *,
        label: str,
        step: int,
        snapshot: str = "",
        parameter: int | None = None,
        updates: int = 0,
    ) -> TableEntry:
        """The entry of a table with this schema."""
        fields = tuple(
            (field.name, codec.to_numpy(field.dtype).str, field.width, field.initial)
            for field in schema.fields
        )
        return cls(
            label,
            schema.rule,
            schema.rows,
            schema.width,
            fields,
            step,
            snapshot,
            parameter,
            updates,
        )

    def schema(self) -> pb.Schema:
        """As on the wire."""
        fields = [
            pb.FieldSpec(name=name, dtype=codec.to_wire(dtype), width=width, initial=initial)
            for name, dtype, width, initial in self.fields
        ]
        return pb.Schema(rows=self.rows, width=self.width, fields=fields, rule=self.rule)

    @property
    def row_bytes(self) -> int:
        """Of one row in a block, its id included."""
        values = sum(np.dtype(dtype).itemsize * width for _, dtype, width, _ in self.fields)
        return _ID.itemsize + values

    @property
    def block_rows(self) -> int:
        """Rows of a full block."""
        return max(1, BLOCK_BYTES // self.row_bytes)

    def touched(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Positions of the rows of `values`, (n, width) each, that are not initial."""
        found: np.ndarray | None = None
        for name, dtype, _, initial in self.fields:
            word = np.dtype(f"u{np.dtype(dtype).itemsize}")
            # By bits: -0.0 is not 0.0, and NaN is what it is.
            start = np.array(initial, dtype).view(word)
            differs = (np.ascontiguousarray(values[name]).view(word) != start).any(axis=1)
            found = differs if found is None else found | differs
        return np.flatnonzero(found) if found is not None else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table: ids (n,), ascending, and name -> (n, width)."""

    table: int
    rows: np.ndarray
    values: dict[str, np.ndarray]


class Draft:
    """A file that is written beside its place and put there when it is whole and durable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        self._file: BinaryIO | None = None

    @property
    def file(self) -> BinaryIO:
        """Open between `open` and `close`."""
        assert self._file is not None
        return self._file

    def open(self) -> BinaryIO:
        """Begin."""
        self._file = self._draft.open("xb")
        return self._file

    def close(self, *, keep: bool) -> None:
        """Put it in its place, or leave nothing."""
        try:
            with self.file as file:
                if not keep:
                    return
                file.flush()
                os.fsync(file.fileno())
            self._draft.replace(self._path)
            _sync_directory(self._path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._draft.unlink()


class StateWriter:
    """Writes a file beside its place and puts it there, durable, when the context ends well.

    After an error, nothing is left. Raises OSError.
    """

    def __init__(self, path: str | os.PathLike[str], tables: Sequence[TableEntry]) -> None:
        self._draft = Draft(path)
        self._tables = tuple(tables)
        self._chain = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._blocks = 0
        self._rows = 0

    def __enter__(self) -> Self:
        file = self._draft.open()
        header = json.dumps({"tables": [asdict(entry) for entry in self._tables]}).encode()
        digest = _digest(header)
        self._chain.update(digest)
        file.write(_PROLOGUE.pack(MAGIC, VERSION, len(header), digest) + header)
        return self

    def write(self, table: int, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> int:
        """Append rows of a table: ids (n,), ascending, above those before; returns the bytes."""
        entry = self._tables[table]
        parts = [np.ascontiguousarray(rows, _ID)]
        for name, dtype, width, _ in entry.fields:
            value = np.ascontiguousarray(values[name], dtype)
            if value.shape != (len(rows), width):
                raise InvalidArgument(
                    f"{entry.label}: {name} has shape {value.shape}, not {(len(rows), width)}"
                )
            parts.append(value)
        nbytes = sum(part.nbytes for part in parts)
        head = _BLOCK.pack(_BLOCK_MARK, table, len(rows), nbytes)
        self._append(head, [part.reshape(-1).view(np.uint8).data for part in parts])
        self._blocks += 1
        self._rows += len(rows)
        return nbytes

    def _append(self, head: bytes, parts: Sequence[memoryview]) -> None:
        digest = _digest(head, *parts)
        self._chain.update(digest)
        self._draft.file.write(head + digest)
        for part in parts:
            self._draft.file.write(part)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        whole = False
        try:
            if error is None:
                head = _BLOCK.pack(_END_MARK, 0, self._blocks, self._rows)
                self._draft.file.write(head + _digest(head, self._chain.digest()))
                whole = True
        finally:
            self._draft.close(keep=whole)


class StateReader:
    """Reads a file of `StateWriter`; whatever it returns has been checked.

    Raises:
        InvalidArgument: It is not such a file, or one of a newer version.
        CorruptRecord: It is damaged or cut off; names the byte.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file = self._path.open("rb")
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            """Bytes of the file."""
            self._chain = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            self.tables: tuple[TableEntry, ...] = self._read_header()
        except BaseException:
            self._file.close()
            raise
        self._start = self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _read_header(self) -> tuple[TableEntry, ...]:
        prologue = self._file.read(_PROLOGUE.size)
        if not prologue.startswith(MAGIC):
            raise InvalidArgument(
                f"{self._path} is not a momentd state file: it begins with {prologue[:8]!r}, "
                "not with what save_state() and `momentd export` write"
            )
        if len(prologue) < _PROLOGUE.size:
            raise self._damaged(0, "it is cut off")
        _, version, nbytes, digest = _PROLOGUE.unpack(prologue)
        if version != VERSION:
            raise InvalidArgument(
                f"{self._path} has version {version} of the state file, this momentd reads "
                f"version {VERSION}: use the momentd that wrote it, or a newer one"
            )
        if nbytes > _MOST_HEADER_BYTES:
            raise self._damaged(0, f"its header says that it has {nbytes} bytes")
        header = self._file.read(nbytes)
        if len(header) < nbytes or _digest(header) != digest:
            raise self._damaged(_PROLOGUE.size, "the header does not match its digest")
        self._chain.update(digest)
        return tuple(_entry(found) for found in json.loads(header)["tables"])

    def blocks(self) -> Iterator[Block]:
        """All blocks in order. Only when the iterator has ended is the file known to be whole."""
        self._file.seek(self._start)
        chain = self._chain.copy()
        blocks = total = 0
        last: dict[int, int] = {}
        while True:
            at = self._file.tell()
            raw = self._file.read(_BLOCK.size + _DIGEST_BYTES)
            if len(raw) < _BLOCK.size + _DIGEST_BYTES:
                raise self._damaged(at, f"it is cut off after {blocks} blocks")
            head, digest = raw[: _BLOCK.size], raw[_BLOCK.size :]
            mark, table, count, nbytes = _BLOCK.unpack(head)
            if mark == _END_MARK:
                if (count, nbytes) != (blocks, total) or _digest(head, chain.digest()) != digest:
                    raise self._damaged(at, "the end does not match the blocks before it")
                if self._file.read(1):
                    raise self._damaged(at + len(raw), "something follows its end")
                return
            payload = self._payload(at, mark, table, count, nbytes)
            if _digest(head, payload) != digest:
                raise self._damaged(at, f"block {blocks} does not match its digest")
            chain.update(digest)
            block = self._block(table, count, payload)
            if count and (
                block.rows[0] <= last.get(table, -1)
                or block.rows[-1] >= self.tables[table].rows
                or (np.diff(block.rows) <= 0).any()
            ):
                raise self._damaged(at, f"the row ids of block {blocks} do not ascend in range")
            if count:
                last[table] = int(block.rows[-1])
            blocks, total = blocks + 1, total + count
            yield block

    def check(self, advance: Advance) -> None:
        """Read all of it, to know before anything is done that it is whole."""
        for block in self.blocks():
            advance(len(block.rows) * self.tables[block.table].row_bytes)

    def _payload(self, at: int, mark: bytes, table: int, count: int, nbytes: int) -> bytes:
        if mark != _BLOCK_MARK or table >= len(self.tables):
            raise self._damaged(at, "no block begins there")
        if nbytes != count * self.tables[table].row_bytes or nbytes > self.size - at:
            raise self._damaged(at, f"a block of {count} rows and {nbytes} bytes does not fit")
        return self._file.read(nbytes)

    def _block(self, table: int, count: int, payload: bytes) -> Block:
        values: dict[str, np.ndarray] = {}
        offset = count * _ID.itemsize
        for name, dtype, width, _ in self.tables[table].fields:
            value = np.frombuffer(payload, dtype, count * width, offset).reshape(count, width)
            values[name] = value
            offset += value.nbytes
        return Block(table, np.frombuffer(payload, _ID, count), values)

    def _damaged(self, offset: int, what: str) -> CorruptRecord:
        return CorruptRecord(
            f"{self._path} is damaged at byte {offset}: {what}. Nothing was loaded; copy the file "
            "again from where it came",
            path=self._path,
            offset=offset,
        )


def _entry(found: dict[str, Any]) -> TableEntry:
    found["fields"] = tuple(tuple(field) for field in found["fields"])
    return TableEntry(**found)


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "BLOCK_BYTES",
    "VERSION",
    "Advance",
    "Block",
    "Draft",
    "StateReader",
    "StateWriter",
    "TableEntry",
]
