"""R92: server memory grows with calls. Both planes, many calls, connections that come and go."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.planes import GrpcClient, LocalClient, schema

ROOT = Path(__file__).parents[2]


@pytest.fixture
def daemon(tmp_path):
    paths = [ROOT, ROOT / "client", ROOT / "server", ROOT / "protos"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.numpy_daemon", str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        yield process
        process.terminate()


def anonymous_mib(process):
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


@pytest.mark.slow
def test_thousands_of_calls_leave_the_daemon_as_large_as_hundreds(daemon, tmp_path):
    rows, grads = np.arange(2_000), np.ones((2_000, 128), np.float32)
    numbers = iter(range(2, 10**6))
    with (
        LocalClient(tmp_path / "m.sock", arena_bytes=8 << 20) as local,
        GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as remote,
    ):
        here = local.open_table(schema=schema(2_000, 128))
        there = remote.open_table(schema=schema(2_000, 128))
        part = local.table_update(here, rows[:20], grads[:20])

        def work(calls):
            for _ in range(calls):
                number = next(numbers)
                for _ in range(9):
                    local.update(number, part)
                remote.update(number, remote.table_update(there, rows, grads))
                with LocalClient(tmp_path / "m.sock", arena_bytes=1) as passing:
                    passing.memory.close()

        work(60)
        before = anonymous_mib(daemon)
        work(240)
        assert anonymous_mib(daemon) - before < 15
