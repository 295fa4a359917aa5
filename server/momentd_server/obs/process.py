"""What the kernel says about processes: memory by kind, identity. /proc, read only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
# Field 22 of /proc/PID/stat, counted behind the command's closing parenthesis (field 3 is 0).
_START_FIELD: Final = 19


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident bytes of this process by kind.

    `anonymous_bytes` is heap, stacks and private maps; `shared_bytes` is memfd and shared memory
    (the space, arenas); `file_bytes` is code and other mapped files.
    """

    anonymous_bytes: int = 0
    shared_bytes: int = 0
    file_bytes: int = 0


def memory_use(status: Path = PROC / "self/status") -> MemoryUse:
    """Resident bytes now, from /proc/self/status; zeros where the kernel does not say."""
    kib: dict[str, int] = {}
    for line in status.read_text("ascii", "replace").splitlines():
        if line.startswith("Rss"):
            key, _, value = line.partition(":")
            kib[key] = int(value.split()[0])
    return MemoryUse(
        anonymous_bytes=kib.get("RssAnon", 0) << 10,
        shared_bytes=kib.get("RssShmem", 0) << 10,
        file_bytes=kib.get("RssFile", 0) << 10,
    )


def bytes_written(io: Path = PROC / "self/io") -> int:
    """Bytes that this process caused to be written to disks; 0 where the kernel does not say."""
    try:
        lines = io.read_text("ascii").splitlines()
    except OSError:  # not everywhere readable, e.g. in some containers
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Identity of this boot of the machine; empty where the kernel does not say."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is no such process.

    Together with the boot id and the pid it names a process; a pid alone does not.
    """
    try:
        stat = (PROC / str(pid) / "stat").read_text("ascii", "replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[_START_FIELD])
