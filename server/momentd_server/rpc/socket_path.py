"""The place of the local socket: its directory, its lock, and how the file appears and goes.

Whether a daemon serves an address is decided by a kernel lock on `PATH.lock`, never by a pid or by
the socket file: a file without a holder of the lock is left over and is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from momentd_wire.addresses import GRPC_SUFFIX, SOCKET_PATH_BYTES
from momentd_wire.errors import DaemonUnavailable, InvalidArgument, PermissionDenied

LOCK_SUFFIX: Final = ".lock"
BACKLOG: Final = 128


class SocketPath:
    """One address on the file system, locked from `__init__` to `close`."""

    def __init__(
        self, path: Path, *, shared: bool, lock_fd: int | None = None, pid: int | None = None
    ) -> None:
        """Takes the address. `shared`: other users may connect (their uid is checked then).

        `lock_fd`: holds the lock already; then the socket is not left over, but listened to.
        `pid`: who others are told serves it; default: this process.

        Raises InvalidArgument (path too long), PermissionDenied (a directory others could swap
        files in), DaemonUnavailable (another daemon serves this address).
        """
        self.path: Final = path
        self.grpc_path: Final = Path(f"{path}{GRPC_SUFFIX}")
        self._mode: Final = 0o666 if shared else 0o600
        _check_length(self.grpc_path)
        _make_directory(path.parent, 0o755 if shared else 0o700)
        inherited = lock_fd is not None
        if lock_fd is None:
            lock_fd = _lock(Path(f"{path}{LOCK_SUFFIX}"), pid or os.getpid())
        self.lock_fd = lock_fd
        for stale in (self.grpc_path,) if inherited else (self.path, self.grpc_path):
            self._remove_stale(stale)

    def listen(self) -> socket.socket:
        """Make the socket appear, listening already, with its final mode. Atomic for clients."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        hidden = f".{os.getpid()}.{self.path.name}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(hidden, dir_fd=directory)
            # By way of the open directory: the hidden name may be longer than sun_path allows.
            listener.bind(f"/proc/self/fd/{directory}/{hidden}")
            os.chmod(hidden, self._mode, dir_fd=directory)
            listener.listen(BACKLOG)
            os.rename(hidden, self.path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(directory)
        return listener

    def hide(self) -> None:
        """Remove the socket file: nobody new finds the daemon."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Remove the socket files and give the address back. The lock file stays."""
        self.hide()
        with contextlib.suppress(OSError):
            self.grpc_path.unlink()
        os.close(self.lock_fd)

    def _remove_stale(self, path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            os.close(self.lock_fd)
            raise InvalidArgument(
                f"{path} exists and is not a socket: choose another --address, or remove it"
            )
        path.unlink()


def _check_length(path: Path) -> None:
    nbytes = len(os.fsencode(path))
    if nbytes > SOCKET_PATH_BYTES:
        raise InvalidArgument(
            f"the socket's path {path} has {nbytes} bytes, Linux allows {SOCKET_PATH_BYTES}: "
            "choose a shorter directory, e.g. --address unix:/tmp/momentd/momentd.sock"
        )


def _make_directory(directory: Path, mode: int) -> None:
    """Make the directory with exactly this mode, or check that an existing one can be trusted."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        directory.chmod(mode)  # whatever the umask said
    except FileExistsError:
        _check_directory(directory)
    except OSError as error:
        raise PermissionDenied(
            f"the socket's directory {directory} cannot be made by uid {os.geteuid()}: "
            f"{error.strerror}; choose another --address"
        ) from error


def _check_directory(directory: Path) -> None:
    """Refuse a directory in which another user could replace our socket."""
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidArgument(f"{directory} is not a directory: choose another --address")
    ours = found.st_uid in {0, os.geteuid()}
    open_to_others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if not ours or open_to_others:
        raise PermissionDenied(
            f"the socket's directory {directory} (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}) lets other users replace the socket of uid "
            f"{os.geteuid()}: use a private directory, or chmod 0700 {directory}"
        )


def _lock(path: Path, pid: int) -> int:
    """Take the address's lock. The pid inside is for people only."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise PermissionDenied(
            f"{path} cannot be opened by uid {os.geteuid()}: {error.strerror}; choose another "
            "--address"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise DaemonUnavailable(
            f"another momentd (pid {holder}) serves {path.with_suffix('')}: use that one, stop it "
            "with `momentd stop`, or choose another --address",
            holder=holder,
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{pid}\n".encode(), 0)
    return fd
