"""Segments: what is appended is what is read; what fails leaves everything as it was."""

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from momentd_server.storage import files
from momentd_server.storage import format as layout
from momentd_server.storage.descriptors import Descriptors
from momentd_wire.errors import (
    CorruptRecord,
    Incompatible,
    InternalError,
    OutOfSpace,
    StorageFailed,
)
from tests.support.segments import FAMILY, LAYOUT, flip_bit, open_store, write_batch


def _bytes_at(store, written, index):
    with store.path(written.segment).open("rb") as file:
        file.seek(int(written.offsets[index]))
        return file.read(written.segment.record_bytes)


@pytest.mark.parametrize("record_bytes", [32, 40, 1024, 1032, 4096, 6144, 40_000])
@pytest.mark.parametrize("records", [1, 7, 300])
def test_batches_are_read_back_backward(store, record_bytes, records):
    segment = store.create(FAMILY, LAYOUT, record_bytes)
    written = [
        write_batch(store, segment, np.arange(records) + i, seed=i, digest_delta=i - 1)
        for i in range(3)
    ]
    found = list(store.read_trailers(segment))
    assert len(found) == 3
    for batch, trailer in zip(reversed(written), found, strict=True):
        np.testing.assert_array_equal(trailer.rows, batch.rows)
        np.testing.assert_array_equal(trailer.versions, batch.versions)
        np.testing.assert_array_equal(trailer.hashes, batch.hashes)
        assert trailer.first_offset == batch.first_offset
        assert trailer.first_offset % layout.BLOCK == 0
    assert [t.digest_delta for t in found] == [1, 0, (1 << 64) - 1]
    for batch in written:
        for index in (0, records - 1):
            assert _bytes_at(store, batch, index) == batch.records[index].tobytes()
    assert segment.fill == layout.HEADER_BYTES + 3 * layout.batch_bytes(records, record_bytes)


def test_rows_and_versions_are_64_bit(store):
    segment = store.create(FAMILY, LAYOUT, 32)
    rows = np.array([0, (1 << 40) + 3, (1 << 63) - 1])
    write_batch(store, segment, rows, generation=(1 << 20) - 1, numbers=[0, 1, (1 << 44) - 1])
    (trailer,) = store.read_trailers(segment)
    np.testing.assert_array_equal(trailer.rows, rows)
    assert int(trailer.versions[2]) == (1 << 64) - 1


def test_reading_stops_at_the_bytes_that_count(store):
    segment = store.create(FAMILY, LAYOUT, 1032)
    write_batch(store, segment, [1, 2])
    counted = segment.fill
    write_batch(store, segment, [3])
    assert [t.rows.tolist() for t in store.read_trailers(segment, counted)] == [[1, 2]]


def test_full_segments_have_no_room_and_take_nothing(store):
    segment = store.create(FAMILY, LAYOUT, 1024)
    segment.fill = layout.SEGMENT_BYTES - layout.batch_bytes(10, 1024)
    assert segment.has_room(10)
    assert not segment.has_room(14)
    with pytest.raises(InternalError, match="does not fit"):
        write_batch(store, segment, range(14))


def test_reservation_doubles_and_sealing_gives_the_rest_back(store):
    segment = store.create(FAMILY, LAYOUT, 1024)
    assert segment.reserved == layout.FIRST_RESERVE
    write_batch(store, segment, range(1100))
    assert segment.reserved == 2 * layout.FIRST_RESERVE
    store.seal(segment)
    assert store.path(segment).stat().st_size == segment.fill == segment.reserved
    assert not segment.has_room(1)
    assert len(list(store.read_trailers(segment))) == 1


# -- faults of the disk --------------------------------------------------------------------------


def test_short_writes_are_continued_at_a_block(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1032)
    real = os.pwrite
    lengths = iter([4096, 5000, 100, 8192])

    def short(fd, data, offset):
        assert offset % layout.BLOCK == 0
        return real(fd, bytes(data)[: next(lengths, len(data))], offset)

    # A fake kernel: it takes less than it is given, as it may.
    monkeypatch.setattr(files, "open_direct", files.open_buffered)
    store._descriptors.forget(segment.id)
    monkeypatch.setattr(os, "pwrite", short)
    batch = write_batch(store, segment, range(40))
    assert next(lengths, None) is None
    for index in range(40):
        assert _bytes_at(store, batch, index) == batch.records[index].tobytes()
    (trailer,) = store.read_trailers(segment)
    np.testing.assert_array_equal(trailer.hashes, batch.hashes)


