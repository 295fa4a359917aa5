"""Memory that this process may count on: the machine's, or less in a control group."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that could be taken now without swapping, over all enclosing control groups."""
    machine = _machine_bytes(proc / "meminfo")
    groups = [
        free
        for directory, names in _groups(proc / "self" / "cgroup", cgroups)
        if (free := _group_bytes(directory, names)) is not None
    ]
    return max(0, min([machine, *groups]))


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _groups(membership: Path, cgroups: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The control groups of this process and their ancestors, with the names of their files."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups: list[tuple[Path, tuple[str, str, str]]] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        inner = root / path.lstrip("/")
        # In a container the path may be that of the host, of which only the root is visible.
        for directory in (inner, *inner.parents):
            groups.append((directory, names))
            if directory == root:
                break
    return groups


def _group_bytes(directory: Path, names: tuple[str, str, str]) -> int | None:
    """Limit minus what cannot be reclaimed; None without a limit."""
    limit_file, usage_file, cache_key = names
    try:
        limit = (directory / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((directory / usage_file).read_text())
        statistics = (directory / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    reclaimable = sum(
        int(line.split()[1]) for line in statistics if line.startswith(cache_key + " ")
    )
    return int(limit) - usage + reclaimable
