"""gRPC over TCP: a token, no proxy."""

import numpy as np
import pytest

import momentd
from momentd.errors import PermissionDenied
from momentd_wire import addresses
from tests.support.momentd_daemon import RestartableDaemon

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def address(tmp_path):
    daemon = RestartableDaemon(tmp_path, listen=(addresses.parse("127.0.0.1:0"),), token=TOKEN)
    daemon.start()
    yield f"127.0.0.1:{daemon.daemon.ports[0]}"
    daemon.stop()


def test_a_token_opens_the_port(address, monkeypatch):
    monkeypatch.setenv("MOMENTD_TOKEN", TOKEN)
    # Nothing listens there: a client that asked a proxy would fail.
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with momentd.connect(address) as client:
        table = client.open_table(None, rows=10, dim=4)
        assert table.update([1], np.ones((1, 4)), lr=0.1).step == 1


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_token_the_port_is_closed(address, monkeypatch, token):
    monkeypatch.delenv("MOMENTD_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("MOMENTD_TOKEN", token)
    with momentd.connect(address) as client, pytest.raises(PermissionDenied, match="token"):
        client.stats()
