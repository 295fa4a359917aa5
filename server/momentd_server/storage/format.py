"""Every name, magic and layout on disk. `docs/storage-format.md` describes the same for people.

    FORMAT                       text: what this directory is, format version, store id
    LOCK                         flock; the pid inside is for people
    catalog/                     LMDB
    families/FAMILY/SEGMENT.seg  record batches

All integers are little-endian; all files are made of whole 4 KiB blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from momentd_server.storage.hashing import hash_bytes, hash_words
from momentd_server.storage.migrations import FORMAT_VERSION, check_version
from momentd_wire.errors import CorruptRecord

BLOCK: Final = 4096

MARKER_NAME: Final = "FORMAT"
LOCK_NAME: Final = "LOCK"
CATALOG_NAME: Final = "catalog"
FAMILIES_NAME: Final = "families"
SEGMENT_SUFFIX: Final = ".seg"
MARKER_MAGIC: Final = "momentd-data"

HEADER_BYTES: Final = BLOCK
SEGMENT_BYTES: Final = 256 << 20  # a slot's offset has 28 bits
FIRST_RESERVE: Final = 1 << 20

# magic, version, header bytes, store id, family, segment, layout, record bytes
_HEADER: Final = struct.Struct("<8sII16sQQQQ")
_HEADER_MAGIC: Final = b"momseg\r\n"
_HEADER_HASH_AT: Final = HEADER_BYTES - 8

# magic, records, records' bytes, digest delta, family, layout, batch start, hash
_FOOTER: Final = struct.Struct("<8sQQQQQQQ")
_FOOTER_MAGIC: Final = b"mombatch"
FOOTER_BYTES: Final = _FOOTER.size
ENTRY_BYTES: Final = 24  # row int64, version uint64, hash uint64: three columns


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    store_id: bytes
    family: int
    segment: int
    layout: int
    record_bytes: int


class Footer(NamedTuple):
    """The last 64 bytes of a batch."""

    records: int
    records_bytes: int
    digest_delta: int
    family: int
    layout: int
    batch_start: int
    digest: int  # hash over the entries and the footer up to here, seeded with the segment id


class Trailer(NamedTuple):
    """The index of one batch."""

    rows: np.ndarray  # int64[n]
    versions: np.ndarray  # uint64[n]
    hashes: np.ndarray  # uint64[n]
    first_offset: int  # byte offset of record 0; record i lies i * record_bytes behind it
    digest_delta: int  # sum of new - old hashes, modulo 2**64


def round_up(nbytes: int, multiple: int = BLOCK) -> int:
    return -(-nbytes // multiple) * multiple


def batch_bytes(records: int, record_bytes: int) -> int:
    """Bytes of a batch on disk, a multiple of 4 KiB."""
    return round_up(records * (record_bytes + ENTRY_BYTES) + FOOTER_BYTES)


def pack_header(header: SegmentHeader) -> bytes:
    """The first 4 KiB of a segment."""
    fields = _HEADER.pack(
        _HEADER_MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        header.store_id,
        header.family,
        header.segment,
        header.layout,
        header.record_bytes,
    )
    body = fields.ljust(_HEADER_HASH_AT, b"\0")
    return body + hash_bytes(body).to_bytes(8, "little")


def unpack_header(block: bytes, path: object) -> SegmentHeader:
    """The header of a segment. Raises CorruptRecord, Incompatible (a newer format)."""
    if len(block) < HEADER_BYTES and _HEADER_MAGIC.startswith(block[:8]):
        raise CorruptRecord(
            f"{path} is cut off after {len(block)} bytes: restore the file from a copy, or drop "
            "its tables",
            path=path,
            offset=len(block),
        )
    if block[:8] != _HEADER_MAGIC:
        raise CorruptRecord(
            f"{path} is not a segment: its first bytes are {block[:8]!r}; "
            "restore the file from a copy, or drop its tables",
            path=path,
            offset=0,
        )
    stored = int.from_bytes(block[_HEADER_HASH_AT:HEADER_BYTES], "little")
    if hash_bytes(block[:_HEADER_HASH_AT]) != stored:
        raise CorruptRecord(
            f"{path}: the header does not match its hash; "
            "restore the file from a copy, or drop its tables",
            path=path,
            offset=0,
        )
    _, version, _, store_id, family, segment, layout, record_bytes = _HEADER.unpack_from(block)
    check_version(version, path, "segment")
    return SegmentHeader(store_id, family, segment, layout, record_bytes)


def write_trailer(
    tail: np.ndarray,
    header: SegmentHeader,
    batch_start: int,
    rows: np.ndarray,
    versions: np.ndarray,
    hashes: np.ndarray,
    digest_delta: int,
) -> None:
    """Fill uint8 `tail`, which reaches from the first entry to the end of the batch."""
    records = rows.size
    entries = tail[: ENTRY_BYTES * records].view(np.uint64).reshape(3, records)
    entries[0] = rows.view(np.uint64)
    entries[1] = versions
    entries[2] = hashes
    tail[ENTRY_BYTES * records : -FOOTER_BYTES] = 0
    footer = tail[-FOOTER_BYTES:]
    packed = _FOOTER.pack(
        _FOOTER_MAGIC,
        records,
        records * header.record_bytes,
        digest_delta & 0xFFFF_FFFF_FFFF_FFFF,
        header.family,
        header.layout,
        batch_start,
        0,
    )
    footer[:] = np.frombuffer(packed, np.uint8)
    footer.view(np.uint64)[7] = trailer_digest(entries.reshape(-1), footer, header.segment)


def trailer_digest(entries: np.ndarray, footer: np.ndarray, segment: int) -> np.uint64:
    """The hash that ends a footer: entries uint64[3n], then the footer's first seven words."""
    inner = hash_words(entries, 0, entries.size, np.uint64(segment))
    return np.uint64(hash_words(footer.view(np.uint64), 0, 7, np.uint64(inner)))


def unpack_footer(footer: np.ndarray) -> Footer | None:
    """The fields of the last 64 bytes of a batch; None if they are not a footer."""
    magic, *fields = _FOOTER.unpack(footer.tobytes())
    return Footer(*fields) if magic == _FOOTER_MAGIC else None