def test_a_disk_that_takes_nothing_is_an_error_not_a_loop(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1024)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StorageFailed, match="cannot write"):
        write_batch(store, segment, [1])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EIO, StorageFailed),
    ],
)
def test_a_failed_write_leaves_the_segment_as_it_was(store, monkeypatch, code, error):
    segment = store.create(FAMILY, LAYOUT, 1032)
    first = write_batch(store, segment, [1, 2, 3])
    fill = segment.fill
    real = os.pwrite
    calls = iter(range(10))

    def fail_second(fd, data, offset):
        if next(calls):
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fail_second)
    with pytest.raises(error, match=str(store.path(segment))):
        write_batch(store, segment, range(50), seed=1)
    monkeypatch.undo()
    assert segment.fill == fill
    assert store.failure.text is None
    again = write_batch(store, segment, [9], seed=2)  # over the torn one
    assert again.first_offset == fill
    assert [t.rows.tolist() for t in store.read_trailers(segment)] == [[9], [1, 2, 3]]
    assert _bytes_at(store, first, 2) == first.records[2].tobytes()


class _FailingFallocate:
    """The system call on a disk with room for `room` more bytes; EINTR first, as it may."""

    def __init__(self, room):
        self.room = room
        self.interrupts = 1
        self.asked = []
        self._real = files._libc.fallocate

    def __call__(self, fd, mode, start, nbytes):
        if self.interrupts:
            self.interrupts -= 1
            ctypes.set_errno(errno.EINTR)
            return -1
        self.asked.append(nbytes)
        if nbytes > self.room:
            self._real(fd, mode, start, 8192)  # partial extents, as ext4 leaves them
            ctypes.set_errno(errno.ENOSPC)
            return -1
        return self._real(fd, mode, start, nbytes)


def test_a_nearly_full_disk_still_takes_what_fits(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1024)
    need = layout.HEADER_BYTES + layout.batch_bytes(1100, 1024)
    fallocate = _FailingFallocate(need - layout.FIRST_RESERVE)
    monkeypatch.setattr(files._libc, "fallocate", fallocate)
    write_batch(store, segment, range(1100))
    assert fallocate.asked == [layout.FIRST_RESERVE, need - layout.FIRST_RESERVE]
    assert segment.reserved == segment.fill == need


def test_no_room_to_reserve_changes_nothing(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1024)
    write_batch(store, segment, [1])
    fill = segment.fill
    monkeypatch.setattr(files._libc, "fallocate", _FailingFallocate(0))
    with pytest.raises(OutOfSpace, match="nothing was lost"):
        write_batch(store, segment, range(1100))
    assert segment.fill == fill
    assert store.path(segment).stat().st_size == segment.reserved == layout.FIRST_RESERVE
    with pytest.raises(OutOfSpace):
        store.create(FAMILY + 1, LAYOUT, 1024)
    assert not store.datadir.family_path(FAMILY + 1).exists()


