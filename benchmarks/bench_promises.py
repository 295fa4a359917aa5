"""What surviving costs: the journal of a hot update, snapshots beside training, and restoring."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import momentd
from momentd_server import jit
from momentd_server.config import ServeConfig
from momentd_server.engine.api import TableBatch, TableView
from momentd_server.engine.arenas import ArenaBudget
from momentd_server.engine.engine import LocalEngine
from momentd_server.engine.sessions import Outcome
from momentd_server.rules import SparseAdamHyper, get
from momentd_server.schema import Schema
from momentd_server.storage import files
from momentd_server.storage.diskio import aligned_buffer
from momentd_wire import addresses

from .harness import MIB, Result, Row, Settings, daemon, settle

ROWS, DIM, BATCH = 1_000_000, 128, 10_000
UPDATES = 400
SNAPSHOT_ROWS = 2_600_000
JOURNAL_GOAL, DELAY_GOAL_S, WRITE_GOAL, RESTORE_GOAL_S = 0.05, 0.05, 0.70, 2.0


def run(settings: Settings) -> Result:
    """Needs momentd; about two minutes and 6 GB of disk."""
    settings.need_daemon()
    result = Result("promises")
    without, cost = _journal(settings)
    rows = _snapshots(settings)
    step = rows[-1].numbers["usual_ms"]
    share = cost / step
    numbers = {"update_ms": without, "step_ms": step, "cost_ms": cost, "share": share}
    goal = f"share <= {JOURNAL_GOAL}"
    result.rows = [Row("journal of a hot step", numbers, goal, share <= JOURNAL_GOAL), *rows]
    result.notes.append(
        "journal: alternating updates of one engine in this process, journalled and not, over "
        f"{BATCH:,} random rows of {ROWS:,} x {DIM}; its share is that of a client's step. Steps "
        "beside a snapshot: `table.update` of one session while another one makes the snapshot; "
        "their own records are written first, at the disk's speed."
    )
    return result


# ---------------------------------------------------------------------------------- the journal


def _journal(settings: Settings) -> tuple[float, float]:
    """Milliseconds of an update in the engine without a journal, and what one adds."""
    rows, count = settings.rows(ROWS), max(16, settings.rows(BATCH))
    with tempfile.TemporaryDirectory(dir=settings.work_dir) as path:
        config = ServeConfig(
            data_dir=Path(path), cache_bytes=max(64 * MIB, int(rows * DIM * 8 * 1.2)),
            address=addresses.parse(f"unix:{path}/s"),
        )  # fmt: skip
        engine = LocalEngine.start(config, jit.warm_up)
        try:
            plain, journalled = _paired(engine, rows, count)
        finally:
            engine.stop(discard=True)
            engine.close()
    cost = statistics.median(j - p for p, j in zip(plain, journalled, strict=True))
    return 1e3 * statistics.median(plain), 1e3 * cost


def _paired(engine: LocalEngine, rows: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of updates without and with a journal, in turn."""
    session = engine.sessions.open(plane="local", pid=0, uid=0, run="benchmark", program="")
    schema = Schema(rows, DIM, get("sparse_adam").field_specs(DIM, "float32"), "sparse_adam")
    table, _ = engine.open_table(
        session, name=None, label="", schema=schema, run="benchmark", mode="create"
    )
    for start in range(0, rows, count):
        ids = np.arange(start, min(start + count, rows))
        engine.update([_batch(table, ids, np.ones((ids.size, DIM), np.float32))])
    budget = ArenaBudget(session_bytes=1 << 32, total_bytes=1 << 32)
    arena = budget.make(session, 4 * count * DIM * 4)
    grads = np.ndarray((count, DIM), np.float32, arena.memory)
    # As on the local plane: all results have their place in the arena.
    results = np.ndarray((count, DIM), np.float32, arena.memory, 2 * grads.nbytes)
    out_rows = np.ndarray(count, np.int64, arena.memory, 3 * grads.nbytes)
    grads[:] = 1.0
    random = np.random.default_rng(0)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(1, UPDATES + 1):
        for journalled in (number % 2, 1 - number % 2):
            ids = random.choice(rows, count, replace=False)
            update = replace(_batch(table, ids, grads), out_values=results, out_rows=out_rows)
            began = time.perf_counter()
            if journalled:

                def call(ticket: object, update: TableBatch = update) -> Outcome:
                    engine.update([update], None, ticket, lambda _: b"reply")  # type: ignore[arg-type]
                    return Outcome(b"reply")

                session.once(1, number, bytes(16), call)
            else:
                engine.update([update])
            seconds[journalled].append(time.perf_counter() - began)
    return seconds


def _batch(table: TableView, ids: np.ndarray, grads: np.ndarray) -> TableBatch:
    return TableBatch(
        id=table.id, generation=table.generation, step=None, expected_update_number=None,
        hyper=SparseAdamHyper(0.01), result="delta", rows=ids, grads=grads,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- snapshots


def _snapshots(settings: Settings) -> list[Row]:
    rows, count = settings.rows(SNAPSHOT_ROWS), max(16, settings.rows(BATCH))
    state_bytes = rows * DIM * 8
    rule = momentd.rules.SparseAdam()
    with (
        daemon(settings, int(state_bytes * 1.2) + 128 * MIB) as own,
        momentd.connect(own.address if own else None, run="benchmark") as client,
    ):
        table = client.open_table(None, rows=rows, dim=DIM, rule=rule)
        for start in range(0, rows, count):
            ids = np.arange(start, min(start + count, rows))
            table.update(ids, np.ones((ids.size, DIM), np.float32), lr=0.01)
        settle(own)
        began = time.perf_counter()
        made = client.snapshot(table)
        took = time.perf_counter() - began
        disk = _sequential_bytes_per_s(settings.work_dir)
        write = Row(
            "snapshot of an idle daemon, all records",
            {"GB": made.bytes_written / 1e9, "s": took, "MB/s": made.bytes_written / took / 1e6,
             "of the disk": made.bytes_written / took / disk},
            f"of the disk >= {WRITE_GOAL}", made.bytes_written / took / disk >= WRITE_GOAL,
        )  # fmt: skip
        began = time.perf_counter()
        restored = client.restore(made.tables[0])
        took = time.perf_counter() - began
        restore = Row(
            "restore", {"GB": state_bytes / 1e9, "s": took, "M records/s": rows / took / 1e6},
            f"s <= {RESTORE_GOAL_S:g}", took <= RESTORE_GOAL_S,
        )  # fmt: skip
        client.drop(restored)
        with momentd.connect(own.address if own else None) as other:
            return [write, restore, _steps_beside(other, table, rows, count, disk)]


def _steps_beside(
    other: momentd.Client, table: momentd.Table, rows: int, count: int, disk: float
) -> Row:
    """Steps while all records are changed and a snapshot is written."""
    for start in range(0, rows, count):
        ids = np.arange(start, min(start + count, rows))
        table.update(ids, np.ones((ids.size, DIM), np.float32), lr=0.01)
    random = np.random.default_rng(1)
    grads = np.ones((count, DIM), np.float32)

    def step() -> float:
        ids = random.choice(rows, count, replace=False)
        began = time.perf_counter()
        table.update(ids, grads, lr=0.01)
        return time.perf_counter() - began

    usual = statistics.median(step() for _ in range(100))
    beside: list[float] = []
    writing = threading.Thread(target=other.snapshot, args=(table,))
    writing.start()
    while writing.is_alive():
        beside.append(step())
    writing.join()
    ordered = sorted(beside)
    allowed = DELAY_GOAL_S + count * (DIM * 8 + 24) / disk
    delay = ordered[-1] - usual
    numbers = {
        "steps": len(beside),
        "usual_ms": usual * 1e3,
        "median_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1e3,
        "longest delay_ms": delay * 1e3,
        "allowed_ms": allowed * 1e3,
    }
    return Row("steps while a snapshot is written", numbers, "delay <= allowed", delay <= allowed)


def _sequential_bytes_per_s(where: Path, nbytes: int = 1 << 30) -> float:
    """What the disk takes in large direct writes, synced at the end."""

    path = where / "sequential"
    block = aligned_buffer(8 * MIB)
    block[:] = 7
    fd = files.open_direct(path, os.O_CREAT | os.O_RDWR)
    try:
        files.reserve(fd, 0, nbytes)
        began = time.perf_counter()
        for at in range(0, nbytes, block.size):
            files.write_all(fd, block, at)
        os.fdatasync(fd)
        return nbytes / (time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
