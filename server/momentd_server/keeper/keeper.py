"""The keeper process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

from momentd_server.config import VERSION, ServeConfig
from momentd_server.keeper import code as sources
from momentd_server.keeper.channel import Channel
from momentd_server.keeper.code import code_version
from momentd_server.obs.logs import log

# Seconds before each further start of an engine that does not get as far as serving.
_BACK_OFF_S: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# Engines that may fail to start when only a stop is wanted.
_STOP_TRIES: Final = 3
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """Holds descriptors and runs one engine after the other, in the main thread."""

    def __init__(
        self, config: ServeConfig, engine: Callable[[int, int], int], *, as_json: bool = False
    ) -> None:
        """`engine(channel, lifeline)`: what the child does; two descriptors. Returns a code."""
        self._config = config
        self._as_json = as_json
        self._engine = engine
        self._held: dict[str, int] = {}
        self._pid = 0  # of the engine
        self._own_fds: list[int] = []
        self._failures = 0  # starts since the last one that served
        self._restarts = 0
        self._killed = False
        self._ending: int | None = None  # the exit code that an engine has announced
        self._stops_asked = 0
        # The engine reads it to its end: it ends with this process, however that ends.
        lifeline, self._lifeline = os.pipe()
        self._lifeline_of_engine = lifeline
        self._code_version = code_version()  # of what is on disk now
        self._served = False  # some engine has

    def run(self) -> int:
        """Until an engine ends in order, or may not be followed by another; its exit code."""
        wakeup, wakeup_end = os.pipe()
        os.set_blocking(wakeup_end, False)
        self._own_fds = [wakeup, wakeup_end]
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._received)
        while True:
            code = self._run_engine(wakeup)
            # After an unforeseen end even a stop needs an engine once more: to write what is dirty.
            hopeless = self._stops_asked > 1 or (self._stops_asked and self._failures > _STOP_TRIES)
            # What fails before anybody was served fails again.
            broken = code > 0 and not self._served
            if self._ending is not None or hopeless or broken:
                return code if code >= 0 else 128 - code
            self._prepare_restart(code)
            self._back_off(wakeup)

    # ------------------------------------------------------------------------------- one engine

    def _run_engine(self, wakeup: int) -> int:
        ours, theirs = Channel.pair()
        pid = os.fork()
        if pid == 0:
            self._become_engine(ours, theirs.fileno())
        theirs.close()
        self._pid = pid
        try:
            self._hand_over(ours)
            self._attend(ours, wakeup)
        finally:
            ours.close()
        _, status = os.waitpid(pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _become_engine(self, keepers_end: Channel, channel: int) -> NoReturn:
        """In the forked child: a process of its own, that has what it is given and nothing else."""
        code = 1
        try:
            # A group of its own: Ctrl-C in a terminal reaches the keeper, which passes it on once.
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            keepers_end.close()
            for fd in (*self._held.values(), *self._own_fds, self._lifeline):
                os.close(fd)
            sources.forget_version()
            code = self._engine(channel, self._lifeline_of_engine)
        except BaseException:  # noqa: BLE001  whatever it is, this is not the keeper any more
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _hand_over(self, channel: Channel) -> None:
        with contextlib.suppress(OSError):  # it died at once: its end is seen next
            for name, fd in self._held.items():
                channel.send("held", fd, name=name)
            channel.send(
                "go", config=self._config.plain(), as_json=self._as_json,
                restarts=self._restarts, killed=self._killed, stop=self._stops_asked > 0,
                code_version=self._code_version, version=VERSION,
            )  # fmt: skip

    def _attend(self, channel: Channel, wakeup: int) -> None:
        """Do what the engine says until it has ended."""
        ended = os.pidfd_open(self._pid)
        poll = select.poll()
        for fd in (channel.fileno(), ended, wakeup):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if wakeup in ready:
                    os.read(wakeup, 4096)
                if channel.fileno() in ready:
                    try:
                        self._obey(channel)
                    except (EOFError, OSError):
                        poll.unregister(channel.fileno())
                elif ended in ready:
                    return  # and all that it said has been read
        finally:
            os.close(ended)

    def _obey(self, channel: Channel) -> None:
        message, fd = channel.receive()
        name: str = message.get("name", "")
        match message["op"]:
            case "keep":
                assert fd is not None
                self._release(name)
                self._held[name] = fd
                channel.send("kept")
            case "drop":
                self._release(name)
            case "serving":
                self._failures = 0
                self._served = True
            case "ending":
                self._ending = message["code"]
            case other:
                log.error("unknown_message", op=other)

    def _release(self, name: str) -> None:
        fd = self._held.pop(name, None)
        if fd is not None:
            os.close(fd)

    # ------------------------------------------------------------------------------- its end

    def _prepare_restart(self, code: int) -> None:
        self._killed = code == -signal.SIGKILL
        self._restarts += 1
        self._failures += 1
        log.error(
            "engine_ended", reason=_describe(code), restarts=self._restarts,
            hint="its memory is kept; the next one goes on where it was",
        )  # fmt: skip

    def _back_off(self, wakeup: int) -> None:
        until_s = time.monotonic() + _BACK_OFF_S[min(self._failures - 1, len(_BACK_OFF_S) - 1)]
        while not self._stops_asked and (left_s := until_s - time.monotonic()) > 0:
            if select.select([wakeup], [], [], left_s)[0]:
                os.read(wakeup, 4096)

    def _received(self, number: int, _: FrameType | None) -> Any:
        self._stops_asked += 1
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM if number == signal.SIGHUP else number)


def _describe(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
