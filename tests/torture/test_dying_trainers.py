"""Trainers die in the middle of an update, their forked workers live on: nothing is left."""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

import momentd
from tests.support.real_daemon import RealDaemon

RULE = momentd.rules.SparseAdam()


def trainer(address: str, told: int, seed: int) -> None:
    """In a forked child: updates until it is killed; a worker of its own sleeps on."""
    rng = np.random.default_rng(seed)
    client = momentd.connect(address, run="dying")
    tables = [client.open_table(None, rows=5000, dim=16, rule=RULE) for _ in range(2)]
    tables[0].update([1], np.ones((1, 16), np.float32), lr=0.1)
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    os.write(told, struct.pack("i", worker))
    while True:
        ids = np.unique(rng.integers(0, 5000, 2000))
        for table in tables:
            table.update(ids, np.ones((ids.size, 16), np.float32), lr=0.1)


def entries(directory: str) -> int:
    return sum(1 for _ in Path(directory).iterdir())


class Watch:
    """What a daemon has open."""

    def __init__(self, daemon: RealDaemon, client: momentd.Client) -> None:
        self._keeper, self._engine = daemon.pid, daemon.engine_pid
        self._client = client

    def now(self) -> dict[str, int]:
        totals = self._client.stats()
        return {
            "descriptors of the keeper": entries(f"/proc/{self._keeper}/fd"),
            "descriptors of the engine": entries(f"/proc/{self._engine}/fd"),
            "threads": entries(f"/proc/{self._engine}/task"),
            "sessions": len(totals.sessions),
            "tables": len(totals.tables),
            "arena bytes": totals.totals.arena_bytes,
        }

    def settled(self, wanted: dict[str, int]) -> dict[str, int]:
        """What there is once it is no more than `wanted`, or after ten seconds."""
        until_s = time.monotonic() + 10
        while True:
            now = self.now()
            if time.monotonic() > until_s or all(now[key] <= wanted[key] for key in now):
                return now
            time.sleep(0.02)


def die(daemon: RealDaemon, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers: list[int] = []
    with momentd.connect(daemon.address, run="bystander") as client:
        table = client.open_table(None, rows=100, dim=4, rule=RULE)
        table.update([0], np.ones((1, 4), np.float32), lr=0.1)  # it has its arena
        watch = Watch(daemon, client)
        base = None
        try:
            for number in range(count):
                hearing, telling = os.pipe()
                pid = os.fork()
                if pid == 0:
                    try:
                        trainer(daemon.address, telling, number)
                    finally:
                        os._exit(1)
                os.close(telling)
                workers.append(struct.unpack("i", os.read(hearing, 4))[0])
                os.close(hearing)
                time.sleep(rng.uniform(0, 0.03))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                # The first one shows what a daemon keeps of any client, e.g. a descriptor cache.
                found = watch.settled(base or watch.now() | {"sessions": 1, "tables": 1})
                base = base or found
                left = {k: (base[k], n) for k, n in found.items() if n > base[k]}
                assert not left, left
                assert found["sessions"] == found["tables"] == 1
                table.update([number % 100], np.ones((1, 4), np.float32), lr=0.1)
                while len(workers) > 20:
                    os.kill(workers.pop(0), signal.SIGKILL)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
        assert table.refresh().update_number == count + 1


@pytest.fixture
def daemon(tmp_path: Path):
    with RealDaemon(tmp_path) as daemon:
        yield daemon


def test_nothing_is_left_of_trainers_that_die(daemon):
    die(daemon, 20, seed=0)


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_nothing_is_left_of_many_trainers_that_die(daemon):
    """MOMENTD_TORTURE_TRAINERS of them, default 500."""
    count = int(os.environ.get("MOMENTD_TORTURE_TRAINERS", "500"))
    die(daemon, count, seed=int(time.time()))
    print(f"{count} trainers killed")
