"""The whole daemon: command line, real store, both planes, spilling, an orderly restart."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from momentd_server.engine.engine import LocalEngine
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.planes import GrpcClient, LocalClient, make_config, schema, serving

WIDTH = 64
ROWS = 60_000  # 30 MB of records, in a cache of 16 MiB


def batches(count, rows=2_000):
    rng = np.random.default_rng(0)
    for _ in range(count):
        grads = rng.standard_normal((rows, WIDTH)).astype(np.float32)
        yield rng.integers(0, ROWS, rows), grads


def test_both_planes_give_the_same_bytes_while_rows_are_spilled_and_read_back(tmp_path):
    config = make_config(tmp_path, cache_bytes=16 << 20, threads=2, read_threads=8)
    engine = LocalEngine.start(config)
    with (
        serving(config, engine),
        LocalClient(tmp_path / "m.sock", arena_bytes=32 << 20) as local,
        GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as remote,
    ):
        here = local.open_table(schema=schema(ROWS, WIDTH))
        there = remote.open_table(schema=schema(ROWS, WIDTH))
        for number, (rows, grads) in enumerate(batches(30), start=2):
            part = local.table_update(here, rows, grads)
            reply = local.update(number, part)
            _, [(rows_there, values_there)] = remote.update(
                number, remote.table_update(there, rows, grads)
            )
            rows_here, values_here = local.results(part, reply.tables[0], WIDTH)
            assert rows_here.tobytes() == rows_there.tobytes()
            assert values_here.tobytes() == values_there.tobytes()
        wanted = np.random.default_rng(1).integers(0, ROWS, 3_000)
        for mine, theirs in zip(
            local.gather(here, wanted), remote.gather(there, wanted), strict=True
        ):
            assert mine.tobytes() == theirs.tobytes()
        stats = local.call(stats=pb.StatsRequest()).stats
        assert all(table.misses > 0 for table in stats.tables)
        assert stats.totals.cache_used_bytes <= stats.totals.cache_bytes
    engine.close()


def test_a_client_that_changes_its_row_ids_all_the_time_only_harms_itself(tmp_path):
    engine = LocalEngine.start(make_config(tmp_path, cache_bytes=16 << 20, threads=2))
    stop = threading.Event()
    with (
        serving(make_config(tmp_path, cache_bytes=16 << 20), engine),
        LocalClient(tmp_path / "m.sock", arena_bytes=8 << 20) as client,
        LocalClient(tmp_path / "m.sock", arena_bytes=8 << 20) as neighbour,
    ):
        table = client.open_table(schema=schema(4_000, 8))
        other = neighbour.open_table(schema=schema(4_000, 8))
        neighbour.update(2, neighbour.table_update(other, np.arange(50), ones(50)))
        before = [v.tobytes() for v in neighbour.gather(other, np.arange(4_000))]
        part = client.table_update(table, np.arange(1_000), ones(1_000))
        ids = client.array(part.row_ids.arena, np.int64, (1_000,))

        def flip():
            rng = np.random.default_rng(0)
            while not stop.is_set():
                ids[rng.integers(1_000)] = rng.choice([-1, 1 << 62, 4_000, 7, 2_000])
                ids[rng.integers(1_000)] = 5

        thread = threading.Thread(target=flip)
        thread.start()
        refused = 0
        for number in range(2, 302):
            try:
                client.update(number, part)
            except errors.RowOutOfRange:
                refused += 1
                ids[:] = np.arange(1_000)
        stop.set()
        thread.join()
        assert 0 < refused
        # Rows that were never named by anybody are as they were.
        untouched = np.setdiff1d(np.arange(1_000, 4_000), [2_000])
        assert not any(v.any() for v in client.gather(table, untouched))
        assert [v.tobytes() for v in neighbour.gather(other, np.arange(4_000))] == before
    engine.close()


def ones(count):
    return np.ones((count, 8), np.float32)


class Serve:
    """`python -m momentd_server serve`, in its own process."""

    def __init__(self, directory, environment):
        command = [
            sys.executable, "-m", "momentd_server", "serve", "--data-dir", f"{directory}/data",
            "--cache", "16MiB", "--address", f"unix:{directory}/m.sock", "--json",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip

    def __enter__(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=20)[1]
        assert json.loads(line)["event"] == "serving"
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        _, told = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, told


@pytest.mark.timeout(180)
def test_an_orderly_restart_serves_the_same_bytes_to_the_same_session(tmp_path, source_environment):
    wanted = np.arange(ROWS)[::7]
    with Serve(tmp_path, source_environment):
        client = LocalClient(tmp_path / "m.sock", arena_bytes=32 << 20)
        named = client.open_table(1, name="kept", schema=schema(ROWS, WIDTH))
        own = client.open_table(2, schema=schema(ROWS, WIDTH))
        for number, (rows, grads) in enumerate(batches(20), start=3):
            parts = [
                client.table_update(named, rows, grads),
                client.table_update(own, rows, -grads, keep=True),
            ]
            last = client.update(number, *parts)
        before = [v.tobytes() for table in (named, own) for v in client.gather(table, wanted)]
    with Serve(tmp_path, source_environment):
        with LocalClient(
            tmp_path / "m.sock", arena_bytes=32 << 20, resume_session=client.hello.session
        ) as again:
            assert again.hello.resumed
            assert again.update(22, *parts).tables == last.tables
            infos = [
                again.call(get_table=pb.GetTableRequest(id=t.table.id)).get_table.table
                for t in (named, own)
            ]
            assert [i.step for i in infos] == [20, 20]
            after = [v.tobytes() for info in infos for v in again.gather(info, wanted)]
            assert after == before
        client.close()
