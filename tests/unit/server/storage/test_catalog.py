"""The catalog: whole transactions, ids never given out twice, damage noticed, others refused."""

import dataclasses
import os
import threading

import lmdb
import pytest

from momentd_server.schema import FieldSpec, Schema
from momentd_server.storage import catalog_file, migrations
from momentd_server.storage.catalog import (
    Catalog,
    DropSession,
    DropTable,
    Manifest,
    Put,
    SessionRecord,
    StreamRecord,
    TableRecord,
)
from momentd_server.storage.datadir import DataDir
from momentd_wire.errors import (
    CorruptRecord,
    Incompatible,
    OutOfSpace,
    SchemaMismatch,
    StorageFailed,
)
from tests.support.segments import FAMILY, LAYOUT, open_store

SCHEMA = Schema(
    100_000_000_000,
    16,
    (FieldSpec("exp_avg", "float32", 16), FieldSpec("exp_avg_sq", "float64", 3, 0.1)),
    "sparse_adam",
)


def table(table_id, **changes):
    record = TableRecord(
        id=table_id,
        family=7,
        layout=1,
        name=None,
        label="model.emb µ",
        run="run 1",
        schema=SCHEMA,
        created_s=1_700_000_000.25,
        owner=bytes(range(16)),
        manifest=Manifest(3, 10, 12, ((1 << 33, 1 << 27), (5, 4096)), ((1, 9), (3, (1 << 44) - 1))),
    )
    return dataclasses.replace(record, **changes)


SESSION = SessionRecord(
    session=b"\x00\xff" * 8,
    plane="local",
    pid=1,
    pid_start=1 << 40,
    boot_id="b",
    uid=0,
    run="r",
    program="train.py",
    streams=(StreamRecord(1, 5, b"\x01\x02", b"\x00reply"), StreamRecord(2, 0, b"", b"")),
)


@pytest.fixture
def catalog(datadir):
    catalog = Catalog.open(datadir)
    yield catalog
    catalog.close()


def reopened(catalog, datadir):
    catalog.close()
    return Catalog.open(datadir)


def test_records_come_back_as_they_were(catalog, datadir):
    records = [table(1), table(1 << 40, name="entities", owner=None, manifest=Manifest(1, 0, 0))]
    catalog.commit([Put(record) for record in records] + [Put(SESSION)])
    again = reopened(catalog, datadir)
    assert again.tables() == catalog.tables() == records
    assert again.sessions() == [SESSION]
    again.commit([DropTable(1), DropSession(SESSION.session), DropTable(99)])
    last = reopened(again, datadir)
    assert last.tables() == records[1:]
    assert last.sessions() == []
    last.close()


def test_a_commit_is_all_or_nothing(catalog, datadir, monkeypatch):
    catalog.commit([Put(table(1, label="old"))])
    real = catalog_file.records.seal

    def fail_late(key, body):
        if b"t" + (3).to_bytes(8, "big") == key:
            raise OSError(28, os.strerror(28))
        return real(key, body)

    monkeypatch.setattr(catalog_file.records, "seal", fail_late)
    with pytest.raises(OutOfSpace, match=r"data\.mdb"):
        catalog.commit([Put(table(1, label="new")), DropTable(1), Put(table(2)), Put(table(3))])
    monkeypatch.undo()
    assert [t.label for t in catalog.tables()] == ["old"]
    again = reopened(catalog, datadir)
    assert [t.label for t in again.tables()] == ["old"]
    again.commit([Put(table(2))])
    assert len(again.tables()) == 2
    again.close()


def test_a_failed_disk_is_final(catalog, monkeypatch):
    def fail(*_args, **_kwargs):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(catalog._file, "_write_once", fail)
    with pytest.raises(StorageFailed, match="Input/output"):
        catalog.commit([Put(table(1))])
    monkeypatch.undo()
    with pytest.raises(StorageFailed):
        catalog.commit([Put(table(1))])
    assert catalog.tables() == []


def test_names_are_unique(catalog):
    catalog.commit([Put(table(1, name="a")), Put(table(2, name="b"))])
    with pytest.raises(SchemaMismatch, match="table 1 is called 'a' already"):
        catalog.commit([Put(table(3, name="a"))])
    assert len(catalog.tables()) == 2
    catalog.commit([DropTable(1), Put(table(3, name="a"))])  # in one transaction
    catalog.commit([Put(table(3, name="a", label="same table again"))])
    assert [t.id for t in catalog.tables()] == [2, 3]


def test_the_map_grows_with_the_catalog(catalog, datadir, monkeypatch):
    big = [Put(table(i, label="x" * 20_000)) for i in range(1, 1500)]
    catalog.commit(big)  # 30 MB into a map of 16 MiB
    again = reopened(catalog, datadir)
    assert len(again.tables()) == 1499
    again.close()


@pytest.mark.parametrize("kind", ["table", "family", "segment"])
def test_ids_are_never_given_out_twice(catalog, datadir, kind):
    def allocate(owner):
        return getattr(owner, f"allocate_{kind}")()

    given = [allocate(catalog) for _ in range(1500)]
    assert given == list(range(1, 1501))
    again = reopened(catalog, datadir)
    more = [allocate(again) for _ in range(10)]
    assert min(more) > 1500
    assert len(set(more)) == 10
    again.close()


def test_ids_from_many_threads(catalog):
    given = []

    def take():
        given.extend(catalog.allocate_table() for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(1, 1601))


def test_generations_survive_drops_and_restarts(catalog, datadir):
    family = catalog.allocate_family()
    first = catalog.allocate_generation(family)
    catalog.commit([Put(table(1, family=family, manifest=Manifest(first, 0, 0)))])
    clone = catalog.allocate_generation(family)
    catalog.commit([DropTable(1)])  # the family's last committed table, while a clone is made
    assert (first, clone, catalog.allocate_generation(family)) == (1, 2, 3)
    catalog.commit([Put(table(2, family=family, manifest=Manifest(clone, 0, 0)))])
    again = reopened(catalog, datadir)
    assert again.allocate_generation(family) > 3
    again.close()


