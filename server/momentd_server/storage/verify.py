"""Offline: everything in a data directory against its checksums and against each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from momentd_server.storage import files, recovery
from momentd_server.storage.catalog import Contents, read_contents
from momentd_server.storage.catalog_check import Need, check_entries
from momentd_server.storage.damage import Counts, Damage, Progress, Report
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.format import SegmentHeader
from momentd_server.storage.records import content_id
from momentd_server.storage.segment_check import Expected, SegmentReport, check_segment
from momentd_server.storage.segments import SegmentStore
from momentd_wire.errors import CorruptRecord, Incompatible, MomentdError

# Large reads in flight: one at a time leaves a disk half idle; hashing takes little of a core.
_THREADS: Final = max(4, min(8, len(os.sched_getaffinity(0))))


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
    report.counts.snapshots = len(contents.snapshots)
    needs = contents.needs()
    report.damages += check_entries(contents.path, contents.tables, needs)
    expected = expected_segments(contents, datadir.store_id)
    report.unlisted = [
        str(file)
        for family, segment, file in datadir.segment_files()
        if (family, segment) not in expected
    ]
    for part in _check_files(datadir, list(expected.values()), progress, threads):
        report.damages += part.damages
        report.counts.add(part.counts)
    if not report.damages:
        report.damages += _check_contents(datadir, needs)
    return report


def expected_segments(contents: Contents, store_id: bytes) -> dict[tuple[int, int], Expected]:
    """(family, segment) -> what must be in the file, of all that some table or snapshot needs."""
    users: dict[tuple[int, int], list[tuple[Need, int]]] = {}
    for need in contents.needs():
        for segment, counted in need.manifest.segments:
            users.setdefault((need.family, segment), []).append((need, counted))
    return {
        (family, segment): expect(
            SegmentHeader(
                store_id, family, segment, using[0][0].layout, using[0][0].schema.record_bytes
            ),
            using,
            contents.generations.get(family, 0),
        )
        for (family, segment), using in sorted(users.items())
    }


def expect(header: SegmentHeader, using: list[tuple[Need, int]], generation: int) -> Expected:
    """What must be in one file. using: who needs it, and how many bytes of it."""
    return Expected(
        header,
        max(counted for _, counted in using),
        using[0][0].schema.initial_record,
        max(need.schema.rows for need, _ in using),
        generation,
        tuple(sorted({table for need, _ in using for table in need.tables})),
        tuple(sorted({name for need, _ in using for name in need.snapshots})),
    )


def _check_contents(datadir: DataDir, needs: list[Need]) -> Iterable[Damage]:
    """End to end: what a snapshot would be restored to has the digest that was handed out."""
    store = SegmentStore(datadir, lambda: 0)
    try:
        for need in needs:
            if need.snapshot is None:
                continue
            rows = need.schema.rows
            location, check = np.zeros(rows, np.uint64), np.zeros(rows, np.uint32)
            result = recovery.rebuild(
                store, need.family, need.manifest, need.schema, location, check
            )
            if content_id(need.schema, need.manifest.step, result.digest) != need.content:
                yield Damage(
                    f"{need.whose} would be restored to other content than it was taken of: "
                    "delete it, and use another one",
                    str(datadir.catalog_path),
                    snapshots=need.snapshots,
                )
    finally:
        store.close()


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
            damage = Damage(
                f"{what}tables", str(path), tables=each.tables, snapshots=each.snapshots
            )
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
