"""Where the time of a step goes: named intervals, recorded on both sides of the socket.

Functions are wrapped from outside, so that what is measured is the code as it is. Both sides use
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

Interval = tuple[str, float, float]


class Trace:
    """Intervals (name, began, ended) in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Record every call of `owner.attribute` as `name`, for the rest of the process.

        Raises AttributeError if there is no such function: the benchmark must then be adapted.
        """
        setattr(owner, attribute, self._timed(getattr(owner, attribute), name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.intervals.append((name, began, time.monotonic()))

        return timed


def busy_seconds(intervals: Iterable[Interval], began: float, ended: float) -> float:
    """Seconds of [began, ended] in which at least one of the intervals was going on."""
    spans = sorted(
        (max(a, began), min(b, ended)) for _, a, b in intervals if a < ended and b > began
    )
    busy, reached = 0.0, began
    for start, stop in spans:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return busy


def by_name(intervals: Iterable[Interval], began: float, ended: float) -> dict[str, float]:
    """Seconds of each name within [began, ended]; names may overlap each other."""
    found: dict[str, float] = {}
    for name, a, b in intervals:
        if a < ended and b > began:
            found[name] = found.get(name, 0.0) + min(b, ended) - max(a, began)
    return found
