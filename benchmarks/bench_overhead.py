"""The part of a step that is neither kernel nor copy nor adding deltas.

The time of a step in which nobody was in one of: the kernel or its sorting of the batch (daemon),
copying gradients into the arena, adding deltas to the weights (client). What remains is Python,
the socket, wake-ups, protobuf, and finding rows in the cache.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from momentd.optim import _pending, base

from .harness import Result, Row, Settings, daemon, open_optimizer, settle
from .tracing import Interval, Trace, busy_seconds, by_name
from .workload import Gradients, Shape, fill_state, make_parameter

GOAL_MS = 0.2
WARM_UP_STEPS = 20
STEPS = 200


def run(settings: Settings) -> Result:
    rows = settings.rows(1_000_000)
    shapes = {
        "1 M x 128, 10,000 rows": Shape(rows, 128, 10_000, 10_000),
        "  20,000 entries of 10,000 rows": Shape(rows, 128, 10_000, 20_000),
        "1 M x 64, 4,096 rows": Shape(rows, 64, 4_096, 4_096),
        "1 M x 128, one row": Shape(rows, 128, 1, 1),
    }
    result = Result("overhead")
    client = Trace()
    client.wrap(base, "fill", "copy gradients")
    client.wrap(_pending, "add_rows", "add deltas")
    for name, shape in shapes.items():
        settings.console.print(f"{name.strip()} ...")
        steps, intervals = _measure(shape, client, settings)
        result.rows.append(_row(name, steps, intervals))
    result.notes.append(
        "other_ms: medians of the time of a step in which none of the named parts was going on; "
        "parts overlap, so they do not add up to the step."
    )
    return result


def _measure(
    shape: Shape, client: Trace, settings: Settings
) -> tuple[list[tuple[float, float]], list[Interval]]:
    """Begin and end of each step, and the intervals of both sides."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        program = ("-m", "benchmarks.traced_daemon", str(file))
        cache_bytes = 2 * shape.state_bytes + (128 << 20)
        parameter = make_parameter(shape)
        with (
            daemon(settings, cache_bytes, program=program) as own,
            open_optimizer(parameter, own) as optimizer,
        ):
            fill_state(parameter, optimizer)
            settle(own)
            gradients = Gradients(shape)
            _steps(parameter, optimizer, gradients, WARM_UP_STEPS)
            client.intervals.clear()
            steps = _steps(parameter, optimizer, gradients, STEPS)
        served = json.loads(file.read_text()) if file.exists() else []
    return steps, [*client.intervals, *served]


def _steps(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: Gradients, count: int
) -> list[tuple[float, float]]:
    spans = []
    for _ in range(count):
        parameter.grad = gradients.next()
        began = time.monotonic()
        optimizer.step()
        spans.append((began, time.monotonic()))
    return spans


def _row(name: str, steps: list[tuple[float, float]], intervals: list[Interval]) -> Row:
    # Sorted once, so that each step looks at its own neighbourhood only.
    intervals = sorted(intervals, key=lambda interval: interval[1])
    others, parts = [], []
    for began, ended in steps:
        near = [each for each in intervals if began <= each[1] < ended]
        others.append(ended - began - busy_seconds(near, began, ended))
        parts.append(by_name(near, began, ended))
    other_ms = statistics.median(others) * 1e3
    numbers = {
        "step_ms": statistics.median(b - a for a, b in steps) * 1e3,
        "other_ms": other_ms,
        "other_p90_ms": sorted(others)[len(others) * 9 // 10] * 1e3,
    }
    for part in dict.fromkeys(name for found in parts for name in found):
        numbers[f"{part}, ms"] = statistics.median(f.get(part, 0.0) for f in parts) * 1e3
    return Row(name, numbers, f"other <= {GOAL_MS} ms", other_ms <= GOAL_MS)
