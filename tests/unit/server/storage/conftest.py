import pytest

from momentd_server.storage.datadir import DataDir
from momentd_server.storage.diskio import ReadPool
from tests.support.segments import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "data")
    yield store
    store.close()
    store.datadir.close()


@pytest.fixture
def datadir(tmp_path):
    datadir = DataDir.open(tmp_path / "data")
    yield datadir
    datadir.close()


@pytest.fixture(scope="session")
def pool():
    pool = ReadPool(8)
    yield pool
    pool.close()
