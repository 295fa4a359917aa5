"""Keeper and engine: what dies, what lives on, and that training does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import momentd
from momentd.errors import StateRolledBack
from tests.support.real_daemon import RealDaemon

ROWS, WIDTH = 5000, 16


@pytest.fixture
def daemon(tmp_path):
    with RealDaemon(tmp_path) as daemon:
        yield daemon


@contextmanager
def killing(daemon, training):
    """The engine dies again and again, some steps after it began to serve; yields the pids."""
    stop, killed = threading.Event(), []

    def kill() -> None:
        random = np.random.default_rng(0)
        while not stop.is_set():
            wanted = training.steps + int(random.integers(3, 30))
            while training.steps < wanted and not stop.wait(0.001):
                pass
            stop.wait(random.uniform(0, 0.01))  # somewhere in a step
            killed.append(daemon.kill_engine())

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


class Training:
    """Two embeddings of one optimizer, the same batches for the same seed."""

    def __init__(self, address: str, seed: int = 0) -> None:
        self.steps = 0
        self._random = torch.Generator().manual_seed(seed)
        self.tables = [
            torch.nn.Embedding(ROWS, WIDTH, sparse=True, _weight=self._normal(ROWS))
            for _ in range(2)
        ]
        parameters = [table.weight for table in self.tables]
        self.optimizer = momentd.SparseAdam(parameters, lr=0.01, address=address)

    def _normal(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=self._random)

    def step(self) -> None:
        self.steps += 1
        for table in self.tables:
            ids = torch.randint(0, ROWS, (300,), generator=self._random)
            table.weight.grad = torch.sparse_coo_tensor(
                ids[None], self._normal(300), (ROWS, WIDTH), check_invariants=False
            )
        self.optimizer.step()

    def bits(self) -> list[torch.Tensor]:
        state = self.optimizer.full_state_dict()["state"]
        moments = [state[k][name] for k in (0, 1) for name in ("exp_avg", "exp_avg_sq")]
        return [table.weight.detach() for table in self.tables] + moments


def undisturbed(path: Path, steps: int, seed: int = 0) -> list[torch.Tensor]:
    with RealDaemon(path) as daemon:
        training = Training(daemon.address, seed)
        for _ in range(steps):
            training.step()
        return training.bits()


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("plane", ["local", "grpc"])
def test_training_goes_on_bit_for_bit_while_engines_die(daemon, tmp_path, plane):
    address = daemon.address if plane == "local" else f"grpc+{daemon.address}.grpc"
    training = Training(address)
    with killing(daemon, training) as killed:
        while len(killed) < 4:
            training.step()
    other = tmp_path / "other"
    other.mkdir()
    assert equal(training.bits(), undisturbed(other, training.steps))


def test_a_trainer_that_is_silent_meanwhile_notices_nothing(daemon, tmp_path):
    training = Training(daemon.address)
    training.step()
    first = daemon.kill_engine()
    time.sleep(3)  # no call of momentd
    assert daemon.engine_pid != first
    training.step()
    other = tmp_path / "other"
    other.mkdir()
    assert equal(training.bits(), undisturbed(other, 2))


def test_two_trainers_and_a_named_table_live_on(daemon):
    trainings = [Training(daemon.address, seed) for seed in (1, 2)]
    with momentd.connect(daemon.address) as client:
        table = client.open_table("named", rows=10, dim=2, rule=momentd.rules.SparseAdam())
        table.update([1], np.ones((1, 2), np.float32), lr=0.1)
        for training in trainings:
            training.step()
        daemon.kill_engine()
        for training in trainings:
            training.step()
        assert table.update([1], np.ones((1, 2), np.float32), lr=0.1) is not None
        assert table.refresh().update_number == 2
        assert client.stats().totals.engine_restarts == 1


def test_the_keeper_alone_dies_and_the_engine_stops_in_order(daemon):
    training = Training(daemon.address)
    training.step()
    engine = daemon.engine_pid
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.process.wait(timeout=30)
    until_s = time.monotonic() + 30
    while Path(f"/proc/{engine}").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{engine}").exists()
    daemon.process.communicate()
    daemon.start()
    training.step()
    table = training.optimizer.state[training.tables[0].weight]
    assert int(table["step"]) == 2


def test_after_a_crash_of_both_a_client_is_told_and_a_named_table_is_as_it_was_flushed(daemon):
    training = Training(daemon.address)
    training.step()
    with momentd.connect(daemon.address) as client:
        table = client.open_table("named", rows=10, dim=2, rule=momentd.rules.SparseAdam())
        table.update([1], np.ones((1, 2), np.float32), lr=0.1)
        table.flush()
        flushed = table.gather([1], "exp_avg")
        table.update([1], np.ones((1, 2), np.float32), lr=0.1)
        daemon.crash()
        daemon.start()
        with pytest.raises(StateRolledBack):
            table.update([1], np.ones((1, 2), np.float32), lr=0.1)
    with pytest.raises(StateRolledBack):
        training.step()
    with momentd.connect(daemon.address) as client:
        table = client.get_table("named")
        assert table.update_number == 1
        assert np.array_equal(table.gather([1], "exp_avg"), flushed)


def test_a_flush_is_not_repeated_of_a_state_that_is_lost(daemon):
    with momentd.connect(daemon.address) as client:
        table = client.open_table("named", rows=10, dim=2, rule=momentd.rules.SparseAdam())
        table.update([1], np.ones((1, 2), np.float32), lr=0.1)
        os.kill(daemon.engine_pid, signal.SIGSTOP)  # so that it is in work when both die
        outcome: list[object] = []

        def flush() -> None:
            try:
                outcome.append(table.flush())
            except StateRolledBack as error:
                outcome.append(error)

        thread = threading.Thread(target=flush)
        thread.start()
        time.sleep(0.5)
        daemon.crash()
        daemon.start()
        thread.join(30)
        assert len(outcome) == 1
        assert isinstance(outcome[0], StateRolledBack)


def test_a_signal_while_there_is_no_engine_saves_everything_all_the_same(daemon):
    training = Training(daemon.address)
    training.step()
    daemon.kill_engine()
    assert daemon.end() == 0
    daemon.start()
    training.step()
    assert int(training.optimizer.state[training.tables[0].weight]["step"]) == 2


def test_a_trainer_that_dies_with_the_engine_takes_its_tables_along(daemon):
    script = (
        "import sys, time, torch, momentd\n"
        "from tests.integration.test_keeper import Training\n"
        "t = Training(sys.argv[1]); t.step(); print('ready', flush=True); time.sleep(100)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, daemon.address], text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    os.kill(daemon.pid, signal.SIGSTOP)
    daemon.kill_engine()
    child.kill()
    child.communicate()
    os.kill(daemon.pid, signal.SIGCONT)
    with momentd.connect(daemon.address) as client:
        until_s = time.monotonic() + 20
        while client.list_tables() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not client.list_tables()


OTHER_CODE = """
import sys
import momentd_server.keeper.keeper as keeper
keeper.code_version = lambda: 1
from momentd_server.cli import main
main()
"""


def test_memory_is_not_handed_to_other_code(tmp_path):
    daemon = RealDaemon(tmp_path, program=("-c", OTHER_CODE))
    with pytest.raises(AssertionError, match="before upgrading"):
        daemon.start()
