"""Zipf-distributed rows, a tenth of the records in the cache: beside the disk and SparseAdam."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from examples.own_daemon import OwnDaemon

from .device import FILE_BYTES, random_read_iops
from .harness import LR, Result, Row, Settings, daemon, open_optimizer, settle, stats
from .workload import FILL_ROWS, Shape, fill_state, make_parameter, timed_steps
from .zipf import EXPONENT, Again, ZipfGradients

ROWS = 10_000_000
# The cache is turned over eight times: by then it holds what is popular.
WARM_UP_STEPS = 6000
STEPS = 100
# Steps whose batches are given once more at once: their rows are in the cache then.
HOT_STEPS = 20
TORCH_STEPS = 40
FRAME_METADATA_BYTES = 32


@dataclass
class Ours:
    step_s: float
    hot_s: float
    # Per step.
    misses: float
    hot_misses: float
    static_misses: float
    distinct: float


def run(settings: Settings) -> Result:
    """One phase after the other: both states do not fit in memory. Needs momentd and fio."""
    settings.need_daemon()
    entries = settings.rows(10_000)
    shape = Shape(settings.rows(ROWS), 128, entries, entries)
    iops = random_read_iops(settings.work_dir, file_bytes=FILE_BYTES // settings.scale)
    parameter = make_parameter(shape)
    settings.console.print("SparseAdam in RAM ...")
    theirs = _torch(parameter, shape)
    settings.console.print("momentd ...")
    ours = _ours(parameter, shape, settings)
    result = Result("zipf", _rows(ours, theirs, iops))
    result.notes += [
        f"{shape.rows:,} x {shape.dim}, Zipf {EXPONENT:g}, {entries:,} draws a step "
        f"({ours.distinct:,.0f} distinct rows), cache a tenth of the records; medians of whole "
        f"steps. fio: {iops:,.0f} reads a second.",
        f"Hot step: {HOT_STEPS} batches given once more at once ({ours.hot_misses:.1f} misses). "
        "A perfect static cache holds the most popular rows, as many as the daemon has frames.",
    ]
    return result


def _torch(parameter: nn.Parameter, shape: Shape) -> float:
    gradients = ZipfGradients(shape, kept=0)
    optimizer = torch.optim.SparseAdam([parameter], lr=LR)
    timed_steps(parameter, optimizer, gradients, 1)
    for name in ("exp_avg", "exp_avg_sq"):
        # As after long training: every page is there.
        optimizer.state[parameter][name].fill_(1e-6)
    return statistics.median(timed_steps(parameter, optimizer, gradients, TORCH_STEPS))


def _ours(parameter: nn.Parameter, shape: Shape, settings: Settings) -> Ours:
    cache_bytes = shape.rows // 10 * (2 * shape.dim * 4 + FRAME_METADATA_BYTES)
    with (
        daemon(settings, cache_bytes) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        assert own is not None
        fill_state(parameter, optimizer, settings.rows(FILL_ROWS))
        settle(own)
        gradients = ZipfGradients(shape, kept=stats(own).tables[0].frames)
        timed_steps(parameter, optimizer, gradients, WARM_UP_STEPS)
        before = _misses(own)
        counted = len(gradients.beyond)
        seconds = timed_steps(parameter, optimizer, gradients, STEPS)
        misses = (_misses(own) - before) / STEPS
        static = statistics.fmean(gradients.beyond[counted:])
        distinct = statistics.fmean(gradients.distinct[counted:])
        batches = [gradients.next() for _ in range(HOT_STEPS)]
        timed_steps(parameter, optimizer, Again(batches), HOT_STEPS)
        before = _misses(own)
        hot = timed_steps(parameter, optimizer, Again(batches), HOT_STEPS)
        hot_misses = (_misses(own) - before) / HOT_STEPS
    return Ours(
        statistics.median(seconds), statistics.median(hot), misses, hot_misses, static, distinct
    )


def _misses(own: OwnDaemon) -> int:
    return stats(own).tables[0].misses


def _rows(ours: Ours, theirs: float, iops: float) -> list[Row]:
    bound = ours.hot_s + ours.misses / iops
    limits = {"step_ms": ours.step_s * 1e3, "hot_ms": ours.hot_s * 1e3, "bound_ms": bound * 1e3}
    limit_ratio = ours.step_s / bound
    static_ratio = ours.misses / ours.static_misses
    torch_ratio = theirs / ours.step_s
    return [
        Row(
            "step / (hot step + misses / fio)",
            {"ratio": limit_ratio, **limits},
            "<= 1.25",
            limit_ratio <= 1.25,
        ),
        Row(
            "misses / those of a perfect static cache",
            {"ratio": static_ratio, "misses": ours.misses, "static": ours.static_misses},
            "<= 1.15",
            static_ratio <= 1.15,
        ),
        Row(
            "SparseAdam in RAM / ours",
            {"ratio": torch_ratio, "torch_ms": theirs * 1e3, "step_ms": ours.step_s * 1e3},
            ">= 1.5",
            torch_ratio >= 1.5,
        ),
    ]
