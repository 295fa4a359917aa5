"""Rebuilding locations: the version rule, ancestry, caps, damage, what is deleted."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from momentd_server.storage import files, recovery
from momentd_server.storage import format as layout
from momentd_server.storage.location import slot
from momentd_server.storage.records import Manifest
from momentd_server.storage.recovery import delete_unlisted, rebuild
from momentd_server.storage.segments import SegmentStore
from momentd_wire.errors import CorruptRecord, SchemaMismatch
from tests.support.segments import FAMILY, LAYOUT, flip_bit, open_store, schema_of, write_batch

ROWS = 100
SCHEMA = schema_of(64, ROWS)
ALL = (1 << 44) - 1


def _manifest(ancestry, segments):
    return Manifest(
        generation=ancestry[-1][0],
        step=0,
        update_number=0,
        segments=tuple((segment.id, segment.fill) for segment in segments),
        ancestry=tuple(ancestry),
    )


def _rebuild(store, manifest, schema=SCHEMA):
    location, check = np.zeros(schema.rows, np.uint64), np.zeros(schema.rows, np.uint32)
    return rebuild(store, FAMILY, manifest, schema, location, check), location, check


def _where(batch, index):
    return slot(batch.segment.id, int(batch.offsets[index]))


def test_slots_checks_counts_and_digest(store):
    one, two = (store.create(FAMILY, LAYOUT, 64) for _ in range(2))
    old = write_batch(store, one, [5, 7, 9], numbers=1, seed=1)
    new = write_batch(store, two, [7, 99], numbers=2, seed=2)
    newest = write_batch(store, one, [9], numbers=3, seed=3)
    result, location, check = _rebuild(store, _manifest([(1, ALL)], [one, two]))
    expected = {5: (old, 0), 7: (new, 0), 99: (new, 1), 9: (newest, 0)}
    assert np.flatnonzero(location).tolist() == sorted(expected)
    for row, (batch, index) in expected.items():
        assert location[row] == _where(batch, index)
        assert check[row] == batch.checks[index]
    digest = sum(int(batch.hashes[index]) for batch, index in expected.values())
    assert result == recovery.RebuildResult(4, {one.id: 2, two.id: 2}, digest % (1 << 64), 6)


def test_an_empty_manifest_is_an_untouched_table(store):
    result, location, _ = _rebuild(store, Manifest(1, 0, 0, (), ((1, ALL),)))
    assert result == recovery.RebuildResult(0, {}, 0, 0)
    assert not location.any()


def test_only_counted_bytes_count(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    first = write_batch(store, segment, [1, 2], numbers=1)
    manifest = _manifest([(1, ALL)], [segment])
    write_batch(store, segment, [2, 3], numbers=2, seed=1)
    result, location, _ = _rebuild(store, manifest)
    assert result.records_read == 2
    assert location[2] == _where(first, 1)
    assert location[3] == 0


def test_records_above_the_cap_do_not_count(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    kept = write_batch(store, segment, [1, 2], numbers=[500, 480])
    write_batch(store, segment, [1, 3], numbers=[503, 501], seed=1)
    _, location, _ = _rebuild(store, _manifest([(1, 500)], [segment]))
    assert location[1] == _where(kept, 0)
    assert location[3] == 0
    _, location, _ = _rebuild(store, _manifest([(1, 501)], [segment]))
    assert location[3] != 0


def test_a_fork_does_not_see_what_its_parent_did_later(store):
    # The story of DESIGN: row 7 goes on to update 503 of the original; the fork, cut at 500,
    # trains to 600 without touching it and lists the shared segment too.
    shared, own = (store.create(FAMILY, LAYOUT, 64) for _ in range(2))
    at_480 = write_batch(store, shared, [7, 8], generation=1, numbers=480)
    write_batch(store, shared, [7], generation=1, numbers=503, seed=1)
    of_fork = write_batch(store, own, [8], generation=2, numbers=600, seed=2)
    _, location, _ = _rebuild(store, _manifest([(1, 500), (2, 600)], [shared, own]))
    assert location[7] == _where(at_480, 0)
    assert location[8] == _where(of_fork, 0)


def test_a_fork_of_a_fork(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    write = {
        (generation, number): write_batch(
            store, segment, [number % 10], generation=generation, numbers=number, seed=number
        )
        for generation, number in [(1, 101), (1, 112), (2, 112), (2, 123), (5, 123), (5, 104)]
    }
    # Cut at 110 of generation 1, then at 120 of generation 2. Generation 4 is of nobody here.
    write_batch(store, segment, [1, 2, 3, 4], generation=4, numbers=999)
    _, location, _ = _rebuild(store, _manifest([(1, 110), (2, 120), (5, ALL)], [segment]))
    assert location[1] == _where(write[1, 101], 0)
    assert location[2] == _where(write[2, 112], 0)  # not the 112 of generation 1
    assert location[3] == _where(write[5, 123], 0)  # not the 123 of generation 2
    assert location[4] == _where(write[5, 104], 0)


def test_the_later_generation_wins_even_with_a_lower_number(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    rolled_back = write_batch(store, segment, [1], generation=9, numbers=3)
    write_batch(store, segment, [1], generation=2, numbers=50, seed=1)
    _, location, _ = _rebuild(store, _manifest([(2, 50), (9, ALL)], [segment]))
    assert location[1] == _where(rolled_back, 0)
    # The order of the list decides, not the size of the number.
    _, location, _ = _rebuild(store, _manifest([(9, 3), (2, ALL)], [segment]))
    assert location[1] != _where(rolled_back, 0)


def test_equal_versions_are_one_record(store):
    # A compaction has copied; the old file is still listed.
    segments = [store.create(FAMILY, LAYOUT, 64) for _ in range(2)]
    for segment in segments:
        write_batch(store, segment, [1, 2], numbers=7, seed=5)
    result, location, _ = _rebuild(store, _manifest([(1, ALL)], segments))
    assert result.rows_touched == 2
    assert result.live_records == {segments[0].id: 2, segments[1].id: 0}
    assert location[1] >> np.uint64(28) & np.uint64(0xFFFF) == segments[0].id


def test_version_zero_and_the_highest_numbers(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    zero = write_batch(store, segment, [0], generation=0, numbers=0)
    last = (1 << 20) - 1
    top = write_batch(store, segment, [99, 98], generation=last, numbers=[ALL, ALL - 1], seed=1)
    _, location, _ = _rebuild(store, _manifest([(0, 0), (last, ALL)], [segment]))
    assert location[0] == _where(zero, 0)
    assert location[99] == _where(top, 0)


def test_a_large_table_is_shared_by_threads(store):
    rows = 4 * recovery._LEAST_ROWS + 5  # a part for each of four threads, of unequal size
    schema = schema_of(8, rows)
    segments = [store.create(FAMILY, LAYOUT, 8) for _ in range(2)]
    random = np.random.default_rng(0)
    wanted, checks, hashes = (np.zeros(rows, np.uint64) for _ in range(3))
    for number in range(6):
        some = random.permutation(rows)[:50_000]
        some[:2] = 0, rows - 1
        batch = write_batch(store, segments[number % 2], some, numbers=number, seed=number)
        wanted[some] = [_where(batch, index) for index in range(some.size)]
        checks[some], hashes[some] = batch.checks, batch.hashes
    result, location, check = _rebuild(store, _manifest([(1, ALL)], segments), schema)
    np.testing.assert_array_equal(location, wanted)
    np.testing.assert_array_equal(check, checks)
    assert result.rows_touched == np.count_nonzero(wanted)
    assert sum(result.live_records.values()) == result.rows_touched
    assert result.digest == int(hashes.sum(dtype=np.uint64))


def test_segment_ids_of_34_bits(tmp_path):
    store = open_store(tmp_path / "data")
    ids = itertools.count((1 << 34) - 2)
    big = SegmentStore(store.datadir, lambda: next(ids))
    segment = big.create(FAMILY, LAYOUT, 64)
    batch = write_batch(big, segment, [3])
    _, location, _ = _rebuild(big, _manifest([(1, ALL)], [segment]))
    assert location[3] == _where(batch, 0)
    assert int(location[3]) >> 28 & (1 << 34) - 1 == (1 << 34) - 2
    big.close()
    store.datadir.close()


batches = st.lists(
    st.tuples(
        st.integers(0, 2),  # segment
        st.integers(1, 5),  # generation
        st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9)), min_size=1, max_size=8),
    ),
    max_size=12,
)
ancestries = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, unique_by=lambda pair: pair[0]
)


@settings(max_examples=60, deadline=None)
@given(batches=batches, ancestry=ancestries)
def test_the_rule_as_a_model_states_it(tmp_path_factory, batches, ancestry):
    store = open_store(tmp_path_factory.mktemp("model") / "data")
    segments = [store.create(FAMILY, LAYOUT, 64) for _ in range(3)]
    rank = {generation: place for place, (generation, _) in enumerate(ancestry)}
    best: dict[int, tuple[int, int]] = {}
    hashes: dict[tuple[int, int, int], set[int]] = {}
    for seed, (which, generation, records) in enumerate(batches):
        rows, numbers = (list(column) for column in zip(*records, strict=True))
        written = write_batch(
            store, segments[which], rows, generation=generation, numbers=numbers, seed=seed
        )
        for index, (row, number) in enumerate(records):
            if generation in rank and number <= dict(ancestry)[generation]:
                key = (rank[generation], number)
                best[row] = max(best.get(row, key), key)
                hashes.setdefault((row, *key), set()).add(_where(written, index))
    _, location, _ = _rebuild(store, _manifest(ancestry, segments))
    assert np.flatnonzero(location).tolist() == sorted(best)
    for row, key in best.items():
        assert int(location[row]) in hashes[row, *key]
    store.close()
    store.datadir.close()


# -- damage --------------------------------------------------------------------------------------


def _after_restart(store, tmp_path):
    store.close()
    return SegmentStore(store.datadir, lambda: 1000)


def test_damage_inside_the_counted_bytes_names_file_and_offset(store, tmp_path):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, range(20))
    damaged_end = segment.fill
    write_batch(store, segment, range(20), numbers=2)
    manifest = _manifest([(1, ALL)], [segment])
    flip_bit(store.path(segment), damaged_end - 64 + 8)
    with pytest.raises(CorruptRecord) as caught:
        _rebuild(_after_restart(store, tmp_path), manifest)
    assert caught.value.details == {
        "path": str(store.path(segment)),
        "offset": str(damaged_end),
    }


def test_damage_behind_the_counted_bytes_does_not_matter(store, tmp_path):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, range(20))
    manifest = _manifest([(1, ALL)], [segment])
    write_batch(store, segment, range(20), numbers=2)
    flip_bit(store.path(segment), segment.fill - 10)
    result, _, _ = _rebuild(_after_restart(store, tmp_path), manifest)
    assert result.rows_touched == 20


def test_truncated_and_missing_segments(store, tmp_path):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, range(20))
    path, manifest = store.path(segment), _manifest([(1, ALL)], [segment])
    files.cut(path, segment.fill - layout.BLOCK)
    with pytest.raises(CorruptRecord, match="cut short"):
        _rebuild(_after_restart(store, tmp_path), manifest)
    path.unlink()
    with pytest.raises(CorruptRecord, match="is missing"):
        _rebuild(_after_restart(store, tmp_path), manifest)


@pytest.mark.parametrize("row", [ROWS, -1, 1 << 62])
def test_rows_outside_the_table(store, row):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, [1, row])
    with pytest.raises(CorruptRecord, match=f"row {row}, the table has {ROWS}"):
        _rebuild(store, _manifest([(1, ALL)], [segment]))


def test_another_record_size(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    with pytest.raises(SchemaMismatch, match=r"64 bytes.*1032"):
        _rebuild(store, _manifest([(1, ALL)], [segment]), schema_of(1032, ROWS))


def test_counts_that_end_between_batches(store, tmp_path):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, range(500))
    manifest = _manifest([(1, ALL)], [segment])
    wrong = dataclasses.replace(manifest, segments=((segment.id, segment.fill - layout.BLOCK),))
    with pytest.raises(CorruptRecord, match="damaged batch"):
        _rebuild(_after_restart(store, tmp_path), wrong)


# -- deletion ------------------------------------------------------------------------------------


def test_unlisted_files_are_deleted_and_tails_cut(store, tmp_path):
    kept, dropped = (store.create(FAMILY, LAYOUT, 64) for _ in range(2))
    other = store.create(FAMILY + 1, LAYOUT, 64)
    write_batch(store, kept, [1, 2])
    small, manifest = kept.fill, _manifest([(1, ALL)], [kept])
    write_batch(store, kept, [1, 2])
    larger = _manifest([(1, ALL)], [kept])
    write_batch(store, kept, [3])
    note = store.datadir.family_path(FAMILY) / "notes.txt"
    note.write_text("mine")
    listed = [(FAMILY, manifest), (FAMILY, larger)]
    assert small < larger.segments[0][1] < kept.fill
    freed = delete_unlisted(store, listed)
    assert freed >= 3 * layout.FIRST_RESERVE - 3 * layout.HEADER_BYTES - kept.fill
    assert store.path(kept).stat().st_size == larger.segments[0][1]
    assert not store.path(dropped).exists()
    assert not store.path(other).parent.exists()
    assert note.read_text() == "mine"
    again = _after_restart(store, tmp_path)
    assert _rebuild(again, manifest)[0].rows_touched == 2
    assert _rebuild(again, larger)[0].records_read == 4
    assert delete_unlisted(again, listed) == 0
    again.close()


def test_the_same_segment_id_in_another_family_is_not_listed(store):
    segment = store.create(FAMILY, LAYOUT, 64)
    write_batch(store, segment, [1])
    delete_unlisted(store, [(FAMILY + 5, _manifest([(1, ALL)], [segment]))])
    assert not store.path(segment).exists()


def test_a_rebuild_leaves_no_thread_and_no_cached_pages(store):
    import threading

    segment = store.create(FAMILY, LAYOUT, 64)
    for number in range(30):
        write_batch(store, segment, range(90), numbers=number)
    manifest = _manifest([(1, ALL)], [segment])
    before = threading.active_count()
    _rebuild(store, manifest)
    flip_bit(store.path(segment), segment.fill - layout.batch_bytes(90, 64) - 64 + 8)
    with pytest.raises(CorruptRecord):
        _rebuild(store, manifest)
    assert threading.active_count() == before
