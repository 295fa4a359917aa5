"""What the kernel says about processes and memory: /proc and the cgroup file system, read only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
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


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that this process may still take: the machine's, or less where its cgroup says so.

    Page cache that can be dropped counts as available.
    """
    return min([_machine_available_bytes(proc), *_cgroup_available_bytes(proc, cgroup)])


def _machine_available_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes(proc: Path, cgroup: Path) -> list[int]:
    """What each memory cgroup above this process leaves; empty where none has a limit."""
    found: list[int] = []
    for base, limit_name, used_name in _memory_groups(proc, cgroup):
        try:
            limit = (base / limit_name).read_text("ascii").strip()
            used = int((base / used_name).read_text("ascii"))
            # Version 1 writes "no limit" as a number near 2^63.
            if limit != "max" and int(limit) < 1 << 60:
                found.append(max(0, int(limit) - used + _file_cache_bytes(base)))
        except (OSError, ValueError):
            continue
    return found


def _memory_groups(proc: Path, cgroup: Path) -> list[tuple[Path, str, str]]:
    """Directories of the memory controller from this process's group up, with their file names."""
    try:
        lines = (proc / "self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    groups: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / path.lstrip("/")
        # In a container the path may not exist below its own root; the root is then the group.
        chain = [own, *own.parents] if own.is_dir() else [root]
        groups += [(base, *names) for base in chain if base == root or root in base.parents]
    return groups


def _file_cache_bytes(base: Path) -> int:
    """Droppable page cache charged to a cgroup."""
    for line in (base / "memory.stat").read_text("ascii").splitlines():
        key, _, value = line.partition(" ")
        if key in {"inactive_file", "total_inactive_file"}:
            return int(value)
    return 0
