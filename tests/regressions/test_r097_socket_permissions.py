"""R97: another local user reaches the service. Directory 0700, sockets 0600, TCP on request."""

import os
import stat

import pytest

from momentd_server.rpc.socket_path import SocketPath
from momentd_wire import addresses, errors
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import make_config, serving


def test_modes_under_umask_000(tmp_path):
    umask = os.umask(0)
    try:
        config = make_config(tmp_path, address=addresses.parse(f"unix:{tmp_path}/run/m.sock"))
        with serving(config, NumpyEngine()):
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in [tmp_path / "run", *(tmp_path / "run").iterdir()]
            }
    finally:
        os.umask(umask)
    assert modes == {"run": 0o700, "m.sock": 0o600, "m.sock.grpc": 0o600, "m.sock.lock": 0o600}


def test_tcp_without_tls_or_token_is_refused(tmp_path):
    with pytest.raises(errors.InvalidArgument, match="token"):
        make_config(tmp_path, listen=(addresses.parse("0.0.0.0:7070"),))
    with pytest.raises(errors.InvalidArgument, match="16"):
        make_config(tmp_path, listen=(addresses.parse("0.0.0.0:7070"),), token="short")


def test_a_token_that_would_cross_the_network_in_the_clear_is_noticed(tmp_path):
    outside, inside = addresses.parse("0.0.0.0:7070"), addresses.parse("127.0.0.1:7070")
    token = "x" * 32
    assert make_config(tmp_path, listen=(outside,), token=token).token_in_the_clear
    assert not make_config(tmp_path, listen=(inside,), token=token).token_in_the_clear


def test_a_shared_socket_is_open_to_connect_and_checked_by_uid(tmp_path):
    where = SocketPath(tmp_path / "shared" / "m.sock", shared=True)
    listener = where.listen()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "shared" / "m.sock").stat().st_mode) == 0o666
    listener.close()
    where.close()
