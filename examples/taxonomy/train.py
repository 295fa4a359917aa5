"""Trains an embedding of the NCBI taxonomy; run it by `python -m examples.taxonomy` or `make demo`.

The one line that matters is in `_open_optimizer`: `momentd.SparseAdam` stands where
`torch.optim.SparseAdam` would.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn

import momentd
from examples.own_daemon import DaemonFailed, OwnDaemon
from momentd_wire.errors import MomentdError
from momentd_wire.v1 import momentd_pb2 as pb

from . import data, report
from .evaluation import HeldOut, Metrics, baseline, evaluate, hold_out
from .model import make_embedding
from .options import GOAL_PASSES, Options, parse
from .sampling import Batch, Sampler
from .training import PassResult, Timing, time_in_turns, train_pass


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 if the goal was reached or could not be judged, 1 if it was missed."""
    console = Console()
    options = parse(arguments)
    try:
        return _run(options, console)
    except (data.DataMissing, DaemonFailed, MomentdError, ValueError) as error:
        Console(stderr=True).print(f"[red]Error:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return 130


def _run(options: Options, console: Console) -> int:
    began = time.perf_counter()
    tree, held_out = _read(options, console)
    with console.status("Drawing the embedding"):
        embedding = make_embedding(len(tree), options.dim, seed=options.seed, device=options.device)
    sampler = Sampler(
        tree,
        held_out.forbidden,
        batch=options.batch,
        ancestors=options.ancestors,
        negatives=options.negatives,
        seed=options.seed,
    )
    scores = [
        ("more descendants first", baseline(tree, held_out)),
        ("before training", evaluate(embedding.weight, held_out)),
    ]
    with _open_optimizer(embedding, options, console) as (optimizer, daemon):
        passes = _train(embedding, optimizer, sampler, held_out, scores, options, console)
        stats = _stats(daemon)
        outcome = _measure(embedding, optimizer, sampler, passes, stats, options, console)
    console.print(report.metrics_table(scores))
    console.print(report.closing_table(outcome))
    console.print(f"In all {time.perf_counter() - began:.0f} s.")
    return _judge(options, passes, scores, console)


def _read(options: Options, console: Console) -> tuple[data.Tree, HeldOut]:
    with console.status("Reading the taxonomy"):
        tree = data.load()
        if options.rows is not None and options.rows < len(tree):
            tree = tree.clades(options.rows, options.seed)
    console.print(
        f"The tree: {len(tree):,} nodes, {len(tree.internal):,} of them internal, "
        f"depth {tree.depth.max()}."
    )
    held_out = hold_out(tree, pairs=options.pairs, matched=options.matched, seed=options.seed)
    return tree, held_out


@contextmanager
def _open_optimizer(
    embedding: nn.Embedding, options: Options, console: Console
) -> Iterator[tuple[torch.optim.Optimizer, OwnDaemon | None]]:
    if options.optimizer == "torch":
        yield torch.optim.SparseAdam(embedding.parameters(), lr=options.lr), None
        return
    with ExitStack() as stack:
        with console.status("Starting a daemon (the first time, kernels are compiled: 20 s)"):
            daemon = stack.enter_context(OwnDaemon(options.cache, work_dir=options.work_dir))
        console.print(
            f"The daemon: pid {daemon.pid}, a cache of {options.cache} for "
            f"{report.format_bytes(2 * embedding.weight.nbytes)} of state in {daemon.data_dir}."
        )
        optimizer = momentd.SparseAdam(
            embedding.parameters(), lr=options.lr, address=daemon.address, run="taxonomy"
        )
        yield optimizer, daemon
        # Its table goes before the daemon does: nothing of it has to be written at the stop.
        optimizer.close()


def _train(
    embedding: nn.Embedding,
    optimizer: torch.optim.Optimizer,
    sampler: Sampler,
    held_out: HeldOut,
    scores: list[tuple[str, Metrics]],
    options: Options,
    console: Console,
) -> list[PassResult]:
    """Train pass by pass; adds to `scores` what each reached."""
    deadline = None if options.seconds is None else time.perf_counter() + options.seconds
    results: list[PassResult] = []

    def ahead(batches: Iterator[Batch]) -> Iterable[Batch]:
        if not isinstance(optimizer, momentd.SparseAdam):
            return batches
        return momentd.lookahead(batches, {embedding: lambda batch: batch.rows})

    for number in range(1, options.passes + 1):
        with _progress(console) as progress:
            task = progress.add_task(
                f"pass {number}", total=sampler.batches_per_pass, loss=0.0, rate=0.0
            )
            began = time.perf_counter()

            def advance(timing: Timing, loss: float) -> None:
                rate = sum(timing.rows) / (time.perf_counter() - began)  # noqa: B023
                progress.update(task, advance=1, loss=loss, rate=rate)  # noqa: B023

            result = train_pass(
                embedding, optimizer, sampler, deadline=deadline, progress=advance, ahead=ahead
            )
        results.append(result)
        metrics = evaluate(embedding.weight, held_out)
        scores.append((f"after pass {number}" + ("" if result.complete else " (cut)"), metrics))
        console.print(
            f"pass {number}: {len(result.timing.step):,} steps in {result.seconds:.1f} s, "
            f"loss {result.loss:.3f}, MRR {metrics.mrr:.3f}, Hits@10 {metrics.hits:.3f}"
        )
        if not result.complete:
            break
    return results


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} rows/s"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _stats(daemon: OwnDaemon | None) -> pb.StatsReply | None:
    if daemon is None:
        return None
    with momentd.connect(daemon.address) as client:
        return client.stats()


def _measure(
    embedding: nn.Embedding,
    optimizer: torch.optim.Optimizer,
    sampler: Sampler,
    passes: list[PassResult],
    stats: pb.StatsReply | None,
    options: Options,
    console: Console,
) -> report.Outcome:
    training = Timing()
    for result in passes:
        training.extend(result.timing)
    trainer_rss_bytes = report.resident_bytes()
    in_turns = None
    if stats is not None and options.compare_steps and _room_for(2 * embedding.weight.nbytes):
        with console.status("Timing torch.optim.SparseAdam with its moments in memory"):
            in_turns = time_in_turns(
                embedding, optimizer, sampler, steps=options.compare_steps, lr=options.lr
            )
    return report.Outcome(
        weight=embedding.weight,
        optimizer_gpu_bytes=report.gpu_state_bytes(optimizer),
        stats=stats,
        training=training,
        training_s=sum(result.seconds for result in passes),
        last_pass=passes[-1].timing,
        in_turns=in_turns,
        trainer_rss_bytes=trainer_rss_bytes,
    )


def _room_for(nbytes: int) -> bool:
    """Whether this machine has the memory that this comparison takes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10 > 1.2 * nbytes
    return False


def _judge(
    options: Options,
    passes: list[PassResult],
    scores: list[tuple[str, Metrics]],
    console: Console,
) -> int:
    complete = sum(result.complete for result in passes)
    if complete < GOAL_PASSES:
        console.print(f"Not judged: that takes {GOAL_PASSES} passes, this run has {complete}.")
        return 0
    (_, base), (_, before), (_, after) = scores[0], scores[1], scores[-1]
    misses = options.goal.misses(baseline=base, before=before, after=after)
    if misses:
        console.print(f"[red]Goal missed:[/] {'; '.join(misses)}.")
        return 1
    console.print(f"[green]Goal reached:[/] MRR {after.mrr:.3f}, Hits@10 {after.hits:.3f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
