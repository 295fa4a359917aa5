"""Trainers and the daemon are killed and stopped, the disk is full at times: no number is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import momentd
from tests.support.disks import small_file_system
from tests.support.real_daemon import RealDaemon
from tests.torture.trainer import update_of

TRAINER = Path(__file__).with_name("trainer.py")
ROWS, DIM, BATCH = 40_000, 64, 1200  # 21 MB of moments for each table
NAMES = ("one", "two", "three")
FREE_MIB = 220


class Model:
    """Both moments after so many of a table's updates."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, 0
        self.exp_avg = np.zeros((ROWS, DIM), np.float32)
        self.exp_avg_sq = np.zeros((ROWS, DIM), np.float32)

    def advance(self, number: int) -> None:
        one, two = np.float32(1 - 0.9), np.float32(1 - 0.999)
        while self.number < number:
            ids, grads = update_of(self.name, self.number, ROWS, DIM, BATCH)
            m, v = self.exp_avg[ids], self.exp_avg_sq[ids]
            self.exp_avg[ids] = m + (grads - m) * one
            self.exp_avg_sq[ids] = v + (grads * grads - v) * two
            self.number += 1


def start_trainer(daemon: RealDaemon, name: str, seconds: float) -> subprocess.Popen[bytes]:
    told = {"kind": "numbered", "address": daemon.address, "name": name, "rows": ROWS, "dim": DIM,
            "batch": BATCH, "seconds": seconds}  # fmt: skip
    return subprocess.Popen([sys.executable, str(TRAINER), json.dumps(told)])


def rage(where: Path, seconds: float, seed: int) -> dict[str, int]:
    """Faults at random for so long; then every record is compared. Returns what was done."""
    rng = random.Random(seed)
    counts = dict.fromkeys(("trainer killed", "daemon killed", "daemon stopped", "disk full"), 0)
    daemon = RealDaemon(where, "--disk-ratio", "1.5", cache="16MiB").start()
    ends = time.monotonic() + seconds
    trainers = {name: start_trainer(daemon, name, seconds + 60) for name in NAMES}
    ballast = where / "ballast"
    try:
        while time.monotonic() < ends:
            time.sleep(rng.uniform(0.5, 3))
            what = rng.choices(list(counts), weights=(4, 1, 2, 3))[0]
            counts[what] += 1
            if what == "trainer killed":
                name = rng.choice(NAMES)
                trainers[name].kill()
                trainers[name].wait()
                trainers[name] = start_trainer(daemon, name, ends - time.monotonic() + 60)
            elif what == "disk full":
                # To the last byte, whatever the daemon takes meanwhile.
                with contextlib.suppress(OSError), ballast.open("wb", 0) as file:
                    while file.write(bytes(1 << 20)):
                        pass
                time.sleep(rng.uniform(0.5, 3))
                ballast.unlink()
            else:
                stopped = what == "daemon stopped"
                code = daemon.end(signal.SIGTERM if stopped else signal.SIGKILL)
                assert code == (0 if stopped else -signal.SIGKILL), daemon.errors
                daemon.start()
        for trainer in trainers.values():
            trainer.kill()
            trainer.wait()
        with momentd.connect(daemon.address) as client:
            compacted = client.stats().totals.segments_compacted
            counts["updates"] = sum(compare(client, name) for name in NAMES)
        # What was acknowledged to an orderly stop is there afterwards.
        assert daemon.end() == 0, daemon.errors
        daemon.start()
        with momentd.connect(daemon.address) as client:
            again = sum(compare(client, name) for name in NAMES)
        assert again == counts["updates"]
    finally:
        for trainer in trainers.values():
            trainer.kill()
            trainer.wait()
        daemon.end(signal.SIGKILL)
    return {**counts, "compacted since the last start": compacted}


def compare(client: momentd.Client, name: str) -> int:
    """Every record of a table with the model's; returns how many updates it has had."""
    table = client.open_table(name, rows=ROWS, dim=DIM, rule=momentd.rules.SparseAdam())
    model = Model(name)
    model.advance(table.update_number)
    found = table.gather()
    np.testing.assert_array_equal(found["exp_avg"], model.exp_avg)
    np.testing.assert_array_equal(found["exp_avg_sq"], model.exp_avg_sq)
    return table.update_number


@pytest.mark.root
@pytest.mark.parametrize("seed", [1])
def test_faults_for_seconds(tmp_path, seed):
    with small_file_system(tmp_path / "disk", FREE_MIB) as where:
        assert rage(where, 12, seed)["updates"] > 50


@pytest.mark.root
@pytest.mark.torture
@pytest.mark.timeout(0)
def test_faults_for_minutes(tmp_path):
    with small_file_system(tmp_path / "disk", FREE_MIB) as where:
        found = rage(where, float(os.environ.get("MOMENTD_TORTURE_S", "300")), int(time.time()))
    print(found)
