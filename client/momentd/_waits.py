"""Waiting for a daemon: bounded, spoken about after two seconds, interruptible."""

from __future__ import annotations

import sys
import time
from typing import Final

from momentd_wire.addresses import TIMEOUT_VARIABLE
from momentd_wire.errors import DaemonUnavailable

# Blocking reads wake up this often to look at the clock.
TICK_S: Final = 0.25
NOTICE_S: Final = 2.0
# A slow step says so, but not every slow step does.
NOTICE_AGAIN_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0

_last_notice_s: dict[str, float] = {}


def say(text: str) -> None:
    """One line for the person at the terminal or notebook."""
    sys.stderr.write(f"momentd: {text}\n")
    sys.stderr.flush()


class Patience:
    """How long one call may wait in all, over reconnects and repeats.

    `what` completes "waiting for ..."; `where` is the daemon's address.
    """

    __slots__ = (
        "_pause_s",
        "_quiet_until_s",
        "_started_s",
        "_trouble",
        "timeout_s",
        "what",
        "where",
    )

    def __init__(self, timeout_s: float, what: str, where: str) -> None:
        self.timeout_s = timeout_s
        self.what = what
        self.where = where
        self._started_s = time.monotonic()
        self._quiet_until_s = self._started_s + NOTICE_S
        self._pause_s = FIRST_PAUSE_S
        self._trouble = ""

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 1 ms: zero means "for ever" to some calls."""
        return max(1e-3, self._started_s + self.timeout_s - time.monotonic())

    def extend(self) -> None:
        """The daemon showed progress: count from now on."""
        self._started_s = time.monotonic()
        self._pause_s = FIRST_PAUSE_S

    def tick(self) -> None:
        """Look at the clock. Raises DaemonUnavailable when time is up."""
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._notice(now_s)
        if now_s - self._started_s >= self.timeout_s:
            raise DaemonUnavailable(
                f"gave up after {self.timeout_s:g} s of waiting for {self.what} at {self.where}"
                f"{': ' + self._trouble if self._trouble else ''}; is the daemon running "
                f"(`momentd status`)? ${TIMEOUT_VARIABLE} sets the seconds to wait"
            )

    def pause(self, trouble: object) -> None:
        """Sleep a little before the next attempt; twice as long each time, up to a second."""
        self._trouble = str(trouble)
        self.tick()
        # Awake when the notice is due.
        until_notice_s = self._quiet_until_s - time.monotonic()
        time.sleep(min(self._pause_s, self.remaining_s, max(1e-3, until_notice_s)))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _notice(self, now_s: float) -> None:
        self._quiet_until_s = float("inf")
        key = f"{self.what} {self.where}"
        if now_s < _last_notice_s.get(key, float("-inf")) + NOTICE_AGAIN_S:
            return
        _last_notice_s[key] = now_s
        trouble = f" ({self._trouble})" if self._trouble else ""
        say(
            f"waiting for {self.what} at {self.where}{trouble}; "
            f"gives up after {self.timeout_s:g} s, Ctrl-C interrupts"
        )
