"""The whole `optimizer.step()` as the trainer sees it, with all state in memory, beside others."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from examples.own_daemon import OwnDaemon
from momentd_wire.addresses import GRPC_SUFFIX

from .baselines import BASELINES
from .harness import Result, Row, Settings, daemon, milliseconds, settle
from .side import BLOCK, BLOCK_SECONDS, LEAST_STEPS, Side
from .workload import Shape

# Baselines that write files come afterwards, so that write-back of theirs disturbs nobody else.
BASELINE_BLOCKS = 2
# Those whose pages cost a fault after they were written back.
MAPPED = {"memmap", "mapping"}
# A cache that holds all records, frame metadata, and the clean frames the daemon keeps in stock.
CACHE_SLACK = 1.15
CACHE_EXTRA_BYTES = 128 << 20
MEMMAP_GOAL = 10.0
SYNCED = ", synced"

Plane = Literal["local", "grpc"]
# Seconds of each step, in blocks, by system.
Times = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Case:
    name: str
    distinct: int
    entries: int
    goal: float | None = None
    memmap_goal: float | None = MEMMAP_GOAL


@dataclass(frozen=True)
class Table:
    """One table for several cases: its state is made once for each system."""

    name: str
    rows: int
    dim: int
    cases: tuple[Case, ...]
    # All states in memory at once, in turns; else one system after the other.
    in_turns: bool = True
    baselines: tuple[str, ...] = tuple(BASELINES)

    @property
    def all_rows(self) -> Shape:
        return Shape(self.rows, self.dim, self.rows, self.rows)

    def shape(self, case: Case) -> Shape:
        # In a trial run the tables are small: a batch stays well below a quarter of the cache.
        distinct = min(case.distinct, self.rows // 8)
        return Shape(self.rows, self.dim, distinct, case.entries * distinct // case.distinct)


def tables(settings: Settings) -> list[Table]:
    million, many = settings.rows(1_000_000), settings.rows(10_000_000)
    return [
        Table(
            "1 M x 128",
            million,
            128,
            (
                Case("2,048 rows", 2_048, 2_048, 4.0),
                Case("10,000 rows", 10_000, 10_000, 4.5),
                Case("20,000 entries of 10,000 rows", 10_000, 20_000, memmap_goal=None),
                Case("100,000 rows", 100_000, 100_000, 5.0),
            ),
        ),
        Table("1 M x 64", million, 64, (Case("4,096 rows", 4_096, 4_096, 3.0, None),)),
        # In an LMDB, 10 M records of 1 KiB take 14 GB and minutes to be put there.
        Table(
            "10 M x 128",
            many,
            128,
            (Case("10,000 rows", 10_000, 10_000, 5.0),),
            in_turns=False,
            baselines=("memmap", "mapping"),
        ),
    ]


def run(settings: Settings) -> Result:
    result = Result("hot")
    for table in tables(settings):
        settings.console.print(f"{table.name} ...")
        times = (_in_turns if table.in_turns else _one_by_one)(table, settings)
        for name in table.baselines:
            settings.console.print(f"  {name} ...")
            for case, found in zip(table.cases, _baseline(table, name, settings), strict=True):
                times[case.name] |= found
        for case in table.cases:
            label = f"{table.name}, {case.name}"
            result.rows += _rows(label, case, times[case.name])
            result.details[label] = {
                system: _spread(list(chain(*blocks))) for system, blocks in times[case.name].items()
            }
    result.notes += [
        "Whole step() on CPU weights; the state of every row was touched before. torch, momentd "
        f"and momentd over gRPC in turns, in blocks of {BLOCK} steps (fewer, but {LEAST_STEPS}, if "
        f"they take {BLOCK_SECONDS:g} s), each in a process of its own. 10 M rows: one after "
        "the other, both states do not fit.",
        "memmap, mapping, lmdb: afterwards, in the same run, with the same gradients. Their files "
        "are in the page cache, most pages dirty: a step then costs no fault. 'files just written "
        "back': they were synced before each block, as the kernel does every half minute.",
        "ratio_least, ratio_most: of the blocks.",
    ]
    return result


def _in_turns(table: Table, settings: Settings) -> dict[str, Times]:
    """Blocks of times by case. Which side begins alternates."""
    with ExitStack() as stack:
        own = stack.enter_context(daemon(settings, 2 * _cache_bytes(table)))
        sides = [Side("torch", table.all_rows), _ours(table, own, "local")]
        if own is not None:
            sides.append(_ours(table, own, "grpc"))
        for side in sides:
            stack.enter_context(side)
        for side in sides:
            side.wait()
        settle(own)
        return {case.name: _turns(table.shape(case), sides, settings) for case in table.cases}


def _turns(shape: Shape, sides: list[Side], settings: Settings) -> Times:
    names = ["torch", "momentd", "grpc"][: len(sides)]
    times: Times = {name: [] for name in names}
    for side in sides:
        side.block(shape)
    for turn in range(settings.repeats):
        for name, side in list(zip(names, sides, strict=True))[:: -1 if turn % 2 else 1]:
            times[name].append(side.block(shape))
    return times


def _one_by_one(table: Table, settings: Settings) -> dict[str, Times]:
    theirs = _alone(table, Side("torch", table.all_rows), settings.repeats)
    with daemon(settings, _cache_bytes(table)) as own:
        ours = _alone(table, _ours(table, own, "local"), settings.repeats, own)
    return {
        case.name: {"torch": a, "momentd": b}
        for case, a, b in zip(table.cases, theirs, ours, strict=True)
    }


def _baseline(table: Table, name: str, settings: Settings) -> list[Times]:
    """Times of each case, as its files are and with the files written back before each block."""
    repeats = min(settings.repeats, BASELINE_BLOCKS)
    with (
        TemporaryDirectory(prefix=f"{name}-", dir=settings.work_dir) as folder,
        Side(name, table.all_rows, folder=Path(folder)) as side,
    ):
        side.wait()
        found: list[Times] = []
        for case in table.cases:
            shape = table.shape(case)
            found.append({name: _blocks(side, shape, repeats)})
            if name in MAPPED:
                found[-1][name + SYNCED] = _blocks(side, shape, 1, synced=True)
        return found


def _alone(
    table: Table, side: Side, repeats: int, own: OwnDaemon | None = None
) -> list[list[list[float]]]:
    """Blocks of times of each case."""
    with side:
        side.wait()
        settle(own)
        return [_blocks(side, table.shape(case), repeats) for case in table.cases]


def _blocks(side: Side, shape: Shape, repeats: int, *, synced: bool = False) -> list[list[float]]:
    """The first one warms up."""
    return [side.block(shape, synced=synced) for _ in range(repeats + 1)][1:]


def _ours(table: Table, own: OwnDaemon | None, plane: Plane) -> Side:
    """momentd, or torch once more if there is no daemon."""
    if own is None:
        return Side("torch", table.all_rows)
    if plane == "local":
        return Side("momentd", table.all_rows, address=own.address)
    return Side("grpc", table.all_rows, address=f"grpc+{own.address}{GRPC_SUFFIX}")


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        **milliseconds(seconds), "mean_ms": statistics.fmean(seconds) * 1e3, "steps": len(seconds),
    }  # fmt: skip


def _cache_bytes(table: Table) -> int:
    return int(table.all_rows.state_bytes * CACHE_SLACK) + CACHE_EXTRA_BYTES


def _rows(label: str, case: Case, times: Times) -> list[Row]:
    medians = {system: statistics.median(chain(*blocks)) for system, blocks in times.items()}
    ours = times["momentd"]
    ratio = medians["torch"] / medians["momentd"]
    of_blocks = [
        statistics.median(a) / statistics.median(b)
        for a, b in zip(times["torch"], ours, strict=True)
    ]
    numbers = {
        "torch_ms": medians["torch"] * 1e3,
        "momentd_ms": medians["momentd"] * 1e3,
        "momentd_p90_ms": milliseconds(list(chain(*ours)))["p90_ms"],
        "ratio": ratio,
        "ratio_least": min(of_blocks),
        "ratio_most": max(of_blocks),
    }
    for system, median in medians.items():
        if not system.endswith(SYNCED):
            numbers.setdefault(f"{system}_ms", median * 1e3)
    rows = [_judged(label, numbers, "torch / ours", ratio, case.goal)]
    if "memmap" in medians:
        over = medians["memmap"] / medians["momentd"]
        numbers = {"ratio": over}
        rows.append(_judged("  memmap / ours", numbers, "memmap / ours", over, case.memmap_goal))
    synced = {
        f"{system.removesuffix(SYNCED)}_ms": median * 1e3
        for system, median in medians.items()
        if system.endswith(SYNCED)
    }
    if synced:
        rows.append(Row("  files just written back", synced))
    return rows


def _judged(
    label: str, numbers: dict[str, float], what: str, ratio: float, goal: float | None
) -> Row:
    if goal is None:
        return Row(label, numbers)
    return Row(label, numbers, f"{what} >= {goal:g}", ratio >= goal)
