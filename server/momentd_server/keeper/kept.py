"""The engine's side: what it was given at its start, and how it hands things over."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from momentd_server.config import ServeConfig
from momentd_server.keeper.channel import Channel
from momentd_server.keeper.code import code_version
from momentd_wire.errors import Incompatible

_NO_SUCCESSOR: Final = 5
# Above the keeper's, so that the kernel takes the engine first when memory runs out.
_OOM_SCORE_ABOVE: Final = 200


class Kept:
    """Descriptors by name. This one is of an engine without a keeper: nothing outlives it."""

    # How often an engine was started on this memory before, and whether the last one was killed.
    restarts = 0
    killed = False
    stop_asked = False  # before this engine was there

    def __init__(self) -> None:
        self.pid = os.getpid()  # of the process that stands for the daemon

    def take(self, name: str) -> int | None:
        """The inherited descriptor of this name, which is the caller's from now on."""
        del name
        return None

    def names(self, prefix: str) -> list[str]:
        """Names of inherited descriptors that nobody has taken yet."""
        del prefix
        return []

    def keep(self, name: str, fd: int) -> None:
        """Hand a copy over; it is held when this returns."""

    def drop(self, name: str) -> None:
        """It need not be held any more."""

    def watch(self, keeper_gone: Callable[[], None]) -> None:
        """Call back when the keeper has died, in a thread of its own."""

    def serving(self) -> None:
        """The engine serves: a start that got so far was a success."""

    def ending(self, code: int) -> None:
        """The exit that follows is meant: no engine is to be started after it."""


@dataclass(frozen=True, slots=True)
class _Go:
    config: ServeConfig
    as_json: bool
    restarts: int
    killed: bool
    stop: bool


class KeptByKeeper(Kept):
    """Talks to the keeper. Thread-safe."""

    def __init__(self, channel_fd: int, lifeline_fd: int) -> None:
        """Receives everything. Raises Incompatible if the keeper runs other code than this."""
        super().__init__()
        self._channel = Channel(socket.socket(fileno=channel_fd))
        self._lifeline_fd = lifeline_fd
        self._lock = threading.Lock()  # guards the channel: a request and its answer
        self._held: dict[str, int] = {}
        go = self._receive_all()
        self.config: Final = go.config
        self.as_json: Final = go.as_json
        self.restarts = go.restarts
        self.killed = go.killed
        self.stop_asked = go.stop
        self.pid = os.getppid()
        _raise_oom_score()

    def _receive_all(self) -> _Go:
        while True:
            message, fd = self._channel.receive()
            if message["op"] == "go":
                break
            assert fd is not None
            self._held[message["name"]] = fd
        if message["code_version"] != code_version():
            self.ending(_NO_SUCCESSOR)
            raise Incompatible(
                f"momentd was changed on disk while its daemon ran: the memory of version "
                f"{message['version']} cannot be read by the new code. Stop the daemon before "
                "upgrading (`momentd stop`); its live tables are lost, named tables and snapshots "
                "are as of their last commit"
            )
        config = ServeConfig.of(message["config"])
        return _Go(
            config, message["as_json"], message["restarts"], message["killed"], message["stop"]
        )

    def watch(self, keeper_gone: Callable[[], None]) -> None:
        """Call back when the keeper has died, in a thread of its own."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                os.read(self._lifeline_fd, 1)
            keeper_gone()

        threading.Thread(target=wait, name="momentd-lifeline", daemon=True).start()

    def take(self, name: str) -> int | None:
        return self._held.pop(name, None)

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self._held if name.startswith(prefix))

    def keep(self, name: str, fd: int) -> None:
        with self._lock, contextlib.suppress(OSError, EOFError):
            self._channel.send("keep", fd, name=name)
            self._channel.receive()

    def drop(self, name: str) -> None:
        self._say("drop", name=name)

    def serving(self) -> None:
        self._say("serving")

    def ending(self, code: int) -> None:
        self._say("ending", code=code)

    def _say(self, op: str, **fields: Any) -> None:
        # Without a keeper the engine is about to stop: nobody needs to know.
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(op, None, **fields)


def _raise_oom_score() -> None:
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text()) + _OOM_SCORE_ABOVE, 1000)))
