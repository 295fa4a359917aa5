"""How much longer than usual the slowest steps take: 10,000 steps, hot and with spilling."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .harness import MIB, Result, Row, Settings, daemon, open_optimizer, settle, stats
from .workload import FILL_ROWS, Gradients, GradientSource, Shape, fill_state, make_parameter
from .zipf import ZipfGradients

STEPS = 10_000
WARM_UP_STEPS = 300
BATCH = 2_048
GOAL = 4.0
# Upper edges of the histogram, in medians.
EDGES = (0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0)


@dataclass
class Steps:
    """One entry a step."""

    seconds: list[float]
    # Times that the trainer lost its core to somebody, and page faults of the trainer.
    preempted: list[int]
    faults: list[int]


def run(settings: Settings) -> Result:
    """Small batches, for 10,000 steps in a minute; needs momentd."""
    settings.need_daemon()
    # A trial run has fewer steps: for percentiles that mean nothing, of code that works.
    steps = max(200, settings.rows(STEPS))
    batch = max(16, settings.rows(BATCH))
    result = Result("tail")
    hot = Shape(settings.rows(1_000_000), 128, batch, batch)
    wide = Shape(settings.rows(4_000_000), 128, batch, batch)
    for name, shape, cache, zipf in (
        ("hot, 1 M x 128", hot, int(hot.state_bytes * 1.15) + 128 * MIB, False),
        ("Zipf with spilling, 4 M x 128, cache 10 %", wide, wide.state_bytes // 10, True),
    ):
        settings.console.print(f"{name} ...")
        found, extra = _measure(shape, cache, zipf, steps, settings)
        result.rows.append(_row(name, found, extra))
        result.details[name] = _details(found)
    result.notes.append(
        f"{steps:,} whole steps of {batch:,} rows. Histogram and the slowest steps: 'details' of "
        "the JSON. preempted: times a step that the trainer lost its core; slow: steps beyond the "
        "99th percentile."
    )
    return result


def _measure(
    shape: Shape, cache: int, zipf: bool, steps: int, settings: Settings
) -> tuple[Steps, dict[str, float]]:
    parameter = make_parameter(shape)
    with daemon(settings, cache) as own, open_optimizer(parameter, own) as optimizer:
        assert own is not None
        fill_state(parameter, optimizer, settings.rows(FILL_ROWS))
        settle(own)
        kept = stats(own).tables[0].frames
        gradients: GradientSource = ZipfGradients(shape, kept=kept) if zipf else Gradients(shape)
        watched_steps(parameter, optimizer, gradients.next, WARM_UP_STEPS)
        before = stats(own).tables[0]
        found = watched_steps(parameter, optimizer, gradients.next, steps)
        after = stats(own).tables[0]
    return found, {
        "misses/step": (after.misses - before.misses) / steps,
        "spilled MB": (after.bytes_written - before.bytes_written) / 1e6,
    }


def watched_steps(
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    next_gradient: Callable[[], Tensor],
    steps: int,
) -> Steps:
    """As `workload.timed_steps`, and what the kernel did to this process meanwhile."""
    found = Steps([], [], [])
    for _ in range(steps):
        parameter.grad = next_gradient()
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        optimizer.step()
        found.seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.preempted.append(after.ru_nivcsw - before.ru_nivcsw)
        found.faults.append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)
    parameter.grad = None
    return found


def _row(name: str, found: Steps, extra: dict[str, float]) -> Row:
    ordered = sorted(found.seconds)
    median, p99 = statistics.median(ordered), ordered[len(ordered) * 99 // 100]
    slow = [k for k, s in enumerate(found.seconds) if s >= p99]
    numbers = {
        "median_ms": median * 1e3,
        "p99_ms": p99 * 1e3,
        "p99.9_ms": ordered[len(ordered) * 999 // 1000] * 1e3,
        "max_ms": ordered[-1] * 1e3,
        "p99/median": p99 / median,
        "preempted": statistics.fmean(found.preempted),
        "preempted, slow": statistics.fmean(found.preempted[k] for k in slow),
        **extra,
    }
    return Row(name, numbers, f"p99/median <= {GOAL:g}", p99 / median <= GOAL)


def _details(found: Steps) -> dict[str, Any]:
    """Histogram in medians, and where in the run the slowest steps were."""
    median = statistics.median(found.seconds)
    counts = dict.fromkeys([*(f"< {edge:g}" for edge in EDGES), "more"], 0)
    for seconds in found.seconds:
        counts[next((f"< {e:g}" for e in EDGES if seconds < e * median), "more")] += 1
    slowest = sorted(range(len(found.seconds)), key=lambda k: -found.seconds[k])[:50]
    return {
        "histogram, in medians": counts,
        "slowest": [
            {"step": k, "ms": found.seconds[k] * 1e3, "preempted": found.preempted[k],
             "faults": found.faults[k]}
            for k in slowest
        ],
    }  # fmt: skip
