"""The local plane: a listening SEQPACKET socket, one thread for each connected process."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Final

from momentd_server.engine.arenas import ArenaBudget
from momentd_server.keeper import Kept
from momentd_server.obs.logs import log
from momentd_server.rpc.connection import KEPT_SOCKETS, Connection, hang_up
from momentd_server.rpc.dispatcher import Dispatcher, Peer
from momentd_server.rpc.socket_path import SocketPath
from momentd_wire import errors
from momentd_wire.errors import PermissionDenied
from momentd_wire.v1 import momentd_pb2 as pb

_UCRED: Final = struct.Struct("iII")
_TIMEVAL: Final = struct.Struct("ll")
# A client that does not take its replies for so long is cut off.
SEND_TIMEOUT_S: Final = 30
# Connections beyond the sessions: `momentd status`, and hellos that are about to be refused.
SPARE_CONNECTIONS: Final = 64


class LocalPlane:
    """Accepts connections from the moment `open` returns until `close`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        where: SocketPath,
        budget: ArenaBudget,
        kept: Kept,
        *,
        allow_uids: frozenset[int],
        max_connections: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._where = where
        self._budget = budget
        self._kept = kept
        self._allow_uids = allow_uids | {0, os.geteuid()}
        self._max_connections = max_connections + SPARE_CONNECTIONS
        self._overflow_uid = _overflow_uid()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the two fields below
        self._connections: dict[Connection, threading.Thread] = {}
        self._closing = False

    def __repr__(self) -> str:
        return f"LocalPlane({self._where.path}, connections={len(self._connections)})"

    def open(self) -> None:
        """Make the socket appear and serve; go on with the connections of an earlier engine."""
        inherited = self._kept.take("listener")
        if inherited is None:
            self._listener = self._where.listen()
            self._kept.keep("listener", self._listener.fileno())
        else:
            self._listener = socket.socket(fileno=inherited)
        for name in self._kept.names(KEPT_SOCKETS):
            self._resume(name)
        self._acceptor = threading.Thread(target=self._accept, name="momentd-accept", daemon=True)
        self._acceptor.start()

    def close(self, deadline_s: float) -> bool:
        """Take no new connection or request, finish those in work until `deadline_s` (monotonic).

        Sessions are kept. Returns whether all connections had ended in time.
        """
        self._where.hide()
        self._kept.drop("listener")
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        if self._listener is not None:
            # Wakes accept(); close() alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.end(keep_session=True)
        threads = [*connections.values(), *([self._acceptor] if self._acceptor else [])]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
        return not any(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors, most likely: others may end theirs.
                log.warning("accept_failed", error=str(error))
                time.sleep(0.1)
                continue
            try:
                self._admit(sock)
            except Exception as error:  # noqa: BLE001  # no thread to be had: others may still come
                log.error("connection_not_admitted", cause=error)
                sock.close()

    def _resume(self, name: str) -> None:
        """The connection of a session that an earlier engine had."""
        fd = self._kept.take(name)
        assert fd is not None
        sock = socket.socket(fileno=fd)
        session = self._dispatcher.session(bytes.fromhex(name.removeprefix(KEPT_SOCKETS)))
        if session is None:  # it was being ended
            self._kept.drop(name)
            hang_up(sock)
            return
        pid, uid = _credentials(sock)
        connection = Connection(
            sock, Peer("local", pid, uid), self._dispatcher, self._budget, self._kept
        )
        connection.resume(session)
        self._start(connection, pid)

    def _admit(self, sock: socket.socket) -> None:
        """Give a connection its thread, or an error and the door."""
        pid, uid = _credentials(sock)
        timeout = _TIMEVAL.pack(SEND_TIMEOUT_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        refusal = self._refusal(uid)
        if refusal is not None:
            log.warning("connection_refused", uid=uid, pid=pid, reason=refusal.message)
            _turn_away(sock, refusal)
            return
        connection = Connection(
            sock, Peer("local", pid, uid), self._dispatcher, self._budget, self._kept
        )
        if not self._start(connection, pid):
            sock.close()

    def _start(self, connection: Connection, pid: int) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"momentd-local-{pid}", daemon=True
        )
        with self._lock:
            if self._closing:
                return False
            # Started under the lock: a stop joins all threads that it finds.
            thread.start()
            self._connections[connection] = thread
        return True

    def _refusal(self, uid: int) -> errors.MomentdError | None:
        own_uid = os.geteuid()
        if uid not in self._allow_uids or (uid == self._overflow_uid != own_uid):
            return PermissionDenied(
                f"uid {uid} may not use this daemon of uid {own_uid}: start your own, or ask for "
                f"--allow-uid {uid}",
                uid=uid,
            )
        if len(self._connections) >= self._max_connections:
            return errors.LimitExceeded(
                f"{len(self._connections)} processes are connected, the limit is "
                f"{self._max_connections}: end one, or raise --max-sessions"
            )
        return None

    def _serve(self, connection: Connection) -> None:
        try:
            try:
                connection.serve()
            finally:
                connection.close()
        except Exception as error:  # noqa: BLE001  # one connection must not end the daemon
            log.error("connection_failed", cause=error, connection=repr(connection))
        finally:
            with self._lock:
                self._connections.pop(connection, None)


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the peer, as the kernel says."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _turn_away(sock: socket.socket, error: errors.MomentdError) -> None:
    with contextlib.suppress(OSError):
        sock.send(pb.Reply(error=errors.to_wire(error)).SerializeToString(), socket.MSG_DONTWAIT)
    hang_up(sock)


def _overflow_uid() -> int:
    """The uid that stands for users of other user namespaces: it names nobody."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
    except (OSError, ValueError):
        return 65534
