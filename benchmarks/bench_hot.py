"""The whole `optimizer.step()` as the trainer sees it, with all state in memory, beside others."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from .baselines import BASELINES, Baseline
from .baselines.base import FILLED
from .harness import LR, Plane, Result, Row, Settings, daemon, milliseconds, open_optimizer, settle
from .workload import Gradients, Shape, fill_state, make_parameter, timed_steps

# Steps of one side before the other one has its turn; fewer if they take long.
BLOCK = 10
BLOCK_SECONDS, LEAST_STEPS = 2.0, 3
# Baselines that write files come afterwards, so that write-back of theirs disturbs nobody else.
BASELINE_BLOCKS = 3
# A cache that holds all records, frame metadata, and the clean frames the daemon keeps in stock.
CACHE_SLACK = 1.15
CACHE_EXTRA_BYTES = 128 << 20
MEMMAP_GOAL = 10.0

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
    def state_bytes(self) -> int:
        return Shape(self.rows, self.dim, 0, 0).state_bytes

    def shape(self, case: Case) -> Shape:
        # In a trial run the tables are small: a batch stays well below a quarter of the cache.
        distinct = min(case.distinct, self.rows // 8)
        return Shape(self.rows, self.dim, distinct, case.entries * distinct // case.distinct)


@dataclass(frozen=True)
class Side:
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer


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
            for case, blocks in zip(table.cases, _baseline(table, name, settings), strict=True):
                times[case.name][name] = blocks
        for case in table.cases:
            label = f"{table.name}, {case.name}"
            result.rows += _rows(label, case, times[case.name])
            result.details[label] = {
                system: {**milliseconds(list(chain(*blocks))), "steps": sum(map(len, blocks))}
                for system, blocks in times[case.name].items()
            }
    result.notes += [
        "Whole step() on CPU weights; the state of every row was touched before. torch, momentd "
        f"and momentd over gRPC in turns, in blocks of {BLOCK} steps (fewer, but {LEAST_STEPS}, if "
        f"they take {BLOCK_SECONDS:g} s). 10 M rows: one after the other, both states do not fit.",
        "memmap, mapping, lmdb: afterwards, in the same run, with the same gradients. Their files "
        "are in the page cache; what the kernel writes back meanwhile is part of their time.",
        "ratio_least, ratio_most: of the blocks.",
    ]
    return result


def _in_turns(table: Table, settings: Settings) -> dict[str, Times]:
    """Blocks of times by case. Which side begins alternates."""
    with ExitStack() as stack:
        own = stack.enter_context(daemon(settings, 2 * _cache_bytes(table)))
        sides = {"torch": stack.enter_context(_torch_side(table))}
        planes: dict[str, Plane] = {"momentd": "local"}
        if own is not None:
            planes["grpc"] = "grpc"
        for system, plane in planes.items():
            parameter = _parameter(table)
            optimizer = stack.enter_context(open_optimizer(parameter, own, plane))
            fill_state(parameter, optimizer)
            sides[system] = Side(parameter, optimizer)
        settle(own)
        return {case.name: _turns(table.shape(case), sides, settings) for case in table.cases}


def _turns(shape: Shape, sides: dict[str, Side], settings: Settings) -> Times:
    gradients = {system: Gradients(shape) for system in sides}
    times: Times = {system: [] for system in sides}
    for system, side in sides.items():
        _block(side, gradients[system])
    for turn in range(settings.repeats):
        for system in list(sides)[:: -1 if turn % 2 else 1]:
            times[system].append(_block(sides[system], gradients[system]))
    return times


def _one_by_one(table: Table, settings: Settings) -> dict[str, Times]:
    times: dict[str, Times] = {case.name: {} for case in table.cases}
    with _torch_side(table) as side:
        for case in table.cases:
            times[case.name]["torch"] = _blocks(side, table.shape(case), settings.repeats)
    gc.collect()
    parameter = _parameter(table)
    with (
        daemon(settings, _cache_bytes(table)) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        fill_state(parameter, optimizer)
        settle(own)
        for case in table.cases:
            times[case.name]["momentd"] = _blocks(
                Side(parameter, optimizer), table.shape(case), settings.repeats
            )
    return times


def _baseline(table: Table, name: str, settings: Settings) -> Iterator[list[list[float]]]:
    """Blocks of times of each case."""
    repeats = min(settings.repeats, BASELINE_BLOCKS)
    with TemporaryDirectory(prefix=f"{name}-", dir=settings.work_dir) as made:
        parameter = _parameter(table)
        baseline = BASELINES[name](parameter, Path(made), LR)
        try:
            baseline.fill()
            for case in table.cases:
                yield _blocks(Side(parameter, baseline), table.shape(case), repeats)
        finally:
            baseline.close()


@contextmanager
def _torch_side(table: Table) -> Iterator[Side]:
    parameter = _parameter(table)
    optimizer = torch.optim.SparseAdam([parameter], lr=LR)
    timed_steps(parameter, optimizer, Gradients(Shape(table.rows, table.dim, 1, 1)), 1)
    for name in ("exp_avg", "exp_avg_sq"):
        # As after long training, and every page is there.
        optimizer.state[parameter][name].fill_(FILLED)
    yield Side(parameter, optimizer)


def _parameter(table: Table) -> nn.Parameter:
    return make_parameter(Shape(table.rows, table.dim, 0, 0))


def _blocks(side: Side, shape: Shape, repeats: int) -> list[list[float]]:
    gradients = Gradients(shape)
    _block(side, gradients)
    return [_block(side, gradients) for _ in range(repeats)]


def _block(side: Side, gradients: Gradients) -> list[float]:
    """Seconds of each step; what goes on in the background ends before the next block begins."""
    seconds: list[float] = []
    while len(seconds) < BLOCK and (len(seconds) < LEAST_STEPS or sum(seconds) < BLOCK_SECONDS):
        seconds += timed_steps(side.parameter, side.optimizer, gradients, 1)
    if isinstance(side.optimizer, Baseline):
        side.optimizer.drain()
    return seconds


def _cache_bytes(table: Table) -> int:
    return int(table.state_bytes * CACHE_SLACK) + CACHE_EXTRA_BYTES


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
        numbers.setdefault(f"{system}_ms", median * 1e3)
    rows = [_judged(label, numbers, "torch / ours", ratio, case.goal)]
    if "memmap" in medians:
        over = medians["memmap"] / medians["momentd"]
        numbers = {"ratio": over}
        rows.append(_judged("  memmap / ours", numbers, "memmap / ours", over, case.memmap_goal))
    return rows


def _judged(
    label: str, numbers: dict[str, float], what: str, ratio: float, goal: float | None
) -> Row:
    if goal is None:
        return Row(label, numbers)
    return Row(label, numbers, f"{what} >= {goal:g}", ratio >= goal)
