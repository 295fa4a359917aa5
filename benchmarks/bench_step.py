"""The whole `optimizer.step()` as the trainer sees it, beside torch's with its state in memory."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from .harness import Result, Row, Settings, daemon, open_optimizer, settle
from .workload import Gradients, Shape, fill_state, make_parameter, timed_steps

# Steps of one side before the other one has its turn.
BLOCK = 10
# A cache that holds all records, frame metadata, and the clean frames the daemon keeps in stock.
CACHE_SLACK = 1.15
CACHE_EXTRA_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    goal: float | None
    # Both states in memory at once, in turns; else one side after the other.
    in_turns: bool = True


def cases(settings: Settings) -> list[Case]:
    million, many = settings.rows(1_000_000), settings.rows(10_000_000)
    return [
        Case("1 M x 128, 10,000 rows", Shape(million, 128, 10_000, 10_000), 4.0),
        Case("  20,000 entries of 10,000 rows", Shape(million, 128, 10_000, 20_000), None),
        Case("1 M x 64, 4,096 rows", Shape(million, 64, 4_096, 4_096), 3.0),
        Case("10 M x 128, 10,000 rows", Shape(many, 128, 10_000, 10_000), 4.0, in_turns=False),
    ]


def run(settings: Settings) -> Result:
    result = Result("step")
    for case in cases(settings):
        settings.console.print(f"{case.name.strip()} ...")
        measure = _in_turns if case.in_turns else _one_by_one
        theirs, ours = measure(case.shape, settings)
        result.rows.append(_row(case, theirs, ours))
    result.notes.append(
        f"Whole step() on CPU weights, blocks of {BLOCK} steps in turns; the state of every row "
        "was touched before. 10 M rows: one side after the other, both states do not fit."
    )
    return result


def _in_turns(shape: Shape, settings: Settings) -> tuple[list[list[float]], list[list[float]]]:
    """Blocks of times: torch's, and ours. Which side begins alternates."""
    theirs: list[list[float]] = []
    ours: list[list[float]] = []
    with ExitStack() as stack:
        own = stack.enter_context(daemon(settings, _cache_bytes(shape)))
        sides = []
        for place, blocks in ((None, theirs), (own, ours)):
            parameter = make_parameter(shape)
            optimizer = stack.enter_context(open_optimizer(parameter, place))
            fill_state(parameter, optimizer)
            sides.append((parameter, optimizer, Gradients(shape), blocks))
        settle(own)
        for parameter, optimizer, gradients, _ in sides:
            timed_steps(parameter, optimizer, gradients, BLOCK)
        for turn in range(settings.repeats):
            for parameter, optimizer, gradients, blocks in sides[:: -1 if turn % 2 else 1]:
                blocks.append(timed_steps(parameter, optimizer, gradients, BLOCK))
    return theirs, ours


def _one_by_one(shape: Shape, settings: Settings) -> tuple[list[list[float]], list[list[float]]]:
    parameter = make_parameter(shape)
    theirs = _phase(parameter, torch.optim.SparseAdam([parameter], lr=1e-3), shape, settings)
    with (
        daemon(settings, _cache_bytes(shape)) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        fill_state(parameter, optimizer)
        settle(own)
        return theirs, _blocks(parameter, optimizer, shape, settings)


def _phase(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, shape: Shape, settings: Settings
) -> list[list[float]]:
    fill_state(parameter, optimizer)
    return _blocks(parameter, optimizer, shape, settings)


def _blocks(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, shape: Shape, settings: Settings
) -> list[list[float]]:
    gradients = Gradients(shape)
    timed_steps(parameter, optimizer, gradients, BLOCK)
    return [timed_steps(parameter, optimizer, gradients, BLOCK) for _ in range(settings.repeats)]


def _cache_bytes(shape: Shape) -> int:
    return int(shape.state_bytes * CACHE_SLACK) + CACHE_EXTRA_BYTES


def _row(case: Case, theirs: list[list[float]], ours: list[list[float]]) -> Row:
    all_theirs, all_ours = list(chain(*theirs)), list(chain(*ours))
    ratio = statistics.median(all_theirs) / statistics.median(all_ours)
    of_blocks = [
        statistics.median(a) / statistics.median(b) for a, b in zip(theirs, ours, strict=True)
    ]
    numbers = {
        "torch_ms": statistics.median(all_theirs) * 1e3,
        "momentd_ms": statistics.median(all_ours) * 1e3,
        "momentd_p90_ms": sorted(all_ours)[len(all_ours) * 9 // 10] * 1e3,
        "ratio": ratio,
        "ratio_least": min(of_blocks),
        "ratio_most": max(of_blocks),
    }
    if case.goal is None:
        return Row(case.name, numbers)
    return Row(case.name, numbers, f">= {case.goal:g}", ratio >= case.goal)
