"""The training loop. Nothing in it knows where the moments are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .model import batch_loss
from .sampling import Batch, Sampler


@dataclass
class Timing:
    """Seconds of each part of each step, and the rows in it."""

    sample: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def extend(self, other: Timing) -> None:
        for name in ("sample", "forward", "backward", "step", "rows"):
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True)
class PassResult:
    """One pass, or the part of it that fitted the time."""

    timing: Timing
    seconds: float
    loss: float
    complete: bool


class Clock:
    """`split()` gives the seconds since the last call, work on the device included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()

    def split(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def train_pass(
    embedding: nn.Embedding,
    optimizer: torch.optim.Optimizer,
    sampler: Sampler,
    *,
    deadline: float | None,
    progress: Callable[[Timing, float], None],
    ahead: Callable[[Iterator[Batch]], Iterable[Batch]],
) -> PassResult:
    """Train on one shuffled pass, until `deadline` (of `time.perf_counter`) at most.

    `ahead` wraps the batches, so that their rows can be read before they are needed.
    `progress` is told the timing so far and the loss of the last step, after each step.
    """
    timing = Timing()
    losses = 0.0
    began = time.perf_counter()
    batches = iter(ahead(sampler.shuffled_pass()))
    while deadline is None or time.perf_counter() < deadline:
        loss = timed_step(embedding, optimizer, batches, timing)
        if loss is None:
            break
        losses += loss
        progress(timing, loss)
    done = len(timing.step)
    return PassResult(
        timing=timing,
        seconds=time.perf_counter() - began,
        loss=losses / max(done, 1),
        complete=done == sampler.batches_per_pass,
    )


def timed_step(
    embedding: nn.Embedding,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    timing: Timing,
) -> float | None:
    """One step on the next batch; returns its loss, or None if there is no batch left."""
    clock = Clock(embedding.weight.device)
    batch = next(batches, None)
    if batch is None:
        return None
    sample_s = clock.split()
    loss = batch_loss(embedding, batch)
    forward_s = clock.split()
    optimizer.zero_grad()
    loss.backward()
    backward_s = clock.split()
    optimizer.step()
    step_s = clock.split()
    timing.sample.append(sample_s)
    timing.forward.append(forward_s)
    timing.backward.append(backward_s)
    timing.step.append(step_s)
    timing.rows.append(len(batch.rows))
    return float(loss.detach())


def time_in_turns(
    embedding: nn.Embedding,
    ours: torch.optim.Optimizer,
    sampler: Sampler,
    *,
    steps: int,
    lr: float,
) -> tuple[Timing, Timing]:
    """Steps of `ours` and of `torch.optim.SparseAdam` with its moments in memory, one by one.

    Both see the same load of the machine. Changes the embedding: call it when all is judged.
    """
    theirs = torch.optim.SparseAdam(embedding.parameters(), lr=lr)
    timings = Timing(), Timing()
    batches = sampler.shuffled_pass()
    timed_step(embedding, theirs, batches, Timing())
    for moment in ("exp_avg", "exp_avg_sq"):
        # torch takes them from calloc: without this each row's first step would pay page faults.
        theirs.state[embedding.weight][moment].mul_(1.0)
    for _ in range(min(steps, (sampler.batches_per_pass - 1) // 2)):
        for optimizer, timing in zip((ours, theirs), timings, strict=True):
            timed_step(embedding, optimizer, batches, timing)
    return timings
