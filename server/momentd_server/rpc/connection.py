"""One connection of the local plane: packets in, packets out, the session's arenas."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from momentd_server.engine.arenas import ArenaBudget
from momentd_server.engine.sessions import Session
from momentd_server.keeper import Kept
from momentd_server.obs.logs import log
from momentd_server.rpc.bulks import ArenaBulks
from momentd_server.rpc.dispatcher import Dispatcher, Peer, Request
from momentd_wire import limits
from momentd_wire.errors import InvalidArgument, SessionNotFound, UnsupportedFeature
from momentd_wire.v1 import momentd_pb2 as pb

# How the keeper calls the sockets of sessions: this, then the session's id in hex.
KEPT_SOCKETS: Final = "socket/"
# Room for the other fields of a packet that carries a fragment.
_FRAGMENT_BYTES: Final = limits.PACKET_BYTES - 64


def hang_up(sock: socket.socket) -> None:
    """Close a connection so that the peer can still read what was sent to it.

    The kernel resets a peer whose packets are unread at the close, and a reset hides replies.
    """
    with contextlib.suppress(OSError):
        # First no more packets can come in, then those that came are taken.
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1, socket.MSG_DONTWAIT):
            pass
    sock.close()


def _kept_name(session: Session) -> str:
    return KEPT_SOCKETS + session.id.hex()


class Connection:
    """Serves one client process in one thread, packet by packet."""

    def __init__(
        self, sock: socket.socket, peer: Peer, dispatcher: Dispatcher, budget: ArenaBudget,
        kept: Kept,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._peer = peer
        self._dispatcher = dispatcher
        self._budget = budget
        self._kept = kept
        self._session: Session | None = None
        self._attachment = 0
        self._greeted = False
        self._keep_session = False
        self._bulks = ArenaBulks({})

    def __repr__(self) -> str:
        return f"Connection(pid={self._peer.pid}, uid={self._peer.uid}, session={self._session})"

    def resume(self, session: Session) -> None:
        """Go on where an earlier engine was, whose end the peer may not have noticed.

        What it had read of the socket is lost: the peer is told what is done, and repeats the rest.
        """
        self._join(session)
        resumed = self._dispatcher.resumed(session)
        self._send(0, pb.Reply(resumed=resumed).SerializeToString())

    def _join(self, session: Session) -> None:
        self._greeted = True
        self._session = session
        self._bulks = ArenaBulks(session.arenas)
        self._attachment = session.attach()

    def serve(self) -> None:
        """Answer packets until the peer is gone, sends garbage, or `end` is called."""
        # One byte more than allowed, so that a packet that was cut off shows.
        buffer = bytearray(limits.PACKET_BYTES + 1)
        view = memoryview(buffer)
        receive = self._sock.recv_into
        while True:
            try:
                received = receive(buffer)
            except OSError:
                return
            if not received:
                return
            try:
                request = self._parse(view[:received])
            except InvalidArgument as error:
                log.warning("garbage_received", pid=self._peer.pid, error=error.message)
                self._send(0, self._dispatcher.error_body(error))
                return
            if not self._answer(request):
                return

    def end(self, *, keep_session: bool) -> None:
        """Let `serve` return after the request in work. Called from another thread."""
        self._keep_session = keep_session
        try:
            self._sock.shutdown(socket.SHUT_RD)
        except OSError:
            return

    def close(self) -> None:
        """Free the arenas, end the session unless it is kept or another connection has it."""
        session = self._session
        if session is not None:
            self._kept.drop(_kept_name(session))
        hang_up(self._sock)
        if session is None:
            return
        for arena in list(session.arenas.values()):
            self._budget.free(session, arena)
        if session.detach(self._attachment, time.monotonic()) and not self._keep_session:
            self._dispatcher.end_session(session)

    def _parse(self, packet: memoryview) -> pb.Request:
        if packet.nbytes > limits.PACKET_BYTES:
            raise InvalidArgument(
                f"a packet has more than {limits.PACKET_BYTES} bytes: longer requests go into an "
                "arena (Request.oversize)"
            )
        try:
            request = pb.Request.FromString(packet)  # pyright: ignore[reportArgumentType]
            if request.WhichOneof("call") == "oversize":
                inner = pb.Request.FromString(self._bulks.packet(request.oversize))
                inner.id = request.id
                return inner
        except DecodeError as error:
            raise InvalidArgument(
                f"a packet of {packet.nbytes} bytes is not a momentd request: {error}"
            ) from error
        return request

    def _answer(self, request: pb.Request) -> bool:
        """Reply to one request; False if the client does not take its replies."""
        name = request.WhichOneof("call")
        fds: list[int] = []
        try:
            if name == "grow_arena":
                body = self._grow_arena(request.grow_arena, fds)
            elif name == "hello":
                body = self._hello(request)
            elif name == "drop_arena":
                body = self._drop_arena(request)
            elif name is None or name == "oversize":
                raise UnsupportedFeature(
                    "this request is not known to this daemon: it is older than its client"
                )
            elif not self._greeted:
                raise SessionNotFound("say hello first")
            else:
                progress = None
                if name == "update" and request.update.report_progress:
                    progress = self._progress(request.id)
                call = Request(getattr(request, name), self._bulks, progress=progress)
                outcome, _ = self._dispatcher.run(self._session, call)
                body = outcome.body
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            body = self._dispatcher.error_body(error)
        return self._send(request.id, body, fds)

    # ------------------------------------------------------------------------------- own calls

    def _hello(self, request: pb.Request) -> bytes:
        if self._session is not None:
            raise InvalidArgument("hello was said before on this connection")
        reply, session = self._dispatcher.hello(request.hello, self._peer)
        self._greeted = True
        if session is not None:
            self._join(session)
            # Before the peer knows of the session, so that it does not end with this process.
            self._kept.keep(_kept_name(session), self._sock.fileno())
        return pb.Reply(hello=reply).SerializeToString()

    def _grow_arena(self, request: pb.GrowArenaRequest, fds: list[int]) -> bytes:
        arena = self._budget.make(self._need_session(), request.bytes)
        fds.append(arena.fd)
        reply = pb.GrowArenaReply(arena=arena.number, bytes=arena.nbytes)
        return pb.Reply(grow_arena=reply).SerializeToString()

    def _drop_arena(self, request: pb.Request) -> bytes:
        session, number = self._need_session(), request.drop_arena.arena
        arena = session.arenas.get(number)
        if arena is not None:
            self._budget.free(session, arena)
        elif number > session.arenas_made:  # else the answer was lost, and this is the repetition
            raise InvalidArgument(f"this session has no arena {number}")
        return pb.Reply(drop_arena=pb.DropArenaReply()).SerializeToString()

    def _need_session(self) -> Session:
        if self._session is None:
            raise SessionNotFound("arenas belong to a session: say hello first")
        return self._session

    # ------------------------------------------------------------------------------- sending

    def _progress(self, request_id: int) -> Callable[[int, int, int], None]:
        def report(table: int, rows_done: int, rows: int) -> None:
            progress = pb.UpdateProgress(table=table, rows_done=rows_done, rows=rows)
            reply = pb.Reply(id=request_id, progress=progress)
            try:
                # Only a hint: a client that is slow to read it is not waited for.
                self._sock.send(reply.SerializeToString(), socket.MSG_DONTWAIT)
            except OSError:
                return

        return report

    def _send(self, request_id: int, body: bytes, fds: list[int] | None = None) -> bool:
        """Send a reply, in fragments if it is long. `body` is a Reply without its id."""
        # Messages that follow each other are one message: the id need not be put into the body.
        packet = pb.Reply(id=request_id).SerializeToString() + body
        try:
            if len(packet) > limits.PACKET_BYTES:
                self._send_fragments(request_id, packet)
            elif fds:
                socket.send_fds(self._sock, [packet], fds)
            else:
                self._sock.send(packet)
        except OSError as error:
            log.warning("reply_not_sent", pid=self._peer.pid, error=str(error))
            return False
        return True

    def _send_fragments(self, request_id: int, packet: bytes) -> None:
        for start in range(0, len(packet), _FRAGMENT_BYTES):
            stop = start + _FRAGMENT_BYTES
            fragment = pb.ReplyFragment(data=packet[start:stop], last=stop >= len(packet))
            self._sock.send(pb.Reply(id=request_id, fragment=fragment).SerializeToString())
