"""R101: a stale pid file. The address is a kernel lock; what the file says is for people only."""

import os
import signal
import subprocess
import sys

import pytest

from momentd_server.rpc.socket_path import SocketPath
from momentd_wire import errors


@pytest.fixture
def innocent():
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        assert process.poll() is None, "somebody signalled it"
        process.stdin.close()


@pytest.mark.parametrize("content", ["1", "own", "live", "4194305", "garbage", "", "-1", "\0" * 40])
def test_any_left_over_file_lets_the_daemon_start_and_harms_nobody(tmp_path, innocent, content):
    said = {"own": str(os.getpid()), "live": str(innocent.pid)}.get(content, content)
    (tmp_path / "m.sock.lock").write_text(said)
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        where = SocketPath(tmp_path / "m.sock", shared=False)
        with pytest.raises(errors.DaemonUnavailable, match=f"pid {os.getpid()}"):
            SocketPath(tmp_path / "m.sock", shared=False)
        where.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []
