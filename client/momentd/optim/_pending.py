"""One step from the moment it is sent until its deltas are in the weights, exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from momentd import _cuda
from momentd._apply import add_rows
from momentd._signals import DeferredInterrupt
from momentd._stream import PendingUpdate
from momentd.errors import MomentdError
from momentd.optim._records import Record


@dataclass(slots=True)
class Part:
    """One parameter of a pending step.

    `index` is its place among the update's tables, None if its gradient was empty. `applied` counts
    the result rows that are in the weight.
    """

    param: Tensor
    record: Record
    step: int
    index: int | None
    applied: int = 0


class PendingStep:
    """A step that was, or may have been, sent.

    `complete` may be left by an exception anywhere and called again: the update is numbered, so the
    daemon applies it once; `Part.applied` moves together with the weight; counters are absolute.
    """

    def __init__(self, update: PendingUpdate | None, parts: list[Part]) -> None:
        self._update = update
        self._parts = parts
        self._by_index = {part.index: part for part in parts if part.index is not None}
        self._sent = False
        self._committed = False
        self._rejected = False
        self.finished = False
        """Nothing is left to do: the step is in the weights, or the daemon refused it for good."""

    def send(self) -> None:
        """Send it, and wait for nothing."""
        if self._update is not None and not self._sent:
            self._update.send()
            self._sent = True

    @torch.no_grad()
    def complete(self) -> None:
        """Send if need be, wait, add the deltas, advance the counters.

        Raises the daemon's error, which changed nothing, once. After DaemonUnavailable the outcome
        is open: call again.
        """
        update = self._update
        if update is None:
            for part in self._parts:
                part.record.commit(part.step, None)
        elif not self._rejected:
            try:
                self._finish(update)
            except MomentdError:
                # Only what the daemon itself answered is an outcome.
                self._rejected = update.done and not self._committed
                if self._rejected:
                    self._close(update)
                raise
        if update is not None:
            self._close(update)
        self.finished = True

    def _close(self, update: PendingUpdate) -> None:
        # Closing lets the result arrays be reused: copies from them must have ended.
        _cuda.drain()
        update.close()
        self.finished = True

    def _finish(self, update: PendingUpdate) -> None:
        if not self._committed:
            self.send()
            for index, start, stop in update.progress():
                rows, values = update.output(index)
                _apply(self._by_index[index], rows, values, start, stop)
            self._commit(update)
            self._committed = True

    def _commit(self, update: PendingUpdate) -> None:
        for index, result in enumerate(update.results()):
            part = self._by_index[index]
            _apply(part, result.rows, result.values, 0, len(result.rows))
            part.record.commit(part.step, result.update_number)
        for part in self._parts:
            if part.index is None:
                part.record.commit(part.step, None)


def _apply(part: Part, rows: np.ndarray, values: np.ndarray, start: int, stop: int) -> None:
    """Add result rows [start, stop) unless they are in the weight already."""
    start = max(start, part.applied)
    if stop <= start:
        return
    # The weight changes and `applied` moves, or neither.
    with DeferredInterrupt():
        add_rows(part.param, rows[start:stop], values[start:stop])
        part.applied = stop
