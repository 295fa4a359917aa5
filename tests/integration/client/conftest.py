"""A daemon in this process over the numpy engine, and the momentd client on each plane."""

import pytest

import momentd
from momentd._session import Session
from tests.support.momentd_daemon import RestartableDaemon


@pytest.fixture
def daemon(tmp_path):
    daemon = RestartableDaemon(tmp_path, max_sessions=2000)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(params=["local", "grpc"])
def address(request, daemon):
    return getattr(daemon, request.param)


@pytest.fixture
def session(address):
    session = Session(address, "test")
    yield session
    session.close()


@pytest.fixture
def client(address):
    with momentd.connect(address, run="test") as client:
        yield client
