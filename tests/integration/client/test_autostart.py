"""A daemon is started by whoever needs one first, once, and outlives its starter."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from momentd._session import Session

PROGRAM = """
import sys, time
import numpy as np, momentd
if len(sys.argv) > 1:
    momentd.init(cache=sys.argv[1])
with momentd.connect() as client:
    table = client.open_table(None, rows=1000, dim=8)
    assert table.update([1], np.ones((1, 8)), lr=0.1).step == 1
    print(client.session.hello.pid, client.session.hello.cache_bytes, flush=True)
"""


@pytest.fixture
def environment(tmp_path):
    root = Path(__file__).parents[3]
    paths = [root / "client", root / "server", root / "protos"]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("MOMENTD_", "XDG_"))},
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "MOMENTD_DATA_DIR": str(tmp_path / "data"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    if "XDG_CACHE_HOME" in os.environ:
        environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    (tmp_path / "run").mkdir(mode=0o700)
    yield environment
    stop(tmp_path)


def socket_path(tmp_path):
    return tmp_path / "run" / "momentd" / "momentd.sock"


def stop(tmp_path):
    """End the daemon that a test has had started, if there is one."""
    if not socket_path(tmp_path).exists():
        return
    session = Session(f"unix:{socket_path(tmp_path)}")
    pid = session.hello.pid
    session.close()
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 20
    while socket_path(tmp_path).exists() and time.monotonic() < until:
        time.sleep(0.05)


def start(environment, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out.split(), err


def test_processes_that_start_together_share_one_daemon_that_outlives_them(environment, tmp_path):
    processes = [start(environment, "300MiB") for _ in range(3)]
    found = [finish(process) for process in processes]
    pids = {out[0] for out, _ in found}
    assert len(pids) == 1
    assert {out[1] for out, _ in found} == {str(300 << 20)}
    told = [line for _, err in found for line in err.splitlines() if "started a daemon" in line]
    assert len(told) == 1
    for part in (f"pid {pids.pop()}", "300 MiB", str(tmp_path / "data"), "momentd stop"):
        assert part in told[0]
    (pid, _), err = finish(start(environment))
    assert pid in told[0]
    assert "started" not in err
    # In a session of its own: the end of a terminal or notebook does not reach it.
    assert os.getsid(int(pid)) == int(pid)


def test_a_daemon_that_cannot_start_is_told_with_its_log(environment, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("not ours")
    process = start(environment)
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "DaemonUnavailable" in err
    for part in (str(tmp_path / "data"), "MOMENTD_DATA_DIR", "thesis.tex"):
        assert part in err
    assert (tmp_path / "data" / "thesis.tex").read_text() == "not ours"
