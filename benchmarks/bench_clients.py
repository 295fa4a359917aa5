"""1, 2, 4, 8 training processes on one daemon, all rows in the cache: total rate and fairness."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from examples.own_daemon import OwnDaemon

from .harness import MIB, Result, Row, Settings, daemon
from .machine import REPOSITORY
from .workload import Shape

CLIENTS = (1, 2, 4, 8)
SECONDS = 6.0
ROWS = 250_000
BATCH = 10_000
JUDGED_CLIENTS = 4


def run(settings: Settings) -> Result:
    """Every client has a table of its own and makes its own gradients; needs momentd."""
    settings.need_daemon()
    result = Result("clients")
    batch = settings.rows(BATCH)
    shape = Shape(settings.rows(ROWS), 128, batch, batch)
    single = 0.0
    for clients in CLIENTS:
        settings.console.print(f"{clients} clients ...")
        cache = int(clients * shape.state_bytes * 1.2) + 128 * MIB
        with daemon(settings, cache) as own:
            assert own is not None
            found = train(own, shape, clients)
        # All begin together; each counts what it did in the same seconds.
        total = sum(one["rows"] / one["seconds"] for one in found)
        single = single or total
        result.rows.append(_row(clients, found, total, total / single))
    result.notes.append(
        f"{shape.rows:,} x {shape.dim} and {batch:,} rows a step for each client, {SECONDS:g} s; "
        "rows/s of whole loops, the making of gradients included. slowest / fastest: of the "
        "clients' medians."
    )
    return result


def train(own: OwnDaemon, shape: Shape, clients: int) -> list[dict[str, Any]]:
    """What each client says at its end."""
    processes = [_start(own, shape, number) for number in range(clients)]
    try:
        for process in processes:
            _line(process)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(_line(process)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(own: OwnDaemon, shape: Shape, number: int) -> subprocess.Popen[str]:
    told = {"address": own.address, "rows": shape.rows, "dim": shape.dim,
            "distinct": shape.distinct, "seconds": SECONDS, "number": number}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client", json.dumps(told)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a client ended early, exit code {process.wait()}; see its error above")
    return line


def _row(clients: int, found: list[dict[str, Any]], total: float, ratio: float) -> Row:
    medians = [statistics.median(one["step_ms"]) for one in found]
    numbers = {
        "rows/s": total,
        "of one client's": ratio,
        "median_ms": statistics.median(medians),
        "slowest / fastest": max(medians) / min(medians),
        "p99_ms": max(sorted(one["step_ms"])[len(one["step_ms"]) * 99 // 100] for one in found),
    }
    if clients != JUDGED_CLIENTS:
        return Row(f"{clients} clients", numbers)
    return Row(f"{clients} clients", numbers, "of one client's >= 1", ratio >= 1)
