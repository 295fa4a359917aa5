"""Small file systems, for tests of what happens when they are full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_file_system(where: Path, mib: int) -> Generator[Path]:
    """Mounts a file system of that size in memory, or skips the test: it needs root."""
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(where)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("cannot mount a file system (needs root)")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 24 MiB. Needs root."""
    with small_file_system(tmp_path / "disk", 24) as where:
        yield where
