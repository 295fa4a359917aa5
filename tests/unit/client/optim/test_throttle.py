"""Idle OpenMP threads sleep beside a daemon: they must not hold the cores that it needs."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
import torch
from momentd import _threads

def cpu_after_a_parallel_operation():
    used = []
    for _ in range(5):
        torch.zeros(1 << 20).add_(1)
        before = time.process_time()
        time.sleep(0.05)
        used.append(time.process_time() - before)
    return min(used)

spinning = cpu_after_a_parallel_operation()
_threads.throttle_idle_threads()
_threads.throttle_idle_threads()  # once is enough
print(spinning, cpu_after_a_parallel_operation())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no idle helpers")
def test_helpers_stop_spinning_after_the_first_step():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True,
        timeout=100, check=True,
    )  # fmt: skip
    spinning, throttled = map(float, done.stdout.split())
    if spinning < 0.0008:
        pytest.skip("this OpenMP does not spin")
    # CPU time, not elapsed time: a busy machine does not change what the helpers use.
    assert throttled < spinning / 3
