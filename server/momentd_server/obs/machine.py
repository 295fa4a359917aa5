"""What the machine, or the cgroup around this process, has: memory limit and what is left of it."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def memory_limit_bytes() -> int:
    """Physical memory, or the smallest cgroup limit (v1 or v2) if that is less."""
    limits = [limit for limit, _ in _cgroups()]
    return min([_meminfo("MemTotal"), *limits])


def memory_available_bytes() -> int:
    """What can be taken without swapping or being killed; reclaimable page cache counts as free."""
    left = [limit - used for limit, used in _cgroups()]
    return max(0, min([_meminfo("MemAvailable"), *left]))


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _cgroups() -> list[tuple[int, int]]:
    """(limit, used without reclaimable page cache) of each limited cgroup up to the root."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk(_CGROUP, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _walk(_CGROUP / "memory", path, *names)
    return found


def _walk(root: Path, path: str, limit: str, usage: str, cache: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    # In a container the path is the host's and does not exist below the mount: the mount is ours.
    at = root / path.lstrip("/")
    for directory in [at, *at.parents] if at.is_dir() else [root]:
        pair = _read(directory, limit, usage, cache)
        if pair is not None:
            found.append(pair)
        if directory == root:
            break
    return found


def _read(directory: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    try:
        text = (directory / limit).read_text().strip()
        if text == "max" or int(text) >= 1 << 60:  # v1 writes "no limit" as a huge number
            return None
        used = int((directory / usage).read_text())
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache:
                used -= int(value)
    except (OSError, ValueError):
        return None
    return int(text), used
