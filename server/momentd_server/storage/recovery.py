"""Rebuild locations from trailers: start, restore, clone and import are this one procedure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from momentd_server.schema import Schema
from momentd_server.storage.catalog import Manifest
from momentd_server.storage.segments import SegmentStore


@dataclass(frozen=True, slots=True)
class RebuildResult:
    rows_touched: int
    live_records: dict[int, int]  # segment id -> records that a location points to
    digest: int  # sum of the live records' hashes, modulo 2**64
    records_read: int  # entries of trailers seen


def rebuild(
    store: SegmentStore,
    family_id: int,
    manifest: Manifest,
    schema: Schema,
    location: np.ndarray,
    check: np.ndarray,
) -> RebuildResult:
    """Fill location uint64[rows] and check uint32[rows], which must be all zero, in place.

    Opens the manifest's segments in the store (read-only) where they are not known yet.
    Raises CorruptRecord naming file and offset; the arrays' contents are then undefined.
    """
    raise NotImplementedError


def delete_unlisted(store: SegmentStore, manifests: Iterable[tuple[int, Manifest]]) -> int:
    """Delete the segment files that none of the (family id, manifest) lists. Returns bytes freed."""
    raise NotImplementedError
