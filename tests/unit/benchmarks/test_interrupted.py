"""A benchmark that is interrupted takes its processes and folders with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.own_daemon import OwnDaemon

ENDS_WITHIN_S = 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_benchmark_leaves_neither_daemon_nor_client_nor_data(tmp_path, number):
    work = tmp_path / "work"
    command = [sys.executable, "-m", "benchmarks", "clients", "--scale", "500",
               "--work-dir", str(work), "--results", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as benchmark:
        try:
            started = _wait(lambda: _naming(tmp_path, "benchmarks.client"))
            assert _naming(tmp_path, "serve")
            # To the benchmark alone: a terminal's Ctrl-C would reach the clients as well.
            benchmark.send_signal(number)
            code = benchmark.wait(ENDS_WITHIN_S)
        finally:
            benchmark.kill()

    assert started
    assert code in {128 + number, -number}
    assert not _naming(tmp_path, "serve")
    assert not _naming(tmp_path, "benchmarks.client")
    assert not list(work.iterdir())


def test_a_script_that_fails_ends_its_daemon_and_removes_its_data(tmp_path):
    def script():
        with OwnDaemon("16MiB", work_dir=tmp_path) as own:
            assert own.data_dir.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script()

    assert not _naming(tmp_path, "serve")
    assert not list(tmp_path.iterdir())


def _wait(condition):
    """What `condition` answers once it is true."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {ENDS_WITHIN_S} s"
        time.sleep(0.05)
    return found


def _naming(folder: Path, argument: str) -> list[int]:
    """Processes with this argument and the folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in line and any(bytes(folder) in part for part in line):
                found.append(int(entry.name))
    return found
