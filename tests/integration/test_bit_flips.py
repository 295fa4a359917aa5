"""A flipped bit anywhere on disk is never taken for data, and `verify` finds it."""

import dataclasses
import time

import numpy as np
import pytest

from momentd_server.storage import format as layout
from momentd_server.storage import hashing, records
from momentd_server.storage.diskio import READ_MISMATCH, READ_OK, ReadPool
from tests.support.damage import Flip, Harness, make_directory

FLIPS = 200
LONG_FLIPS = 20_000
PARTS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("flips"))


@pytest.fixture
def harness(directory):
    harness = Harness(directory)
    yield harness
    harness.close()


def run(harness, flips, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(flips):
        harness.look(harness.choose(rng))
    return harness.tally


def test_no_flip_is_taken_for_data_and_verify_finds_all_that_count(harness):
    tally = run(harness, FLIPS)
    assert tally.flips == FLIPS
    assert (tally.silent, tally.missed) == ([], [])
    assert tally.refused > 20
    assert tally.rows_refused > 2  # most flipped records are superseded ones


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(1, PARTS + 1))
def test_twenty_thousand_flips(harness, seed):
    began = time.perf_counter()
    tally = run(harness, LONG_FLIPS // PARTS, seed)
    print(
        f"\n{tally.flips} flips in {time.perf_counter() - began:.0f} s: {tally.refused} refused at "
        f"the start, {tally.rows_refused} as errors of the rows concerned, {tally.harmless} where "
        f"nobody reads, {len(tally.silent)} silent, {len(tally.missed)} not found by verify"
    )
    assert (tally.silent, tally.missed) == ([], [])


# ------------------------------------------------------------------------- the harness itself


def _flip_a_record(harness):
    file = next(iter(harness.segments))
    return Flip(file, layout.HEADER_BYTES + 5, 3)


def _last_batch(harness):
    """(file, footer) of a batch that nothing supersedes."""
    file, counted = list(harness.segments.items())[-1]
    data = np.frombuffer(file.read_bytes()[counted - layout.FOOTER_BYTES : counted], np.uint8)
    return file, layout.unpack_footer(data)


def _flip_a_newest_record(harness):
    file, footer = _last_batch(harness)
    return Flip(file, footer.batch_start + 5, 3)


def _flip_a_generation(harness):
    """Bit 44 of the first version: the record is of no known timeline then."""
    file, footer = _last_batch(harness)
    return Flip(file, footer.batch_start + footer.records_bytes + 8 * footer.records + 5, 4)


def test_it_catches_reads_that_ignore_the_check(harness, monkeypatch):
    read = ReadPool.read

    def careless(*arguments):
        status = read(*arguments)
        status[status == READ_MISMATCH] = READ_OK
        return status

    monkeypatch.setattr(ReadPool, "read", careless)
    flip = _flip_a_newest_record(harness)
    harness.look(flip)
    assert harness.tally.silent == [flip]


def test_it_catches_trailers_that_are_not_compared(harness, monkeypatch):
    monkeypatch.setattr(
        layout, "trailer_digest", lambda _entries, footer, _segment: footer.view(np.uint64)[7]
    )
    flip = _flip_a_generation(harness)
    harness.look(flip)
    assert harness.tally.silent == harness.tally.missed == [flip]


def test_it_catches_a_verify_that_does_not_hash_records(harness, monkeypatch):
    real = hashing.hash_records
    good = {}

    def lazy(memory, offsets, rows, initial, hashes):
        real(memory, offsets, rows, initial, hashes)
        hashes[:] = good.setdefault(rows.tobytes(), hashes.copy())

    monkeypatch.setattr(hashing, "hash_records", lazy)
    from momentd_server.storage.verify import verify_directory

    verify_directory(harness.path, threads=1)  # it learns the right ones
    flip = _flip_a_record(harness)
    harness.look(flip)
    assert harness.tally.missed == [flip]


def test_it_catches_catalog_entries_without_a_check(harness, monkeypatch):
    monkeypatch.setattr(records, "hash_bytes", lambda _data: 0)
    monkeypatch.setattr(records, "value_hash", lambda _value: 0)
    monkeypatch.setattr(
        "momentd_server.storage.catalog_file.CatalogFile.entries", _unchecked_entries
    )
    data = harness.catalog.read_bytes()
    at = data.index(b'"step":3') + len('"step":')
    flips = []
    while at != len('"step":') - 1:
        flips.append(Flip(harness.catalog, at, 0))
        at = data.find(b'"step":3', at) + len('"step":')
    for flip in flips:  # of old pages too: nobody reads those
        harness.look(flip)
    assert harness.tally.silent


def _unchecked_entries(self):
    from momentd_server.storage.catalog_file import Kind

    with self._environment.begin() as transaction:
        for key, value in transaction.cursor():
            if key != b"m":
                yield Kind(key[:1]), key[1:], records.unseal(key, value, self.path)


def test_verify_finds_a_snapshot_that_would_be_restored_to_other_content(harness, monkeypatch):
    """End to end: every checksum is right, but records are left out."""
    from momentd_server.storage import verify

    real = verify.recovery.rebuild

    def forgetful(store, family, manifest, schema, location, check):
        result = real(store, family, manifest, schema, location, check)
        return dataclasses.replace(result, digest=result.digest ^ 1)

    monkeypatch.setattr(verify.recovery, "rebuild", forgetful)
    found = verify.verify_directory(harness.path).damages
    assert sorted(name for damage in found for name in damage.snapshots) == [
        "narrow then",
        "wide then",
    ]
