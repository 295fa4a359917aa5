"""Weights and both moments in three `np.memmap` files, written back by a thread of its own.

The published "disk sparse Adam" design, written from its description: numpy fancy indexing takes
the batch's rows out of each file, the arithmetic is on CPU tensors, and the new rows go to a writer
through a bounded queue. Two things differ, because they make its results wrong: a full queue makes
the step wait (there the update is dropped), and rows that are still in the queue are taken from it
(there they are read stale from the files). The arithmetic is SparseAdam's.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from torch import Tensor, nn

from .base import FILL_ROWS, FILLED, Baseline

NAMES = ("w", "m", "v")
# With more, the writing of a short run would fall into nobody's time.
QUEUED_BATCHES = 2


class Batch:
    """Distinct rows, ascending, and their new contents by file."""

    def __init__(self, rows: np.ndarray, contents: list[np.ndarray]) -> None:
        self.rows = rows
        self.contents = contents

    def overlay(self, rows: np.ndarray, contents: list[np.ndarray]) -> None:
        """Put what this batch has of `rows` into `contents`."""
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        here = np.flatnonzero(self.rows[at] == rows)
        if len(here):
            for mine, theirs in zip(self.contents, contents, strict=True):
                theirs[here] = mine[at[here]]


class MemmapFiles(Baseline):
    """The weights are in a file too: the parameter becomes a mapping of it."""

    def __init__(self, parameter: nn.Parameter, folder: Path, lr: float = 1e-3) -> None:
        super().__init__(parameter, folder, lr)
        shape = (self.rows, self.dim)
        self._files = [
            np.memmap(folder / f"{name}.dat", np.float32, "w+", shape=shape) for name in NAMES
        ]
        for start in range(0, self.rows, FILL_ROWS):
            part = slice(start, start + FILL_ROWS)
            self._files[0][part] = parameter.data[part].numpy()
        parameter.data = torch.from_numpy(self._files[0])
        self._queue: Queue[Batch | None] = Queue(QUEUED_BATCHES)
        # Batches handed to the writer and not yet in the files, the oldest first. Appended to by
        # step(), shortened by the writer; both are single operations on a deque.
        self._pending: deque[Batch] = deque()
        self._failure: BaseException | None = None
        self._writer = threading.Thread(target=self._write, name="memmap-writer", daemon=True)
        self._writer.start()

    def update(self, gradient: Tensor) -> None:
        gradient = gradient.coalesce()
        rows, grad = gradient.indices()[0].numpy(), gradient.values()
        # Taken before the files are read: what leaves the queue meanwhile is then in both.
        pending = list(self._pending)
        contents = [np.asarray(file[rows]) for file in self._files]
        for batch in pending:
            batch.overlay(rows, contents)
        weight, exp_avg, exp_avg_sq = (torch.from_numpy(array) for array in contents)
        hyper = self.hyper()
        exp_avg.add_((grad - exp_avg).mul_(1 - hyper.beta1))
        exp_avg_sq.add_(grad.pow(2).sub_(exp_avg_sq).mul_(1 - hyper.beta2))
        delta = exp_avg / exp_avg_sq.sqrt().add_(hyper.eps)
        weight.add_(delta, alpha=-hyper.step_size(self.steps))
        self._hand_over(Batch(rows, contents))

    def fill(self) -> None:
        for file in self._files[1:]:
            for start in range(0, self.rows, FILL_ROWS):
                file[start : start + FILL_ROWS] = FILLED

    def drain(self) -> None:
        self._queue.join()
        if self._failure is not None:
            raise self._failure

    def sync(self) -> None:
        self.drain()
        for file in self._files:
            file.flush()

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self._files.clear()

    def _hand_over(self, batch: Batch) -> None:
        if self._failure is not None:
            raise self._failure
        self._pending.append(batch)
        self._queue.put(batch)

    def _write(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                for file, content in zip(self._files, batch.contents, strict=True):
                    file[batch.rows] = content
            except BaseException as error:  # noqa: BLE001  raised by the next step
                self._failure = error
            self._pending.popleft()
            self._queue.task_done()
        self._queue.task_done()
