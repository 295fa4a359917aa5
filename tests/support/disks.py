"""Small file systems, for tests of what happens when they are full."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 24 MiB. Needs root."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("cannot mount a file system (needs root)")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)
