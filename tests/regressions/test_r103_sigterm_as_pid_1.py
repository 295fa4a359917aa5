"""R103: process 1 of a container ignores signals without a handler and is killed after 10 s."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.planes import LocalClient

ROOT = Path(__file__).parents[2]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a pid namespace")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_sigterm_stops_process_1_in_order(tmp_path):
    paths = [ROOT, ROOT / "client", ROOT / "server", ROOT / "protos"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "tests.support.numpy_daemon", str(tmp_path)]
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as outer:  # fmt: skip
        ready = outer.stdout.readline()
        if not ready and "Operation not permitted" in (refusal := outer.stderr.read()):
            pytest.skip(refusal.strip())
        assert '"pid": 1,' in ready
        with LocalClient(tmp_path / "m.sock") as client:
            client.open_table(name="kept")
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        began = time.monotonic()
        os.kill(int(children[0]), signal.SIGTERM)
        _, errors = outer.communicate(timeout=20)
    assert time.monotonic() - began < 8
    assert outer.returncode == 0
    assert '"event": "stopped", "clean": true' in errors
