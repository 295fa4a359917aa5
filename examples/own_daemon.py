"""A momentd daemon for the life of one script: its own data directory, socket and cache bound.

A training script needs none of this: `momentd.SparseAdam(...)` finds the user's daemon or starts
one. The demo and the benchmarks want a daemon of known size that leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
# The last lines of its log that an error shows.
LOG_LINES = 15


class DaemonFailed(RuntimeError):
    """The daemon did not start, or ended by itself."""


class OwnDaemon:
    """Starts `python -m momentd_server serve` and stops it again; a context manager.

    `work_dir` is where its data directory is made: a local disk, not a tmpfs. `program` stands for
    `-m momentd_server`, `options` are further ones of `momentd serve`. Raises DaemonFailed with the
    end of its log if it is not ready within a minute.
    """

    def __init__(
        self,
        cache: str,
        *,
        work_dir: Path,
        program: tuple[str, ...] = ("-m", "momentd_server"),
        options: tuple[str, ...] = (),
    ) -> None:
        self.cache = cache
        work_dir.mkdir(parents=True, exist_ok=True)
        self._home = Path(tempfile.mkdtemp(prefix="momentd-", dir=work_dir))
        # A socket's path has at most 107 bytes; the system's temporary directory is short.
        self._sockets = Path(tempfile.mkdtemp(prefix="momentd-"))
        self.data_dir = self._home / "data"
        self.log_path = self._home / "log"
        self.address = f"unix:{self._sockets / 'sock'}"
        self._program = program
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise DaemonFailed("the daemon is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop(orderly=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(orderly=error is None)

    def stop(self, *, orderly: bool = True) -> None:
        """Ask it to stop, kill it if it does not, remove what it wrote.

        Not `orderly`, as after Ctrl-C: end it at once. An orderly stop would first write what is
        in its cache, only for it to be removed.
        """
        try:
            if self._process is not None:
                _end(self._process, orderly=orderly)
        finally:
            shutil.rmtree(self._home, ignore_errors=True)
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, *self._program, "serve"]
        command += ["--data-dir", str(self.data_dir), "--cache", self.cache]
        command += ["--address", self.address, *self._options]
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is the script's: it ends the training first, then the daemon.
                start_new_session=True,
            )
        with _killed_after(self._process, READY_TIMEOUT_S) as late:
            # One line on standard output says that it is ready; end of file says that it is not.
            assert self._process.stdout is not None
            ready = self._process.stdout.readline()
        if not ready:
            reason = f"not ready after {READY_TIMEOUT_S:.0f} s" if late.is_set() else "ended"
            raise DaemonFailed(f"the daemon {reason}; the end of its log:\n{self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (empty)"


def _end(process: subprocess.Popen[str], *, orderly: bool) -> None:
    try:
        if orderly:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also when a signal ends the wait. Does nothing to a process that has ended. The first is
        # the one that would start the other again.
        engines = _children(process.pid)
        process.kill()
        process.wait()
        for engine in engines:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


def _children(pid: int) -> list[int]:
    """The daemon is two processes: the one that was started, and its child that does the work."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@contextmanager
def _killed_after(process: subprocess.Popen[str], timeout_s: float) -> Iterator[threading.Event]:
    """Kill the process if the block takes longer; the event says whether that happened."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, kill)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()
