"""A daemon in a process of its own, as users have it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import momentd
from momentd._session import Session


class ServedProcess:
    """`momentd serve` with a small cache on a fresh directory; `connect` is for optimizers."""

    def __init__(self, path: Path, cache: str) -> None:
        self.address = f"unix:{path}/m.sock"
        self._log = path / "log"
        command = [
            *(sys.executable, "-m", "momentd_server", "serve", "--cache", cache),
            *("--data-dir", str(path / "data"), "--address", self.address),
        ]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self._wait(path / "m.sock")
        self.session = Session(self.address, "test")

    def _wait(self, socket: Path) -> None:
        # The first start on a machine compiles kernels.
        limit = time.monotonic() + 100
        while not socket.exists():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"no daemon: {self._log.read_text()}")
            time.sleep(0.05)

    def connect(self, address, run):
        return self.session

    def totals(self):
        with momentd.connect(self.address) as client:
            return client.stats().totals

    def tables(self) -> int:
        with momentd.connect(self.address) as client:
            return len(client.list_tables())

    def close(self) -> None:
        self.session.close()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(30) == 0, self._log.read_text()
