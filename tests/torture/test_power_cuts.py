"""The power goes: what was acknowledged as durable is there, whole, and nothing else.

A real ext4 or XFS on a loop device is shut down by the kernel's own ioctl, which writes nothing
that was not synced; then both processes are killed, and the file system is mounted again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import momentd
from momentd.errors import MomentdError, StateRolledBack, StorageFailed
from tests.support.local_engine import AdamModel
from tests.support.real_daemon import RealDaemon

ROWS, DIM = 60_000, 64  # 31 MB of records
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_WITHOUT_FLUSH = 2
_MIB = 1 << 20


@contextmanager
def disk(kind: str, path, mib: int = 400):
    """A file system on a loop device: (mount point, function that cuts the power)."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image, where = path / "image", path / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(mib * _MIB)
    quiet = {"ext4": ["-q", "-F"], "xfs": ["-q", "-f"]}[kind]
    subprocess.run([f"mkfs.{kind}", *quiet, str(image)], check=True, capture_output=True)

    def mount() -> None:
        done = subprocess.run(
            ["mount", "-o", "loop", str(image), str(where)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("cannot mount a loop device (needs root)")

    def cut(kill) -> None:
        fd = os.open(where, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        except OSError as error:
            pytest.skip(f"this {kind} cannot be shut down: {error}")
        finally:
            os.close(fd)
        kill()
        subprocess.run(["umount", str(where)], check=True)
        mount()

    mount()
    try:
        yield where, cut
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)


class Trainer(threading.Thread):
    """Updates a named table; notes what was acknowledged as durable, and when."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._address, self._rng = address, np.random.default_rng(seed)
        self.stop = threading.Event()
        self.done: list[tuple[np.ndarray, np.ndarray]] = []
        self.flushed = 0  # updates that a flush has acknowledged
        self.flushing = 0  # those that one in work may have made durable
        self.snapshots: dict[str, int] = {}  # id: updates
        self.told: MomentdError | None = None

    def run(self) -> None:
        try:
            with momentd.connect(self._address, run="power") as client:
                rule = momentd.rules.SparseAdam()
                table = client.open_table("named", rows=ROWS, dim=DIM, rule=rule)
                while not self.stop.is_set():
                    self._step(client, table)
        except MomentdError as error:
            self.told = error

    def _step(self, client, table) -> None:
        ids = np.unique(self._rng.integers(0, ROWS, 2000))
        grads = self._rng.standard_normal((ids.size, DIM), np.float32)
        self.done.append((ids, grads))
        table.update(ids, grads, lr=0.01)
        if len(self.done) % 25 == 0:
            self.flushing = len(self.done)
            table.flush()
            self.flushed = len(self.done)
        if len(self.done) % 40 == 0:
            made = client.snapshot(table)
            self.snapshots[made.tables[0].id] = len(self.done)

    def model(self, updates: int) -> AdamModel:
        model = AdamModel(ROWS, DIM)
        for ids, grads in self.done[:updates]:
            model.update(ids, grads)
        return model


def equals(table, model: AdamModel) -> bool:
    found = table.gather()
    return np.array_equal(found["exp_avg"], model.exp_avg) and np.array_equal(
        found["exp_avg_sq"], model.exp_avg_sq
    )


def power_cuts(kind: str, path, cuts: int, seed: int) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    counts = {"updates": 0, "snapshots": 0}
    for cut_number in range(cuts):
        where = path / str(cut_number)
        where.mkdir()
        with disk(kind, where) as (mounted, cut):
            # A cache that holds half: there are spills all the time.
            daemon = RealDaemon(mounted, cache="16MiB")
            daemon.start()
            trainer = Trainer(daemon.address, seed + cut_number)
            trainer.start()
            until_s = time.monotonic() + 60
            while len(trainer.snapshots) < 2 and time.monotonic() < until_s:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.6))
            cut(daemon.crash)
            daemon.start()
            trainer.join(70)  # its next call tells it
            trainer.stop.set()
            # It was in the middle of something, and is told that the disk is gone, or that its
            # state went back; never nothing.
            assert isinstance(trainer.told, StateRolledBack | StorageFailed), trainer.told
            with momentd.connect(daemon.address) as client:
                table = client.get_table("named")
                assert table.update_number in {trainer.flushed, trainer.flushing}
                assert equals(table, trainer.model(table.update_number))
                kept = {t.id for s in client.snapshots() for t in s.tables}
                assert kept >= set(trainer.snapshots)
                for snapshot_id, updates in trainer.snapshots.items():
                    assert equals(client.restore(snapshot_id), trainer.model(updates))
            counts["updates"] += len(trainer.done)
            counts["snapshots"] += len(trainer.snapshots)
            daemon.end()
        shutil.rmtree(where)
    return counts


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_leaves_what_was_durable(tmp_path, kind):
    assert power_cuts(kind, tmp_path, 1, seed=3)["snapshots"] >= 2


@pytest.mark.root
@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts(tmp_path, kind):
    """MOMENTD_TORTURE_CUTS of them, default 40."""
    cuts = int(os.environ.get("MOMENTD_TORTURE_CUTS", "40"))
    print(kind, cuts, power_cuts(kind, tmp_path, cuts, int(time.time())))
