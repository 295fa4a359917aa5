"""Updates over gRPC beside a raw gRPC echo in Python that moves the same bytes."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np

import momentd
from momentd_wire import limits
from momentd_wire.addresses import GRPC_SUFFIX

from .echo import METHOD, OPTIONS
from .harness import MIB, Result, Row, Settings, daemon
from .machine import REPOSITORY

CALLS = 10
BATCHES = (1_000, 10_000, 50_000)
JUDGED_BATCH = 10_000
DIM = 128
ID_BYTES = 8
GOAL = 0.7


def run(settings: Settings) -> Result:
    """Unix sockets on both sides, the server in a process of its own; needs momentd."""
    rows = settings.rows(1_000_000)
    settings.need_daemon()
    result = Result("grpc")
    with daemon(settings, int(rows * DIM * 8 * 1.2) + 128 * MIB) as own, echo() as channel:
        assert own is not None
        address = f"grpc+{own.address}{GRPC_SUFFIX}"
        with momentd.connect(address) as client:
            table = client.open_table("grpc", rows=rows, dim=DIM, rule=momentd.rules.SparseAdam())
            for ids in np.array_split(np.arange(rows), -(-rows // 20_000)):
                table.update(ids, np.ones((len(ids), DIM), np.float32), lr=1e-3)
            for batch in BATCHES:
                batch_rows = min(settings.rows(batch), rows)
                result.rows.append(_compare(table, channel, batch, batch_rows, settings.repeats))
    result.notes.append(
        f"MB/s: ids and gradients there, ids and deltas back, in messages of "
        f"{limits.PIECE_BYTES >> 20} MiB; blocks of {CALLS} calls in turns, medians of all calls. "
        "The echo parses and computes nothing."
    )
    return result


@contextmanager
def echo() -> Generator[grpc.Channel]:
    """A channel to an echo server in a process of its own."""
    with TemporaryDirectory(prefix="momentd-echo-") as folder:
        target = f"unix:{Path(folder) / 'sock'}"
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.echo", target],
            stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise RuntimeError(f"the echo server ended, exit code {server.wait()}")
            with grpc.insecure_channel(target, OPTIONS) as channel:
                yield channel
        finally:
            # Its standard input's end is what ends it.
            server.communicate()


def _compare(
    table: momentd.Table, channel: grpc.Channel, batch: int, rows: int, repeats: int
) -> Row:
    random = np.random.default_rng(0)
    grads = random.standard_normal((rows, DIM), np.float32)
    call = channel.stream_stream(METHOD)
    one_way = rows * (ID_BYTES + DIM * 4)
    whole, rest = divmod(one_way, limits.PIECE_BYTES)
    messages = [bytes(limits.PIECE_BYTES)] * whole + [bytes(rest)] * bool(rest)

    # Drawn beforehand: to choose distinct rows takes longer than to update them.
    ids = itertools.cycle([random.choice(table.rows, rows, replace=False) for _ in range(5)])

    def ours() -> None:
        table.update(next(ids), grads, lr=1e-3)

    def theirs() -> None:
        if sum(map(len, call(iter(messages)))) != one_way:
            raise RuntimeError("the echo lost bytes")

    ours_s, theirs_s = _in_turns((ours, theirs), repeats)
    moved = 2 * one_way / 1e6
    ratio = theirs_s / ours_s
    numbers = {
        "momentd MB/s": moved / ours_s,
        "echo MB/s": moved / theirs_s,
        "ratio": ratio,
        "momentd_ms": ours_s * 1e3,
        "echo_ms": theirs_s * 1e3,
    }
    if batch != JUDGED_BATCH:
        return Row(f"{batch:,} rows", numbers)
    return Row(f"{batch:,} rows", numbers, f"ratio >= {GOAL:g}", ratio >= GOAL)


def _in_turns(calls: tuple[Callable[[], None], ...], repeats: int) -> list[float]:
    """Median seconds of each; the first call of each block warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, spent in zip(calls, times, strict=True):
            call()
            for _ in range(CALLS):
                began = time.perf_counter()
                call()
                spent.append(time.perf_counter() - began)
    return [statistics.median(spent) for spent in times]
