"""Real file systems that really fill up: ext4 in a file, and tmpfs."""

import os
import shutil
import subprocess

import numpy as np
import pytest

from momentd_server.storage.catalog import Catalog, DropTable, Manifest, Put, TableRecord
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.diskio import READ_OK, aligned_buffer
from momentd_server.storage.format import batch_bytes
from momentd_server.storage.segments import SegmentStore
from momentd_wire.errors import OutOfSpace
from tests.support.segments import FAMILY, LAYOUT, schema_of, write_batch

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _mount(kind, place, image):
    if kind == "tmpfs":
        return _run("mount", "-t", "tmpfs", "-o", "size=24m", "none", str(place))
    with image.open("wb") as file:
        file.truncate(40 << 20)
    made = _run("mkfs.ext4", "-q", "-m", "0", str(image))
    if made.returncode:
        return made
    return _run("mount", "-o", "loop", str(image), str(place))


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    if shutil.which("mount") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("mount or mkfs.ext4 is not installed")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = _mount(request.param, place, tmp_path / "image")
    if mounted.returncode:
        pytest.skip(f"cannot mount {request.param} here: {mounted.stderr.strip()}")
    yield place
    if _run("umount", str(place)).returncode:
        _run("umount", "--lazy", str(place))
        pytest.fail("a descriptor on the file system is still open")


def _fill(place, leave=0):
    """Use up what is free, but for `leave` bytes."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(64 * 1024))
        except OSError:
            pass
        size = file.tell()
        file.truncate(max(size - leave, 0) // 4096 * 4096)
    return filler


def _until_full(action):
    """Repeat `action(number)` until it raises OutOfSpace; returns how often it did not."""
    for number in range(500):
        try:
            action(number)
        except OutOfSpace:
            return number
    raise AssertionError("the disk does not fill up")


def test_segments_on_a_full_disk(small_disk, pool):
    datadir = DataDir.open(small_disk / "data")
    catalog = Catalog.open(datadir)
    store = SegmentStore(datadir, catalog.allocate_segment)
    segment = store.create(FAMILY, LAYOUT, 1032)
    batches = [write_batch(store, segment, range(700), numbers=1)]
    filler = _fill(small_disk, leave=2 << 20)

    def append(number):
        batches.append(write_batch(store, segment, range(700), numbers=number, seed=number))

    _until_full(append)
    assert segment.fill == batches[-1].first_offset + batch_bytes(700, 1032)
    assert 1 <= len(batches) <= 4  # what the reservation and the last 2 MiB could take
    _until_full(lambda _: store.create(FAMILY + 1, LAYOUT, 1032))
    store.sync([segment])

    trailers = list(store.read_trailers(segment))
    assert len(trailers) == len(batches)
    _assert_readable(store, pool, batches)

    filler.unlink()
    batches.append(write_batch(store, segment, range(700), numbers=99, seed=99))
    _assert_readable(store, pool, batches)
    for closing in (store, catalog, datadir):
        closing.close()


def _assert_readable(store, pool, batches):
    for batch in batches:
        n, size = batch.rows.size, batch.segment.record_bytes
        dest = aligned_buffer(n * size)
        with store.pin(np.full(n, batch.segment.id)) as pins:
            status = pool.read(
                pins.fds,
                batch.offsets,
                size,
                batch.rows,
                batch.checks,
                FAMILY,
                np.zeros(size, np.uint8),
                dest,
                np.arange(n) * size,
                np.zeros(n, np.uint64),
            )
        assert (status == READ_OK).all()
        np.testing.assert_array_equal(dest.reshape(n, size), batch.records)


def _table(table_id, label):
    return TableRecord(
        table_id, 1, 1, None, label, "run", schema_of(64), 0.0, b"o" * 16, Manifest(1, 0, 0)
    )


def test_the_catalog_on_a_full_disk(small_disk):
    datadir = DataDir.open(small_disk / "data")
    catalog = Catalog.open(datadir)
    catalog.commit([Put(_table(1, "kept"))])
    filler = _fill(small_disk)
    done = _until_full(lambda i: catalog.commit([Put(_table(2 + i, "x" * 30_000))]))
    assert len(catalog.tables()) == 1 + done
    filler.unlink()
    catalog.commit([Put(_table(500, "y" * 30_000)), DropTable(2)])
    tables = catalog.tables()
    assert tables[0].label == "kept"
    catalog.close()
    again = Catalog.open(datadir)
    assert again.tables() == tables
    again.close()
    datadir.close()


def test_a_new_catalog_on_a_full_disk(small_disk):
    datadir = DataDir.open(small_disk / "data")
    filler = _fill(small_disk, leave=1 << 20)
    with pytest.raises(OutOfSpace):
        Catalog.open(datadir)
    filler.unlink()
    catalog = Catalog.open(datadir)
    catalog.commit([Put(_table(1, "first"))])
    catalog.close()
    datadir.close()


def test_an_old_catalog_on_a_full_disk_lets_tables_go(small_disk):
    datadir = DataDir.open(small_disk / "data")
    catalog = Catalog.open(datadir)
    catalog.commit([Put(_table(i, "x" * 3000)) for i in range(1, 200)])
    catalog.close()
    _fill(small_disk)
    catalog = Catalog.open(datadir)
    for table_id in range(1, 200):
        catalog.commit([DropTable(table_id)])
    assert catalog.tables() == []
    catalog.close()
    datadir.close()
