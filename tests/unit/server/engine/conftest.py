from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disks import small_disk
from tests.support.local_engine import open_session, start_engine

__all__ = ["small_disk"]


@pytest.fixture
def engine(tmp_path: Path):
    engine = start_engine(tmp_path)
    yield engine
    engine.stop(discard=True)
    engine.close()


@pytest.fixture
def session(engine):
    return open_session(engine)