def test_families_without_tables_leave_nothing_behind(catalog, datadir):
    for i in range(1, 30):
        family = catalog.allocate_family()
        catalog.allocate_generation(family)
        catalog.allocate_generation(family)
        if i % 2:
            catalog.commit([Put(table(i, family=family)), DropTable(i)])
            catalog.commit([Put(table(i, family=family))])
            catalog.commit([DropTable(i)])
    entries = _kinds(reopened(catalog, datadir))
    assert entries == {catalog_file.Kind.COUNTER: 1}


def _kinds(catalog):
    kinds = {}
    for kind, _, _ in catalog._file.entries():
        kinds[kind] = kinds.get(kind, 0) + 1
    catalog.close()
    return kinds


def test_generations_end_with_an_error(catalog):
    family = catalog.allocate_family()
    catalog.commit([Put(table(1, family=family, manifest=Manifest((1 << 20) - 2, 0, 0)))])
    assert catalog.allocate_generation(family) == (1 << 20) - 1
    with pytest.raises(Exception, match="generations"):
        catalog.allocate_generation(family)


def test_epochs_count_starts(catalog, datadir):
    assert (catalog.next_epoch(), catalog.next_epoch()) == (1, 2)
    again = reopened(catalog, datadir)
    assert again.next_epoch() == 3
    again.close()


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def closed(datadir):
    """The path of a closed catalog of three tables."""
    catalog = Catalog.open(datadir)
    for i in (1, 2, 3):
        catalog.commit([Put(table(i, label=f"label-{i}"))])
    catalog.close()
    return datadir.catalog_path / "data.mdb"


def test_a_flipped_bit_in_any_entry_is_found(closed, datadir):
    data = closed.read_bytes()
    places = [at for at in range(len(data)) if data.startswith(b"label-2", at)]
    assert places
    for at in places:  # old versions of the page too
        data = data[: at + 6] + b"7" + data[at + 7 :]
    closed.write_bytes(data)
    with pytest.raises(CorruptRecord, match=rf"{closed}.*does not match its hash"):
        Catalog.open(datadir)


def test_a_lost_entry_is_found(closed, datadir):
    environment = lmdb.open(str(closed.parent))
    with environment.begin(write=True) as transaction:
        assert transaction.delete(b"t" + (2).to_bytes(8, "big"))
    environment.close()
    with pytest.raises(CorruptRecord, match="3 entries were found, 4 were written"):
        Catalog.open(datadir)


def test_an_older_entry_is_found(closed, datadir):
    key = b"t" + (2).to_bytes(8, "big")
    environment = lmdb.open(str(closed.parent))
    with environment.begin() as transaction:
        old = transaction.get(key)
    environment.close()
    catalog = Catalog.open(datadir)
    catalog.commit([Put(table(2, label="newer"))])
    catalog.close()
    environment = lmdb.open(str(closed.parent))
    with environment.begin(write=True) as transaction:
        transaction.put(key, old)
    environment.close()
    with pytest.raises(CorruptRecord, match="older one"):
        Catalog.open(datadir)


@pytest.mark.parametrize("share", [0.0001, 0.3, 0.9])
def test_a_cut_catalog_is_an_error_not_a_bus_error(closed, datadir, share):
    os.truncate(closed, int(closed.stat().st_size * share))
    with pytest.raises(CorruptRecord, match=r"data\.mdb"):
        Catalog.open(datadir)


def test_a_missing_catalog_is_not_replaced_by_an_empty_one(closed, datadir):
    store = open_store(datadir.path.parent / "other")
    store.datadir.close()
    store.datadir = datadir
    store.create(FAMILY, LAYOUT, 64)
    store.close()
    closed.unlink()
    with pytest.raises(CorruptRecord, match="is missing although there are segments"):
        Catalog.open(datadir)
    assert not closed.exists()


def _untouched(path, opening, error, match):
    before = path.read_bytes()
    names = sorted(p.name for p in path.parent.iterdir())
    with pytest.raises(error, match=match):
        opening()
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == names


def test_foreign_files_are_refused_untouched(datadir):
    path = datadir.catalog_path / "data.mdb"
    path.write_bytes(b"SQLite format 3\x00" * 1000)
    _untouched(path, lambda: Catalog.open(datadir), CorruptRecord, "not a readable LMDB file")


def test_foreign_lmdb_is_refused_untouched(datadir):
    environment = lmdb.open(str(datadir.catalog_path))
    with environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    environment.close()
    path = datadir.catalog_path / "data.mdb"
    _untouched(path, lambda: Catalog.open(datadir), CorruptRecord, "not a catalog of momentd")


def test_newer_catalog_is_refused_untouched_naming_both(closed, datadir, monkeypatch):
    monkeypatch.setattr(migrations, "FORMAT_VERSION", 0)
    _untouched(
        closed,
        lambda: Catalog.open(datadir),
        Incompatible,
        "catalog format 1, this momentd reads 0",
    )


def test_the_catalog_of_another_store_is_refused(closed, tmp_path):
    other = DataDir.open(tmp_path / "other")
    path = other.catalog_path / "data.mdb"
    path.write_bytes(closed.read_bytes())
    _untouched(path, lambda: Catalog.open(other), CorruptRecord, "belongs to store")
    other.close()


def test_killed_before_the_first_commit(datadir):
    lmdb.open(str(datadir.catalog_path)).close()
    catalog = Catalog.open(datadir)
    catalog.commit([Put(table(1))])
    catalog.close()
