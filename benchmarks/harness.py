"""What all benchmarks share: settings, results, both sides of a comparison, tables and JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

import momentd
from examples.own_daemon import OwnDaemon
from momentd_wire.v1 import momentd_pb2 as pb

from . import machine

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
LEAST_CACHE_MIB = 16
LR = 1e-3

Side = Literal["momentd", "torch"]


def make_console() -> Console:
    """A terminal is as wide as it is; a log is wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


class Skipped(RuntimeError):
    """This machine lacks what the benchmark needs; the text says what, and how to get it."""


@dataclass(frozen=True)
class Settings:
    """What a run is told. `scale` divides table sizes (for a trial run, never for a result)."""

    work_dir: Path
    results: Path = RESULTS
    repeats: int = 5
    scale: int = 1
    # What stands on our side; "torch" exercises the harness without a daemon.
    side: Side = "momentd"
    console: Console = field(default_factory=make_console)

    def rows(self, rows: int) -> int:
        return rows // self.scale

    def need_daemon(self) -> None:
        """Raises Skipped if torch stands on our side: there is nothing to measure then."""
        if self.side == "torch":
            raise Skipped("this measures the daemon: it cannot run with --side torch")


@dataclass
class Row:
    """One line of a result: a case, its numbers, and whether they reach the goal, if it has one."""

    case: str
    numbers: dict[str, float]
    goal: str = ""
    reached: bool | None = None


@dataclass
class Result:
    """What a benchmark found."""

    benchmark: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # For the JSON alone: what is too much for the table, by case.
    details: dict[str, Any] = field(default_factory=dict)


def publish(result: Result, settings: Settings) -> Path:
    """Print the table and write it, with the machine, to `results/<benchmark>.json`."""
    settings.console.print(_table(result))
    for note in result.notes:
        settings.console.print(f"  {note}", highlight=False)
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / f"{result.benchmark}.json"
    document = {
        "machine": machine.describe(settings.work_dir),
        "settings": {
            "repeats": settings.repeats, "scale": settings.scale, "side": settings.side,
        },
        **asdict(result),
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


@contextmanager
def daemon(settings: Settings, cache_bytes: int, **options: Any) -> Generator[OwnDaemon | None]:
    """A daemon of our own, or None if torch stands on our side."""
    if settings.side == "torch":
        yield None
        return
    # A trial run of small tables may ask for less than a daemon accepts.
    cache = f"{max(-(-cache_bytes // MIB), LEAST_CACHE_MIB)}MiB"
    with OwnDaemon(cache, work_dir=settings.work_dir, **options) as own:
        yield own


@contextmanager
def open_optimizer(
    parameter: torch.nn.Parameter, own: OwnDaemon | None
) -> Generator[torch.optim.Optimizer]:
    """The optimizer under test: momentd's on `own`, torch's without a daemon."""
    if own is None:
        yield torch.optim.SparseAdam([parameter], lr=LR)
        return
    optimizer = momentd.SparseAdam([parameter], lr=LR, address=own.address, run="benchmark")
    yield optimizer
    # Its table goes before the daemon does: nothing of it has to be written at the stop.
    optimizer.close()


def stats(own: OwnDaemon) -> pb.StatsReply:
    with momentd.connect(own.address) as client:
        return client.stats()


def settle(own: OwnDaemon | None, *, quiet_s: float = 1.0, limit_s: float = 120.0) -> None:
    """Wait until the daemon does nothing in the background any more: writing, huge pages.

    Making huge pages of 10 GB takes it some 10 seconds after the last slab was taken.
    """
    if own is None:
        return
    deadline = time.monotonic() + limit_s
    before = (-1, -1)
    while time.monotonic() < deadline:
        now = stats(own).totals.bytes_written, machine.huge_page_bytes(own.pid)
        if now == before:
            return
        before = now
        time.sleep(quiet_s)


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Median and the two deciles of times, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "median_ms": statistics.median(ordered) * 1e3,
        "p10_ms": ordered[len(ordered) // 10] * 1e3,
        "p90_ms": ordered[len(ordered) * 9 // 10] * 1e3,
    }


def _table(result: Result) -> Table:
    table = Table(title=result.benchmark)
    table.add_column("case", overflow="fold")
    names = list(dict.fromkeys(name for row in result.rows for name in row.numbers))
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("goal")
    marks = {None: "", True: " [green]reached", False: " [red]missed"}
    for row in result.rows:
        cells = [_number(row.numbers.get(name)) for name in names]
        table.add_row(row.case, *cells, row.goal + marks[row.reached])
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
