"""A daemon in this process over the numpy engine, and one client of each plane."""

import os
from pathlib import Path

import pytest

from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, LocalClient, make_config, serving


@pytest.fixture
def engine():
    return NumpyEngine()


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


@pytest.fixture
def daemon(config, engine):
    with serving(config, engine) as daemon:
        yield daemon


@pytest.fixture
def socket_path(daemon, tmp_path):
    return tmp_path / "m.sock"


@pytest.fixture
def grpc_target(daemon, tmp_path):
    return f"unix:{tmp_path}/m.sock.grpc"


@pytest.fixture
def local(socket_path):
    with LocalClient(socket_path, arena_bytes=16 << 20) as client:
        yield client


@pytest.fixture
def remote(grpc_target):
    with GrpcClient(grpc_target) as client:
        yield client


@pytest.fixture
def source_environment():
    """Environment of a child process that imports the same sources as this one."""
    root = Path(__file__).parents[3]
    paths = [root, root / "client", root / "server", root / "protos"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
