"""Offline: everything in a data directory against its checksums and against each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from momentd_server.storage import files
from momentd_server.storage.catalog import Contents, TableRecord, read_contents
from momentd_server.storage.damage import Counts, Damage, Progress, Report
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.format import BLOCK, HEADER_BYTES, SEGMENT_BYTES, SegmentHeader
from momentd_server.storage.segment_check import Expected, SegmentReport, check_segment
from momentd_wire.errors import CorruptRecord, Incompatible, MomentdError

# One reads while the other hashes; more would only wait for the disk.
_THREADS: Final = max(2, min(8, len(os.sched_getaffinity(0))))


def verify_directory(
    path: Path, progress: Progress = lambda _done, _total: None, *, threads: int = _THREADS
) -> Report:
    """Check all of a directory that no daemon uses; nothing in it is changed.

    Raises what `DataDir.inspect` raises, and Incompatible for a catalog of another format; whatever
    is damaged is in the report.
    """
    datadir = DataDir.inspect(path)
    try:
        return _verify(datadir, progress, threads)
    finally:
        datadir.close()


def _verify(datadir: DataDir, progress: Progress, threads: int) -> Report:
    report = Report()
    try:
        contents = read_contents(datadir)
    except CorruptRecord as error:
        what = f"{error.message}; segments were not checked: the catalog says what counts of them"
        report.damages.append(Damage(what, error.details.get("path", str(datadir.catalog_path))))
        return report
    except Incompatible:
        raise
    except MomentdError as error:
        report.damages.append(Damage(error.message, str(datadir.catalog_path)))
        return report
    report.counts.tables = len(contents.tables)
    report.damages += check_tables(contents.path, contents.tables)
    expected = expected_segments(contents, datadir.store_id)
    report.unlisted = [
        str(file)
        for family, segment, file in datadir.segment_files()
        if (family, segment) not in expected
    ]
    for part in _check_files(datadir, list(expected.values()), progress, threads):
        report.damages += part.damages
        report.counts.add(part.counts)
    return report


def check_tables(path: Path, tables: Iterable[TableRecord]) -> list[Damage]:
    """What entries that are each whole can still have wrong between them."""
    damages: list[Damage] = []
    names: dict[str, int] = {}
    for table in tables:
        other = names.setdefault(table.name, table.id) if table.name is not None else table.id
        if other != table.id:
            damages.append(
                _damage(path, table, f"tables {other} and {table.id} are both {table.name!r}")
            )
        manifest = table.manifest
        listed = [segment for segment, _ in manifest.segments]
        if len(set(listed)) != len(listed):
            damages.append(_damage(path, table, f"table {table.id} lists a segment twice"))
        for segment, counted in manifest.segments:
            if counted % BLOCK or not HEADER_BYTES <= counted <= SEGMENT_BYTES:
                what = f"table {table.id} counts {counted} bytes of segment {segment}"
                damages.append(_damage(path, table, what))
        ancestors = [generation for generation, _ in manifest.ancestry]
        if len(set(ancestors)) != len(ancestors) or any(
            generation > manifest.generation for generation in ancestors
        ):
            what = f"the ancestry of table {table.id} is not one: {manifest.ancestry}"
            damages.append(_damage(path, table, what))
    return damages


def _damage(path: Path, table: TableRecord, what: str) -> Damage:
    remedy = f"restore the catalog from a copy, or drop the run {table.run!r}"
    return Damage(f"{what}: {remedy}", str(path), tables=(table.id,))


def expected_segments(contents: Contents, store_id: bytes) -> dict[tuple[int, int], Expected]:
    """(family, segment) -> what must be in the file, of all that some table needs."""
    users: dict[tuple[int, int], list[tuple[TableRecord, int]]] = {}
    for table in contents.tables:
        for segment, counted in table.manifest.segments:
            users.setdefault((table.family, segment), []).append((table, counted))
    return {
        (family, segment): Expected(
            SegmentHeader(
                store_id, family, segment, using[0][0].layout, using[0][0].schema.record_bytes
            ),
            max(counted for _, counted in using),
            using[0][0].schema.initial_record,
            max(table.schema.rows for table, _ in using),
            contents.generations.get(family, 0),
            tuple(table.id for table, _ in using),
        )
        for (family, segment), using in sorted(users.items())
    }


def _check_files(
    datadir: DataDir, expected: list[Expected], progress: Progress, threads: int
) -> Iterable[SegmentReport]:
    lock = threading.Lock()
    total = sum(each.counted for each in expected)
    done = 0

    def was_read(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            # Footers are read by themselves before their batch.
            progress(min(done, total), total)

    def check(each: Expected) -> SegmentReport:
        path = datadir.segment_path(each.header.family, each.header.segment)
        try:
            fd = files.open_direct(path, os.O_RDONLY)
        except OSError as error:
            what = (
                f"cannot be opened ({error.strerror}): restore the file from a copy, or drop its "
            )
            damage = Damage(f"{what}tables", str(path), tables=each.tables)
            return SegmentReport([damage], Counts(segments=1))
        try:
            return check_segment(fd, path, each, was_read=was_read)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            yield from pool.map(check, expected)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
