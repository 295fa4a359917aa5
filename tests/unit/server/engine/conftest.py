from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.local_engine import open_session, start_engine


@pytest.fixture
def engine(tmp_path: Path):
    engine = start_engine(tmp_path)
    yield engine
    engine.stop(discard=True)
    engine.close()


@pytest.fixture
def session(engine):
    return open_session(engine)


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
