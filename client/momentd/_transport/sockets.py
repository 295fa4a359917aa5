"""Connecting to the daemon's socket."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from momentd._transport import ConnectionLost
from momentd._waits import TICK_S
from momentd_wire import errors


class _Socket(socket.socket):
    """One that an exception may leave unclosed without a ResourceWarning."""

    def __del__(self) -> None:
        self.close()


def connect(path: str) -> socket.socket:
    """A connected SEQPACKET socket whose reads and writes return after a tick.

    Raises ConnectionLost (nobody listens), PermissionDenied.
    """
    sock = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # The kernel wakes a blocked read up, so that one system call reads and keeps the time.
        tick = struct.pack("ll", 0, int(TICK_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.connect(path)
    except BaseException as error:
        sock.close()
        if isinstance(error, PermissionError):
            raise errors.PermissionDenied(
                f"this user may not use the daemon at unix:{path} ({error.strerror}): its socket "
                f"belongs to uid {_owner(path)}, this process runs as uid {os.getuid()}"
            ) from error
        if isinstance(error, OSError):
            raise ConnectionLost(f"nobody listens at unix:{path} ({error.strerror})") from error
        raise
    return sock


def _owner(path: str) -> str:
    try:
        return str(Path(path).stat().st_uid)
    except OSError:
        return "unknown"
