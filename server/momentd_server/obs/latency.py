"""Latency windows and rates: fixed memory, a lock of a few hundred nanoseconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WINDOW: Final = 1024
RATE_S: Final = 10


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Seconds, over the last `WINDOW` samples; zeros before the first."""

    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class LatencyWindow:
    """The last `WINDOW` durations. Thread-safe: deque.append is one atomic step."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    def summary(self) -> LatencySummary:
        samples = sorted(self._samples.copy())
        if not samples:
            return LatencySummary()
        last = len(samples) - 1
        return LatencySummary(
            p50_s=samples[round(0.50 * last)],
            p90_s=samples[round(0.90 * last)],
            p99_s=samples[round(0.99 * last)],
            max_s=samples[last],
        )


class Rate:
    """Amount a second over the last `seconds` whole seconds, and the amount in all."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, seconds: int = RATE_S
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the three fields below
        self._total = 0
        self._second = int(clock())
        # One bin a second; the bin of second s is s % len. One bin more than is summed, because
        # the current second is not over.
        self._bins = [0] * (seconds + 1)

    @property
    def total(self) -> int:
        return self._total

    def add(self, amount: int) -> None:
        with self._lock:
            self._advance_locked()
            self._total += amount
            self._bins[self._second % len(self._bins)] += amount

    def per_second(self) -> float:
        """Mean over the last `seconds` finished seconds."""
        with self._lock:
            self._advance_locked()
            current = self._bins[self._second % len(self._bins)]
            return (sum(self._bins) - current) / self._seconds

    def _advance_locked(self) -> None:
        """Empty the bins of seconds that began since the last call."""
        now = int(self._clock())
        for second in range(max(self._second + 1, now - self._seconds), now + 1):
            self._bins[second % len(self._bins)] = 0
        self._second = now
