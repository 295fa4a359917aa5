"""Starting a daemon for this user, once, however many processes want one at the same time."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from momentd._discovery import Settings, check_private
from momentd._memory import available_bytes
from momentd._transport import ConnectionLost
from momentd._transport.local import LocalTransport
from momentd._waits import Patience, say
from momentd_wire import units
from momentd_wire.addresses import DATA_DIR_VARIABLE, Address
from momentd_wire.errors import DaemonUnavailable

_CACHE_BYTES: Final = (256 << 20, 16 << 30)
_LOG_TAIL_BYTES: Final = 2000


def default_cache_bytes() -> int:
    """A quarter of the memory available to this process's cgroup, 256 MiB to 16 GiB."""
    least, most = _CACHE_BYTES
    return max(least, min(most, available_bytes() // 4)) & ~((1 << 20) - 1)


def start(address: Address, settings: Settings, patience: Patience) -> None:
    """Make sure that a daemon listens at `address`. Raises DaemonUnavailable with its log."""
    if importlib.util.find_spec("momentd_server") is None:
        raise DaemonUnavailable(
            "no daemon is running and none can be started: the package is installed without it. "
            "`pip install 'momentd[server]'`, or give the address of a running one "
            "(address=, momentd.init(address=...), $MOMENTD_ADDRESS)"
        )
    directory = Path(address.target).parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    with _only_one(directory / "autostart.lock", patience):
        # The one that had the lock before us may have started it.
        if not _answers(address):
            _launch(address, settings, directory / "daemon.log", patience)


@contextmanager
def _only_one(path: Path, patience: Patience) -> Generator[None]:
    """Hold an exclusive lock; the kernel gives it back however this process ends."""
    patience.what = "another process that starts the daemon"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                patience.pause("it holds " + str(path))
        yield
    finally:
        os.close(descriptor)


def _answers(address: Address) -> bool:
    try:
        LocalTransport(address.target).close()
    except ConnectionLost:
        return False
    return True


def _launch(address: Address, settings: Settings, log: Path, patience: Patience) -> None:
    data_dir = settings.data_dir
    if data_dir is None:
        raise DaemonUnavailable("no data directory is set")
    cache_bytes = settings.cache_bytes or default_cache_bytes()
    process = _spawn(address, data_dir, cache_bytes, log)
    patience.what = "the new daemon (the first start on a machine compiles kernels, up to 20 s)"
    while not _answers(address):
        code = process.poll()
        if code is not None:
            raise DaemonUnavailable(
                f"the daemon that was started for {data_dir} ended at once (exit code {code}). "
                f"${DATA_DIR_VARIABLE} or momentd.init(data_dir=) choose another directory. "
                f"Its log, {log}, ends with:\n{_tail(log)}"
            )
        patience.pause(f"pid {process.pid}, log {log}")
    # It outlives this process, which need not wait for it: no warning about that at exit.
    process.returncode = 0
    say(
        f"started a daemon (pid {process.pid}, cache {units.format_bytes(cache_bytes)}, data in "
        f"{data_dir}, log {log}); momentd.init(cache=, data_dir=) change that, "
        "`momentd stop` ends it"
    )


def _spawn(
    address: Address, data_dir: Path, cache_bytes: int, log: Path
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        # Not the current directory: a notebook's folder may hold a file named like a module.
        *(["-P"] if not os.environ.get("PYTHONSAFEPATH") else []),
        "-m", "momentd_server", "serve", "--auto",
        "--data-dir", str(data_dir),
        "--cache", str(cache_bytes),
        "--address", str(address),
    ]  # fmt: skip
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(log, flags, 0o600)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            # A notebook restart, or Ctrl-C in the terminal, must not reach it.
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _tail(log: Path) -> str:
    try:
        data = log.read_bytes()[-_LOG_TAIL_BYTES:]
    except OSError as error:
        return f"(unreadable: {error.strerror})"
    return data.decode(errors="replace").strip() or "(nothing)"
