"""A limit of memory for one daemon: a memory cgroup below our own (version 1 or 2; needs root)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from .harness import Skipped

_MOUNT = Path("/sys/fs/cgroup")
_EMPTY_S = 5.0


class MemoryLimit:
    """A cgroup that holds `limit_bytes`, page cache included; a context manager.

    It is made below the group that this process is in, whose limits stay in force. The daemon
    enters it by itself (`program`), before its first allocation. Raises Skipped where no
    group can be made: a run without the limit would not be the case that is asked for.
    """

    def __init__(self, limit_bytes: int) -> None:
        parent, version_1 = _own_group(Path("/proc/self/cgroup").read_text())
        self.group = parent / f"momentd-benchmark-{os.getpid()}"
        limit, peak = ("memory.max", "memory.peak")
        if version_1:
            limit, peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        self._limit, self._peak = self.group / limit, self.group / peak
        self.limit_bytes = limit_bytes

    @property
    def program(self) -> tuple[str, ...]:
        """For `OwnDaemon(program=...)`."""
        return ("-m", "benchmarks.limited_daemon", str(self.group))

    @property
    def peak_bytes(self) -> int:
        """The most that the group has held."""
        return int(self._peak.read_text())

    def __enter__(self) -> Self:
        try:
            self.group.mkdir()
        except OSError as error:
            raise self._refused(error) from error
        try:
            self._limit.write_text(str(self.limit_bytes))
        except OSError as error:
            self.group.rmdir()
            raise self._refused(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        # A process that has just ended may still be counted for a moment.
        deadline = time.monotonic() + _EMPTY_S
        while (self.group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.group.rmdir()

    def _refused(self, error: OSError) -> Skipped:
        return Skipped(
            f"cannot limit memory to {self.limit_bytes} bytes in {self.group}: {error.strerror}; "
            "run as root where the memory controller may be used"
        )


def _own_group(text: str) -> tuple[Path, bool]:
    """The memory cgroup of a process by its /proc/PID/cgroup, and whether it is of version 1."""
    unified = ""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _MOUNT / "memory" / path.lstrip("/"), True
        if not controllers:
            unified = path
    return _MOUNT / unified.lstrip("/"), False
