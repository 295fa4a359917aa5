"""The closing table: what was held where, and what it cost."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from momentd_wire.units import format_bytes
from momentd_wire.v1 import momentd_pb2 as pb

from .evaluation import Metrics
from .training import Timing

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """All that was measured. `stats` is None where torch's optimizer did the training."""

    weight: torch.Tensor
    optimizer_gpu_bytes: int
    stats: pb.StatsReply | None
    training: Timing
    training_s: float
    last_pass: Timing
    # Steps of our optimizer and of torch's, one by one, after training.
    in_turns: tuple[Timing, Timing] | None
    trainer_rss_bytes: int


def metrics_table(rows: list[tuple[str, Metrics]]) -> Table:
    table = Table(title="Held-out ancestors")
    table.add_column("embedding")
    table.add_column("MRR", justify="right")
    table.add_column("Hits@10", justify="right")
    for name, metrics in rows:
        table.add_row(name, f"{metrics.mrr:.3f}", f"{metrics.hits:.3f}")
    return table


def closing_table(outcome: Outcome) -> Table:
    table = Table(title="What was measured", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for section in (_memory(outcome), _rows(outcome), _time(outcome)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return table


def gpu_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """GPU memory of all tensors in `optimizer.state`."""
    return sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.is_cuda
    )


def resident_bytes() -> int:
    """Resident set of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def _memory(outcome: Outcome) -> Rows:
    rows, dim = outcome.weight.shape
    weights = format_bytes(outcome.weight.nbytes)
    found = [
        ("embedding", f"{rows:,} x {dim}, weights of {weights}"),
        ("state: two moments a weight", format_bytes(2 * outcome.weight.nbytes)),
        ("GPU memory taken by the state", format_bytes(outcome.optimizer_gpu_bytes)),
        ("trainer, resident", f"{format_bytes(outcome.trainer_rss_bytes)}, weights included"),
    ]
    if outcome.stats is None:
        return found
    totals = outcome.stats.totals
    return [
        *found,
        ("bound of the cache", format_bytes(totals.cache_bytes)),
        ("  in use, metadata included", format_bytes(totals.cache_used_bytes)),
        ("  beside it, 12 bytes a row", format_bytes(totals.location_bytes)),
        (
            "daemon, resident",
            f"{format_bytes(totals.rss_anonymous_bytes)} its own, "
            f"{format_bytes(totals.rss_shared_bytes)} shared (cache, arenas), "
            f"{format_bytes(totals.rss_file_bytes)} code",
        ),
        ("page cache of its files", format_bytes(totals.page_cache_bytes)),
        ("its files on disk", format_bytes(totals.disk_bytes)),
    ]


def _rows(outcome: Outcome) -> Rows:
    steps, rows = len(outcome.training.step), sum(outcome.training.rows)
    seconds = max(outcome.training_s, 1e-9)
    found = [
        ("steps", f"{steps:,} of {rows / max(steps, 1):,.0f} rows"),
        ("rows a second, training as a whole", f"{rows / seconds:,.0f}"),
        ("rows a second, in step()", f"{rows / max(sum(outcome.training.step), 1e-9):,.0f}"),
    ]
    if outcome.stats is None:
        return found
    tables = outcome.stats.tables
    hits, misses = sum(t.hits for t in tables), sum(t.misses for t in tables)
    first = sum(t.first_touches for t in tables)
    written, read = sum(t.bytes_written for t in tables), sum(t.bytes_read for t in tables)
    return [
        *found,
        ("rows found in the cache", f"{hits:,} ({hits / max(hits + misses, 1):.1%})"),
        ("cold rows read from disk", f"{misses:,} ({format_bytes(read)})"),
        ("rows touched for the first time", f"{first:,}"),
        ("bytes written", f"{format_bytes(written)}, {written / max(rows, 1):,.0f} an updated row"),
    ]


def _time(outcome: Outcome) -> Rows:
    last = outcome.last_pass
    if not last.step:
        return []
    name = "momentd.SparseAdam" if outcome.stats is not None else "torch.optim.SparseAdam"
    found = [
        (f"{name}.step(), last pass", _spread(last.step)),
        (
            "  beside it, in the mean",
            f"sampling {_mean_ms(last.sample)}, forward {_mean_ms(last.forward)}, "
            f"backward {_mean_ms(last.backward)}",
        ),
    ]
    if outcome.in_turns is not None and outcome.in_turns[0].step:
        ours, theirs = (timing.step for timing in outcome.in_turns)
        found += [
            (f"{len(ours)} more steps in turns: momentd", _spread(ours)),
            ("  torch.optim.SparseAdam, all in memory", _spread(theirs)),
            ("  torch / momentd", f"{statistics.median(theirs) / statistics.median(ours):.2f}"),
        ]
    return found


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    slow = ordered[int(0.9 * (len(ordered) - 1))]
    return f"median {statistics.median(ordered) * 1e3:.1f} ms, 90th percentile {slow * 1e3:.1f} ms"


def _mean_ms(seconds: list[float]) -> str:
    return f"{statistics.fmean(seconds) * 1e3:.1f} ms"
