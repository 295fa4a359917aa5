"""R98: containers have a /dev/shm of 64 MB. Nothing of ours lies there, so its size is no limit."""

import subprocess
import sys

import pytest

SCRIPT = """
import subprocess, sys
from pathlib import Path
import numpy as np
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
import momentd
from tests.support.real_daemon import RealDaemon
with RealDaemon(Path(sys.argv[1]), cache="512MiB") as daemon:
    with momentd.connect(daemon.address) as client:
        table = client.open_table("t", rows=200_000, dim=64, rule=momentd.rules.SparseAdam())
        rows = np.arange(100_000)
        table.update(rows, np.ones((100_000, 64), np.float32), lr=0.1)
        found = table.gather(rows, fields=["exp_avg"])
        assert (found > 0).all()
print("fine", list(Path("/dev/shm").iterdir()))
"""


@pytest.mark.root
def test_large_batches_work_with_a_dev_shm_of_one_megabyte(tmp_path):
    command = ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(tmp_path)]
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("needs a mount namespace of its own (root)")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine []"
