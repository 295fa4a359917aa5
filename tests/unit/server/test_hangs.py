"""An engine that makes no progress ends; one that does, or has nothing to do, lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WATCHED = """
import itertools, sys, time
from momentd_server.app import HangWatch
counter = itertools.count()
progress = {"stuck": lambda: 7, "busy": lambda: next(counter), "idle": lambda: None}[sys.argv[1]]
watch = HangWatch(progress, limit_s=0.5)
watch.start()
time.sleep(2)
watch.stop()
print("alive")
"""


@pytest.mark.parametrize("kind", ["stuck", "busy", "idle"])
def test_a_hang_ends_the_process_with_all_stacks(kind):
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, kind], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    if kind == "stuck":
        assert done.returncode == 1
        assert "most recent call first" in done.stderr
    else:
        assert done.stdout == "alive\n", done.stderr
