"""Snapshots as users make them: on both planes, by the command, periodically, after a crash."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

import momentd
from momentd.errors import InvalidArgument, SnapshotNotFound, TableInUse
from tests.support.real_daemon import RealDaemon

RULE = momentd.rules.SparseAdam()


@pytest.fixture
def daemon(tmp_path):
    with RealDaemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture(params=["local", "grpc"])
def client(daemon, request):
    address = daemon.address if request.param == "local" else f"grpc+{daemon.address}.grpc"
    with momentd.connect(address, run="mine") as client:
        yield client


def train(table, seed, rows=50):
    rng = np.random.default_rng(seed)
    ids = rng.choice(table.rows, rows, replace=False)
    table.update(ids, rng.standard_normal((rows, table.dim)).astype(table.dtype), lr=0.1)


def content(table):
    return [table.gather(np.arange(table.rows), name).tobytes() for name in
            ("exp_avg", "exp_avg_sq")]  # fmt: skip


def command(daemon, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "momentd_server", *arguments, "--address", daemon.address],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_client_makes_restores_and_deletes_snapshots(client):
    table = client.open_table(None, rows=200, dim=4, rule=RULE, label="entities")
    train(table, 1)
    then = content(table)
    made = client.snapshot(table, name="epoch 1")
    assert made.bytes_written > 0
    assert [each.name for each in client.snapshots("mine")] == ["epoch 1"]
    train(table, 2)
    again = client.snapshot(table)
    assert again.tables[0].id != made.tables[0].id
    assert client.snapshot(table) == dataclasses.replace(again, bytes_written=0)
    back = client.restore(made.tables[0])
    assert content(back) == then
    assert (back.step, back.label) == (1, "entities")
    train(back, 3)
    named = client.restore(again.tables[0].id, "named")
    assert content(named) == content(table)
    with pytest.raises(TableInUse):
        client.restore(made.tables[0], "named")
    client.delete_snapshot("epoch 1", again.name)
    assert not client.snapshots()
    with pytest.raises(SnapshotNotFound, match="momentd import"):
        client.restore(made.tables[0])
    with pytest.raises(InvalidArgument):
        client.snapshot(table, name="")


def test_a_run_is_snapshotted_as_a_whole(client):
    tables = [client.open_table(None, rows=100, dim=2, rule=RULE) for _ in range(3)]
    for seed, table in enumerate(tables):
        train(table, seed)
    made = client.snapshot()
    assert made.run == "mine"
    assert [each.table_id for each in made.tables] == [table.id for table in tables]
    for entry, table in zip(made.tables, tables, strict=True):
        assert content(client.restore(entry)) == content(table)


def test_a_snapshot_outlives_kills_of_engine_and_keeper(daemon):
    with momentd.connect(daemon.address, run="mine") as client:
        table = client.open_table(None, rows=300, dim=4, rule=RULE)
        train(table, 1)
        then = content(table)
        made = client.snapshot(table)
        train(table, 2)
        daemon.kill_engine()
        assert client.snapshot(table).tables[0].id != made.tables[0].id
        assert content(client.restore(made.tables[0])) == then
        train(table, 3)
    daemon.crash()
    daemon.start()
    with momentd.connect(daemon.address) as client:
        assert len(client.snapshots("mine")) == 2
        assert content(client.restore(made.tables[0])) == then


def test_the_same_state_has_the_same_id_before_and_after_a_kill(daemon):
    with momentd.connect(daemon.address, run="mine") as client:
        one, two = (client.open_table(None, rows=300, dim=4, rule=RULE) for _ in range(2))
        for seed in range(5):
            train(one, seed)
        first = client.snapshot(one)
        daemon.kill_engine()
        for seed in range(5):
            train(two, seed)
        assert client.snapshot(two).tables[0].id == first.tables[0].id


def test_the_command_line(daemon):
    with momentd.connect(daemon.address, run="mine") as client:
        table = client.open_table(None, rows=100, dim=2, rule=RULE, label="entities")
        train(table, 1)
        then = content(table)
        assert "made first" in command(daemon, "snapshot", "create", "mine", "--name", "first")
        assert "nothing has changed" in command(daemon, "snapshot", "create", "mine")
        train(table, 2)
        for k in range(3):
            train(table, 3 + k)
            command(daemon, "snapshot", "create", "mine", "--name", f"s{k}")
        listed = command(daemon, "snapshot", "list")
        assert "first" in listed
        assert "entities" in listed
        found = json.loads(command(daemon, "snapshot", "list", "--json"))["snapshots"]
        (first_id,) = [t["id"] for s in found if s["name"] == "first" for t in s["tables"]]
        command(daemon, "snapshot", "restore", first_id, "again")
        assert content(client.get_table("again")) == then
        assert "no snapshot named" in command(
            daemon, "snapshot", "delete", "first", "nothing", "--yes", code=1
        )
        pruned = command(daemon, "snapshot", "prune", "--keep", "2", "--dry-run", "--json")
        assert json.loads(pruned)["deleted"] == ["first", "s0"]
        command(daemon, "snapshot", "prune", "--keep", "2", "--yes")
        assert [each.name for each in client.snapshots()] == ["s1", "s2"]
        command(daemon, "snapshot", "delete", "s1", "--yes")
        command(daemon, "snapshot", "restore", "xyz", "t", code=2)


def test_periodic_snapshots_are_made_and_pruned_by_themselves(tmp_path):
    options = ("--snapshot-every", "0.3s", "--snapshots-kept", "2")
    with (
        RealDaemon(tmp_path, *options) as daemon,
        momentd.connect(daemon.address, run="mine") as client,
    ):
        table = client.open_table(None, rows=100, dim=2, rule=RULE)
        train(table, 0)
        client.snapshot(table, name="by hand", pinned=True)
        seen, until_s = set(), time.monotonic() + 30
        while len(seen) < 5 and time.monotonic() < until_s:
            train(table, 1)
            names = {each.name for each in client.snapshots()}
            assert "by hand" in names
            assert len(names) <= 4  # one more while it is being pruned
            seen |= names
            time.sleep(0.05)
        assert len(seen) >= 5


def test_export_and_import_carry_a_snapshot_to_another_directory(tmp_path):
    one_dir, two_dir = tmp_path / "1", tmp_path / "2"
    one_dir.mkdir()
    two_dir.mkdir()
    file, tensors = tmp_path / "moments.momentd", tmp_path / "moments.safetensors"
    with RealDaemon(one_dir) as one:
        with momentd.connect(one.address, run="mine") as client:
            tables = [
                client.open_table(None, rows=300, dim=4, rule=RULE, label=label)
                for label in ("entities", "relations")
            ]
            for seed, table in enumerate(tables):
                train(table, seed)
            then = [content(table) for table in tables]
            made = client.snapshot(name="epoch")
        assert "2 tables" in command(one, "export", "epoch", str(file))
        command(one, "export", "epoch", str(tensors), "--format", "safetensors")
        assert "it is here already" in command(one, "import", str(file))
        assert "no snapshot named" in command(one, "export", "nothing", str(file), code=1)
    with RealDaemon(two_dir) as two:
        told = json.loads(command(two, "import", str(file), "--name", "here", "--json"))
        assert told["tables"] == [table.id for table in made.tables]
        with momentd.connect(two.address) as client:
            (snapshot,) = client.snapshots()
            assert snapshot.pinned
            assert [t.label for t in snapshot.tables] == ["entities", "relations"]
            for entry, wanted in zip(made.tables, then, strict=True):
                back = client.restore(entry.id)
                assert content(back) == wanted
                assert back.step == entry.step
            assert not [t for t in client.list_tables() if t.id not in (back.id, back.id - 1)]
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        client = momentd.connect(two.address)
        client.delete_snapshot("here")
        assert command(two, "import", str(file), code=1)
        assert not client.snapshots()
        client.close()
    header = int.from_bytes(tensors.read_bytes()[:8], "little")
    names = json.loads(tensors.read_bytes()[8 : 8 + header])
    assert {"entities.exp_avg", "relations.exp_avg_sq"} <= set(names)
