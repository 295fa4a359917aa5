"""The daemon as users start it: `momentd serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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

    @property
    def engine_pid(self) -> int:
        """Of the process that does the work; the other one keeps its memory."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def kill_engine(self) -> int:
        """Returns the pid that was killed."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def crash(self) -> None:
        """Keeper and engine die together, as with the machine: no memory is left."""
        assert self.process is not None
        os.kill(self.pid, signal.SIGSTOP)  # so that it starts no other engine in between
        engine = self.engine_pid
        os.kill(engine, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        self.errors = self.process.communicate(timeout=60)[1]
        self.process = None
        while Path(f"/proc/{engine}").exists():
            time.sleep(0.01)

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Signal it and wait; returns its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None and signal_number == signal.SIGKILL:
            self.crash()
            return -signal.SIGKILL
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
