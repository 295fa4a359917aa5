"""Eight times more state than the memory of the daemon's cgroup: no OOM kill, and right numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cgroup import MemoryLimit
from benchmarks.harness import Skipped
from tests.support.real_daemon import RealDaemon

MIB = 1 << 20
TRAINER = Path(__file__).with_name("trainer.py")


def soak(
    path: Path, rows: int, batch: int, seconds: float, limit_mib: int = 256
) -> dict[str, object]:
    """Two clients with a table each; what came of it."""
    warm = path / "warm"
    warm.mkdir()
    with RealDaemon(warm):
        pass  # compiles kernels if need be, which takes more memory than serving
    try:
        limit = MemoryLimit(limit_mib * MIB).__enter__()
    except Skipped as reason:
        pytest.skip(str(reason))
    try:
        with RealDaemon(path, cache="32MiB", program=limit.program) as daemon:
            clients = [
                subprocess.Popen(
                    [sys.executable, str(TRAINER), json.dumps(
                        {"kind": "beside_torch", "address": daemon.address, "rows": rows,
                         "batch": batch, "seconds": seconds, "seed": seed})],
                    stdout=subprocess.PIPE, text=True,
                )
                for seed in (1, 2)
            ]  # fmt: skip
            told = [client.communicate(timeout=seconds + 240)[0] for client in clients]
            assert [client.returncode for client in clients] == [0, 0]
            assert daemon.process is not None
            assert daemon.process.poll() is None
            peak_mib = limit.peak_bytes / MIB
        found = [json.loads(text) for text in told]
    finally:
        limit.__exit__(None, None, None)
    for one in found:
        # Without duplicates the moments are torch's bits; weights differ by rounding.
        assert one["weights_differ_by"] < 1e-5
        assert one["rows_that_differ"] == 0
    return {"steps": [one["steps"] for one in found], "peak MiB": round(peak_mib)}


@pytest.mark.root
def test_two_clients_train_twice_the_memory_for_seconds(tmp_path):
    assert min(soak(tmp_path, 250_000, 1500, 8)["steps"]) > 10


@pytest.mark.root
@pytest.mark.torture
@pytest.mark.timeout(0)
def test_two_clients_train_eight_times_the_memory_for_ten_minutes(tmp_path):
    found = soak(tmp_path, 1_000_000, 3000, float(os.environ.get("MOMENTD_TORTURE_S", "600")))
    print(found)
    assert min(found["steps"]) > 100
