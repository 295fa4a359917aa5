"""Uniform rows of a table ten times as large as the cache: how near the disk's limit a step is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.own_daemon import OwnDaemon

from .cgroup import MemoryLimit
from .device import FILE_BYTES, random_read_iops, reads_completed
from .harness import (
    Result,
    Row,
    Settings,
    daemon,
    milliseconds,
    open_optimizer,
    settle,
    stats,
)
from .machine import written_bytes
from .side import Side
from .workload import FILL_ROWS, Gradients, Shape, fill_state, make_parameter, timed_steps

STEPS = 60
WARM_UP_STEPS = 20
DIM = 128
# What the daemon may hold besides its cache.
LIMIT_ABOVE_CACHE = 1_000_000_000
REWRITES = 3
MEMMAP_GOAL = 40.0


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    goal: float
    # How often the table is rewritten before the steps that count.
    rewrites: int = 0
    beside_memmap: bool = False


CASES = (
    Case("10 M x 128, before compaction", 10_000_000, 0.80, beside_memmap=True),
    # Smaller: three rewrites of 10 M rows would take six minutes.
    Case("3 M x 128, after 3 rewrites", 3_000_000, 0.65, REWRITES),
)


@dataclass
class Look:
    """All counters at one moment."""

    reads: int
    misses: int
    evicted_bytes: int
    device_bytes: int
    compacted: int


def run(settings: Settings) -> Result:
    """Needs momentd on our side, fio, and root for the limit of memory."""
    settings.need_daemon()
    result = Result("cold")
    iops = random_read_iops(settings.work_dir, file_bytes=FILE_BYTES // settings.scale)
    for case in CASES:
        settings.console.print(f"{case.name} ...")
        result.rows += _measure(case, iops, settings)
        if case.beside_memmap:
            settings.console.print("  memmap under the same limit ...")
            result.rows.append(_memmap(case, result.rows[0].numbers["median_ms"], settings))
    result.notes += [
        f"fio: {iops:,.0f} random 4 KiB reads a second, 64 in flight. Reads are those that the "
        "device completed, whoever asked for them: the machine must be quiet.",
        "The daemon, without the trainer, is in a memory cgroup of cache + 1 GB.",
        "Written: /proc/PID/io of the daemon. A goal that says 'compaction included' is judged "
        "only where the daemon says that it compacted.",
    ]
    return result


def _measure(case: Case, iops: float, settings: Settings) -> list[Row]:
    # A batch is bounded by the cache, so a trial run has smaller ones as well.
    batch = settings.rows(10_000)
    shape = Shape(settings.rows(case.rows), DIM, batch, batch)
    cache_bytes = shape.state_bytes // 10
    parameter = make_parameter(shape)
    with (
        MemoryLimit(cache_bytes + LIMIT_ABOVE_CACHE) as limit,
        daemon(settings, cache_bytes, program=limit.program) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        assert own is not None
        fill_state(parameter, optimizer, settings.rows(FILL_ROWS))
        settle(own)
        gradients = Gradients(shape)
        first = _look(own)
        rewriting = case.rewrites * shape.rows // batch
        timed_steps(parameter, optimizer, gradients, WARM_UP_STEPS + rewriting)
        before = _look(own)
        seconds = timed_steps(parameter, optimizer, gradients, STEPS)
        after = _look(own)
        peak = limit.peak_bytes
    read = after.reads - before.reads
    ratio = read / sum(seconds) / iops
    numbers = {
        **milliseconds(seconds),
        "reads/s": read / sum(seconds),
        "of fio": ratio,
        "misses/s": (after.misses - before.misses) / sum(seconds),
        "cold share": (after.misses - before.misses) / (batch * STEPS),
        "peak MB": peak / 1e6,
    }
    rows = [Row(case.name, numbers, f"of fio >= {case.goal:g}", ratio >= case.goal)]
    if case.rewrites:
        rows.append(_written(case, first, after))
        if not after.compacted:
            # The disk's rate is what it is, but not that of the case which the goal is about.
            rows[0].goal += ", compacting: not judged"
            rows[0].reached = None
    return rows


def _memmap(case: Case, ours_ms: float, settings: Settings) -> Row:
    """The memmap baseline, weights in a file too, in a cgroup with the limit of the daemon's."""
    batch = settings.rows(10_000)
    shape = Shape(settings.rows(case.rows), DIM, batch, batch)
    with (
        MemoryLimit(shape.state_bytes // 10 + LIMIT_ABOVE_CACHE) as limit,
        TemporaryDirectory(prefix="memmap-", dir=settings.work_dir) as folder,
        Side("memmap", shape, folder=Path(folder), group=limit.group) as side,
    ):
        side.wait()
        side.block(shape)
        seconds = side.block(shape)
    theirs_ms = milliseconds(seconds)["median_ms"]
    numbers = {"memmap_ms": theirs_ms, "momentd_ms": ours_ms, "memmap / ours": theirs_ms / ours_ms}
    return Row(
        "  memmap under the same limit", numbers, f"memmap / ours >= {MEMMAP_GOAL:g}",
        theirs_ms / ours_ms >= MEMMAP_GOAL,
    )  # fmt: skip


def _written(case: Case, first: Look, after: Look) -> Row:
    ratio = (after.device_bytes - first.device_bytes) / (after.evicted_bytes - first.evicted_bytes)
    name = f"  {case.name}: bytes written / evicted"
    numbers = {"written/evicted": ratio, "compacted MB": (after.compacted - first.compacted) / 1e6}
    if not after.compacted:
        return Row(name, numbers, "<= 2, compaction included: not judged, nothing was compacted")
    return Row(name, numbers, "<= 2, compaction included", ratio <= 2)


def _look(own: OwnDaemon) -> Look:
    found = stats(own)
    table = found.tables[0]
    return Look(
        reads=reads_completed(own.data_dir),
        misses=table.misses,
        evicted_bytes=table.bytes_written,
        device_bytes=written_bytes(own.pid),
        compacted=found.totals.bytes_compacted,
    )
