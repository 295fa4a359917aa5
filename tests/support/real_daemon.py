"""The daemon as users start it: `momentd serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class RealDaemon:
    """A daemon over `path`/data, listening at `path`/s. Use as a context manager."""

    def __init__(
        self,
        path: Path,
        *options: str,
        cache: str = "32MiB",
        program: tuple[str, ...] = ("-m", "momentd_server"),
    ) -> None:
        self._program = program
        self.path = path
        self.data_dir = path / "data"
        self.address = f"unix:{path}/s"
        self._options = ("--cache", cache, *options)
        self.process: subprocess.Popen[str] | None = None
        self.errors = ""

    def start(self, **popen) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, *self._program, "serve", "--data-dir", str(self.data_dir),
             "--address", self.address, *self._options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
        )  # fmt: skip
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.errors = self.process.communicate()[1]
            raise AssertionError(f"the daemon did not start: {self.errors}")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Signal it and wait; returns its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            os.kill(self.process.pid, signal_number)
        self.errors = self.process.communicate(timeout=60)[1]
        code, self.process = self.process.returncode, None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