def test_file_systems_without_fallocate_grow_by_writing(store, monkeypatch):
    def refuse(*_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(files._libc, "fallocate", refuse)
    segment = store.create(FAMILY, LAYOUT, 1024)
    write_batch(store, segment, range(2000))
    assert segment.reserved == segment.fill == store.path(segment).stat().st_size


def test_a_failed_sync_is_final(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1024)
    write_batch(store, segment, [1])

    def fail(_fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageFailed, match="cannot sync"):
        store.sync([segment])
    monkeypatch.undo()
    assert segment.durable == 0
    for attempt in (
        lambda: store.sync([segment]),
        lambda: write_batch(store, segment, [2]),
        lambda: store.create(FAMILY, LAYOUT, 1024),
    ):
        with pytest.raises(StorageFailed, match="start it again"):
            attempt()
    assert len(list(store.read_trailers(segment))) == 1  # reading goes on


def test_sync_covers_file_folder_and_folder_of_folders(store, monkeypatch):
    segment = store.create(FAMILY, LAYOUT, 1024)
    write_batch(store, segment, [1])
    synced = []
    real_file, real_folder = os.fdatasync, os.fsync

    def note_file(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real_file(fd)

    def note_folder(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real_folder(fd)

    monkeypatch.setattr(os, "fdatasync", note_file)
    monkeypatch.setattr(os, "fsync", note_folder)
    store.sync([segment])
    path = store.path(segment)
    assert synced == [str(path), str(path.parent), str(path.parent.parent)]
    assert segment.durable == segment.fill
    synced.clear()
    store.sync([segment])
    assert synced == []


def test_a_file_made_while_its_folder_is_synced_is_synced_by_the_next_call(store, monkeypatch):
    store.create(FAMILY, LAYOUT, 1024)
    synced = []
    real = os.fsync

    def make_one_more_after(fd):
        real(fd)
        folder = Path(f"/proc/self/fd/{fd}").readlink()
        if folder == store.datadir.family_path(FAMILY) and not synced:
            store.create(FAMILY, LAYOUT, 1024)
        synced.append(folder)

    monkeypatch.setattr(os, "fsync", make_one_more_after)
    store.sync([])
    synced.clear()
    synced.append(Path())  # no further file
    store.sync([])
    assert store.datadir.family_path(FAMILY) in synced


def test_sync_after_the_family_was_dropped(store):
    segment = store.create(FAMILY, LAYOUT, 1024)
    store.unlink(segment.id)
    store.sync([])
    assert not store.datadir.family_path(FAMILY).exists()


# -- damage --------------------------------------------------------------------------------------


def _trailer_bytes(written):
    """(first byte, last byte) of a batch's rows, versions, hashes."""
    start = written.first_offset + written.rows.size * written.segment.record_bytes
    return start, start + layout.ENTRY_BYTES * written.rows.size


@pytest.mark.parametrize("where", ["rows", "hashes", "footer", "footer hash"])
def test_flipped_bits_in_a_trailer_are_found(store, where):
    segment = store.create(FAMILY, LAYOUT, 1032)
    batch = write_batch(store, segment, range(20))
    write_batch(store, segment, [5])
    first, last = _trailer_bytes(batch)
    end = batch.first_offset + layout.batch_bytes(20, 1032)
    byte = {"rows": first, "hashes": last - 1, "footer": end - 40, "footer hash": end - 1}[where]
    flip_bit(store.path(segment), byte, 3)
    trailers = store.read_trailers(segment)
    assert next(trailers).rows.tolist() == [5]
    with pytest.raises(CorruptRecord, match=f"{store.path(segment)}.*byte {end}") as caught:
        next(trailers)
    assert caught.value.details["offset"] == str(end)


@pytest.mark.parametrize("bit", range(0, 64 * 8, 37))
def test_any_bit_of_a_footer_is_covered(store, bit):
    segment = store.create(FAMILY, LAYOUT, 32)
    write_batch(store, segment, range(20))
    flip_bit(store.path(segment), segment.fill - 64 + bit // 8, bit % 8)
    with pytest.raises(CorruptRecord):
        list(store.read_trailers(segment))


def test_a_trailer_of_another_segment_does_not_count(store):
    one, two = (store.create(FAMILY, LAYOUT, 32) for _ in range(2))
    for segment in (one, two):
        write_batch(store, segment, [1, 2])
    block = store.path(one).read_bytes()[layout.HEADER_BYTES : one.fill]
    with store.path(two).open("r+b") as file:
        file.seek(layout.HEADER_BYTES)
        file.write(block)
    with pytest.raises(CorruptRecord, match="hash"):
        list(store.read_trailers(two))


@pytest.fixture
def inherited(store, tmp_path):
    """A store as after a restart, with one segment on disk: (store, id, counted bytes, path)."""
    segment = store.create(FAMILY, LAYOUT, 1032)
    write_batch(store, segment, range(30))
    store.seal(segment)
    path = store.path(segment)
    store.close()
    store.datadir.close()
    after = open_store(tmp_path / "data")
    yield after, segment.id, segment.fill, path
    after.close()
    # `store` closes its lock once more; give it one to close.
    store.datadir.lock_fd = after.datadir.lock_fd


def test_inherited_segments_are_read_only(inherited):
    store, segment_id, counted, _ = inherited
    segment = store.open_existing(FAMILY, segment_id, counted)
    assert (segment.record_bytes, segment.layout) == (1032, LAYOUT)
    assert not segment.has_room(1)
    assert len(list(store.read_trailers(segment))) == 1
    assert store.open_existing(FAMILY, segment_id, counted) is segment


@pytest.mark.parametrize("byte", [0, 20, 33, 56, 3000, 4090])
def test_flipped_bits_in_a_header_are_found(inherited, byte):
    store, segment_id, counted, path = inherited
    flip_bit(path, byte)
    with pytest.raises(CorruptRecord, match=str(path)):
        store.open_existing(FAMILY, segment_id, counted)


def test_cut_and_missing_files_are_found(inherited):
    store, segment_id, counted, path = inherited
    os.truncate(path, counted - 1)
    with pytest.raises(CorruptRecord, match=f"{counted - 1} bytes.*cut short"):
        store.open_existing(FAMILY, segment_id, counted)
    os.truncate(path, 100)
    with pytest.raises(CorruptRecord):
        store.open_existing(FAMILY, segment_id, counted)
    path.unlink()
    with pytest.raises(CorruptRecord, match="is missing"):
        store.open_existing(FAMILY, segment_id, counted)


def test_a_file_of_another_place_is_refused(inherited):
    store, segment_id, counted, path = inherited
    path.rename(path.with_name("77.seg"))
    with pytest.raises(CorruptRecord, match=f"holds segment {segment_id}"):
        store.open_existing(FAMILY, 77, counted)


def test_a_newer_segment_format_names_both(inherited):
    store, segment_id, counted, path = inherited
    from momentd_server.storage.hashing import hash_bytes

    block = bytearray(path.read_bytes()[: layout.HEADER_BYTES])
    block[8] = 9
    block[-8:] = hash_bytes(bytes(block[:-8])).to_bytes(8, "little")
    with path.open("r+b") as file:
        file.write(block)
    with pytest.raises(Incompatible, match=r"format 9.*reads 1"):
        store.open_existing(FAMILY, segment_id, counted)


@pytest.mark.parametrize("left", [0, 5, 100])
def test_a_segment_cut_off_in_its_header_says_so(inherited, left):
    store, segment_id, counted, path = inherited
    with path.open("r+b") as file:
        file.truncate(left)
    with pytest.raises(CorruptRecord, match=f"cut off after {left} bytes"):
        store.open_existing(FAMILY, segment_id, counted)


def test_foreign_file_in_a_segments_place(inherited):
    store, segment_id, counted, path = inherited
    path.write_bytes(b"hello" * 100_000)
    with pytest.raises(CorruptRecord, match="is not a segment"):
        store.open_existing(FAMILY, segment_id, counted)


# -- descriptors ---------------------------------------------------------------------------------


def test_pinned_files_outlive_their_deletion(store):
    segment = store.create(FAMILY, LAYOUT, 1024)
    batch = write_batch(store, segment, [1, 2])
    with store.pin(np.full(3, segment.id)) as pins:
        assert pins.fds.size == 3
        assert store.unlink(segment.id) > 0
        assert not store.path(segment).exists()
        fd = os.open(f"/proc/self/fd/{pins.fds[0]}", os.O_RDONLY)
        data = os.pread(fd, 1024, int(batch.offsets[1]))
        os.close(fd)
        assert data == batch.records[1].tobytes()
    with pytest.raises(InternalError, match="not known"):
        store.pin(np.array([segment.id]))


def test_descriptors_are_bounded_and_pins_are_kept(tmp_path):
    paths = [tmp_path / str(i) for i in range(6)]
    for path in paths:
        path.write_bytes(b"x")
    opened = []

    def open_file(number):
        opened.append(number)
        return os.open(paths[number], os.O_RDONLY)

    descriptors = Descriptors(open_file, most=2)
    pins = descriptors.pin([0, 1, 2, 0])
    assert pins.fds[0] == pins.fds[3]
    assert len(descriptors) == 3  # pinned: none may be closed
    for number in (3, 4, 5):
        descriptors.pin([number]).close()
    for fd in pins.fds:
        os.fstat(int(fd))
    pins.close()
    assert len(descriptors) == 2
    assert opened == [0, 1, 2, 3, 4, 5]
    descriptors.close()
    assert len(descriptors) == 0


def test_a_failed_open_leaves_no_pin(tmp_path):
    (tmp_path / "0").write_bytes(b"x")
    descriptors = Descriptors(lambda n: os.open(tmp_path / str(n), os.O_RDONLY), most=1)
    with pytest.raises(FileNotFoundError):
        descriptors.pin([0, 9])
    descriptors.pin([0]).close()
    descriptors.close()
    assert len(descriptors) == 0


def test_page_cache_is_counted_and_stays_empty_with_direct_io(store):
    segment = store.create(FAMILY, LAYOUT, 1024)
    write_batch(store, segment, range(2000))
    before = store.page_cache_bytes()
    store.path(segment).read_bytes()
    assert before <= 64 * 1024
    assert store.page_cache_bytes() in (0, segment.reserved)
    files.drop_cached(store.path(segment))
