"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("momentd", "torch", "numpy", "numba", "llvmlite", "grpcio", "protobuf", "lmdb")
REPOSITORY = Path(__file__).parent.parent


def describe(disk: Path) -> dict[str, Any]:
    """CPU, cores, memory, the disk under `disk`, kernel and versions."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _kib("/proc/meminfo", "MemTotal"),
        "memory_available_bytes": _kib("/proc/meminfo", "MemAvailable"),
        "load_average": os.getloadavg()[0],
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "disk": _disk(disk),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def process_memory(pid: int | str) -> dict[str, int]:
    """Resident bytes of a process: `anonymous`, `shared`, `file`."""
    status = f"/proc/{pid}/status"
    keys = {"anonymous": "RssAnon", "shared": "RssShmem", "file": "RssFile"}
    return {name: _kib(status, key) for name, key in keys.items()}


def written_bytes(pid: int) -> int:
    """Bytes that a process has caused to be written to disk, by the kernel's count."""
    return int(_first(f"/proc/{pid}/io", "write_bytes") or 0)


def _first(path: str, key: str) -> str:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _kib(path: str, key: str) -> int:
    return int((_first(path, key) or "0 kB").split()[0]) << 10


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit, with a plus if the working tree differs from it; empty outside a clone."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _disk(path: Path) -> dict[str, str]:
    """Device, file system and model of the disk that holds `path`."""
    device = path.stat().st_dev
    block = f"{os.major(device)}:{os.minor(device)}"
    for line in _text("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == block:
            kind, source = rest.split()[:2]
            model = _text(f"/sys/dev/block/{block}/device/model")
            return {"device": source, "file_system": kind, "model": model}
    return {"device": block, "file_system": "", "model": ""}


def huge_page_bytes(pid: int) -> int:
    """Bytes of a process that lie in huge pages now, shared and private ones."""
    names = ("AnonHugePages:", "ShmemPmdMapped:")
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
