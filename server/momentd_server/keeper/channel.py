"""What keeper and engine say to each other: JSON packets, one descriptor with some of them.

keeper to engine, at its start:  held (name, + descriptor) for each; then go (config, ...)
engine to keeper:                keep (name, + descriptor), answered by kept; drop (name);
                                 serving; ending (code): the exit that follows is meant
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final

PACKET_BYTES: Final = 64 * 1024


class Channel:
    """One end of a SEQPACKET pair. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """The keeper's end, and the engine's as a socket that it inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, op: str, fd: int | None = None, **fields: Any) -> None:
        """Raises OSError if the other end is gone."""
        packet = json.dumps({"op": op, **fields}).encode()
        socket.send_fds(self._sock, [packet], [] if fd is None else [fd], socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next packet and its descriptor. Raises EOFError when the other end is gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, 1)
        except ConnectionResetError:
            raise EOFError from None
        if not packet:
            raise EOFError
        for fd in fds:
            os.set_inheritable(fd, False)
        return json.loads(packet), fds[0] if fds else None

    def close(self) -> None:
        self._sock.close()
