"""What daemon and trainer hold in memory, seen from outside, against what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from examples.own_daemon import OwnDaemon

from .harness import MIB, Result, Row, Settings, daemon, open_optimizer, stats
from .machine import REPOSITORY, process_memory
from .workload import Gradients, Shape, fill_state, make_parameter, timed_steps

CACHE_BYTES = 512 * MIB
ROW_BYTES = 12
ANONYMOUS_LIMIT_BYTES = 250 * MIB
TRAINER_LIMIT_BYTES = 30_000_000
BATCH_FACTOR = 4
STEPS = 100
POLL_S = 0.02


def run(settings: Settings) -> Result:
    """A table four times as large as the cache; needs momentd on our side."""
    result = Result("memory")
    shape = Shape(settings.rows(2_000_000), 128, 10_000, 10_000)
    with daemon(settings, CACHE_BYTES) as own:
        if own is None:
            raise ValueError("this benchmark measures the daemon: it cannot run with side=torch")
        parameter = make_parameter(shape)
        with Peak(own.pid) as peak, open_optimizer(parameter, own) as optimizer:
            fill_state(parameter, optimizer)
            timed_steps(parameter, optimizer, Gradients(shape), STEPS)
            space = space_bytes(own.pid)
        result.rows += _daemon_rows(shape, space, peak.anonymous_bytes, own)
        result.rows.append(_trainer_row(shape, own))
    return result


class Peak:
    """Watches the anonymous memory of a process in a thread of its own."""

    def __init__(self, pid: int) -> None:
        self.anonymous_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            now = process_memory(self._pid)["anonymous"]
            self.anonymous_bytes = max(self.anonymous_bytes, now)
            if self._ended.wait(POLL_S):
                return


def space_bytes(pid: int) -> int:
    """Allocated bytes (st_blocks) of the space of a daemon, asked of the kernel."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:momentd-space"):
                return entry.stat().st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    raise RuntimeError(f"process {pid} holds no memfd called space")


def _daemon_rows(shape: Shape, space: int, anonymous: int, own: OwnDaemon) -> list[Row]:
    limit = CACHE_BYTES + ROW_BYTES * shape.rows
    totals = stats(own).totals
    return [
        Row(
            "blocks of the space, MB",
            {"measured": space / 1e6, "limit": limit / 1e6},
            "<= cache + 12 bytes a row",
            space <= limit,
        ),
        Row(
            "anonymous memory of the daemon at its peak, MB",
            {"measured": anonymous / 1e6, "limit": ANONYMOUS_LIMIT_BYTES / 1e6},
            "<= 250 MB",
            anonymous <= ANONYMOUS_LIMIT_BYTES,
        ),
        Row("arenas, MB", {"measured": totals.arena_bytes / 1e6}),
        Row("page cache of the segments, MB", {"measured": totals.page_cache_bytes / 1e6}),
    ]


def _trainer_row(shape: Shape, own: OwnDaemon) -> Row:
    """A trainer in a process of its own; see trainer.py."""
    arguments = {"address": own.address, "rows": shape.rows, "dim": shape.dim,
                 "distinct": shape.distinct, "steps": STEPS}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainer", json.dumps(arguments)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the trainer failed:\n{done.stderr}")
    above = json.loads(done.stdout)["above_model_bytes"]
    limit = BATCH_FACTOR * shape.grad_bytes + TRAINER_LIMIT_BYTES
    return Row(
        "trainer above its model, arena included, MB",
        {"measured": above / 1e6, "limit": limit / 1e6},
        "<= 4 x batch + 30 MB",
        above <= limit,
    )
