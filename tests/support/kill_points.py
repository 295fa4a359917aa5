"""Kills an engine at the n-th line that it executes, and looks at what the next one makes of it.

Engines run in forked children; what a keeper would hold, the test process holds. The lines that
count are those of the engine and the store: a kill falls between any two stores that Python makes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import momentd_server
from momentd_server.keeper import Kept

SERVER = str(Path(momentd_server.__file__).parent)
# Their lines are those of waiting, or of what is made anew by each engine.
PASSED_OVER = ("/jit/", "/obs/", "/rules/", "/schema.py", "/config.py", "/keeper/")


class HeldByTest(Kept):
    """Stands for a keeper: descriptors by name, shared with forked children over a socket pair.

    A child hands descriptors over with its `keep`; `collect` in the parent takes what has arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # socket.recv_fds takes no notice of MSG_DONTWAIT.
        self._ours.setblocking(False)
        self.held: dict[str, int] = {}

    def keep(self, name: str, fd: int) -> None:
        socket.send_fds(self._theirs, [b"+" + name.encode()], [fd])

    def drop(self, name: str) -> None:
        self._theirs.send(b"-" + name.encode())

    def take(self, name: str) -> int | None:
        fd = self.held.get(name)
        return None if fd is None else os.dup(fd)

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.held if name.startswith(prefix))

    def collect(self) -> None:
        """In the parent, after a child has ended."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._ours, 4096, 1)
            except BlockingIOError:
                return
            name = packet[1:].decode()
            old = self.held.pop(name, None)
            if old is not None:
                os.close(old)
            if fds:
                self.held[name] = fds[0]

    def close(self) -> None:
        for fd in self.held.values():
            os.close(fd)
        self._ours.close()
        self._theirs.close()


@dataclass
class LineCounter:
    """Counts executed lines of the engine and the store; kills its process at one of them."""

    kill_at: int  # 0: never
    kill_in: str = ""  # or at the first line of a function of this name
    count: int = 0
    places: list[str] = field(default_factory=list)  # of the lines, if nobody is killed
    _thread: int = 0

    def start(self) -> None:
        """For the calling thread. Other threads do not count: their pace is not the same twice."""
        self._thread = threading.get_ident()
        sys.settrace(self._trace)

    def stop(self) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SERVER) or any(part in name for part in PASSED_OVER):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.kill_at or frame.f_code.co_name == self.kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            if not (self.kill_at or self.kill_in):
                self.places.append(f"{name.removeprefix(SERVER)}:{frame.f_lineno}")
        return self._trace


def in_child(work: Callable[[], object], timeout_s: float = 60.0) -> int:
    """Run `work` in a forked child; returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = int(work() or 0)  # type: ignore[arg-type]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    until_s = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            raise TimeoutError(f"a child has not ended after {timeout_s} s")
        time.sleep(0.002)
