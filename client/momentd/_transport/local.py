"""The local plane: one packet of a SOCK_SEQPACKET socket for each message, bulk rows in arenas.

No thread: of the threads that wait, one reads for all. Whatever may be interrupted is written so
that it can be done again: a packet is taken off the socket and into `_inbox` by one C call, and
leaves `_inbox` only after it was delivered, which is idempotent. That one thread reads is for speed
alone: a reader that was thrown out of its role is replaced after a moment.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from collections import deque
from typing import ClassVar, Final, TypeAlias

import numpy as np

from momentd._arena import FIRST_ARENA_BYTES, Arena, ArenaBlock, round_up
from momentd._transport import Block, Call, ConnectionLost, Hook
from momentd._transport.sockets import connect
from momentd._waits import TICK_S, Patience
from momentd_wire import errors, limits
from momentd_wire.v1 import momentd_pb2 as pb

_RECEIVE_BYTES: Final = (64 * 1024,)
_RECEIVE_ANCILLARY: Final = (socket.CMSG_SPACE(4 * 4),)
# MSG_CMSG_CLOEXEC: a descriptor must not leak into a program that the trainer starts meanwhile.
_RECEIVE_FLAGS: Final = (getattr(socket, "MSG_CMSG_CLOEXEC", 0),)
_SEND_FLAGS: Final = (socket.MSG_NOSIGNAL,)
_UINT8: Final = np.dtype(np.uint8)
# A reader looks at the clock every TICK_S; one that has not for so long was thrown out.
_READER_GONE_S: Final = 2 * TICK_S
_GROW_TIMEOUT_S: Final = 60.0
# What recvmsg returns: data, ancillary data, flags, address.
_Packet: TypeAlias = tuple[bytes, list[tuple[int, int, bytes]], int, object]
_CONNECTION_ERRORS: Final = frozenset(
    {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.EBADF}
)


class LocalTransport:
    """See `Transport`. `hooks` are the (mapped, unmapped) pairs of `Session.on_arena`."""

    plane: ClassVar[str] = "local"

    def __init__(self, path: str, hooks: list[tuple[Hook, Hook | None]] | None = None) -> None:
        """Connects. Raises ConnectionLost if nobody listens, PermissionDenied."""
        self.path = path
        self.lost = False
        self._hooks = [] if hooks is None else hooks
        self._packet_bytes = limits.PACKET_BYTES
        self._arena_limit = 0
        self._ids = itertools.count(1)
        # Calls without their last reply; keeps their blocks from being given out again.
        self._calls: dict[int, Call] = {}
        self._fragments: dict[int, list[bytes]] = {}
        self._inbox: deque[_Packet] = deque()
        # Held while packets are delivered. Re-entrant, see Arena._lock.
        self._inbox_lock = threading.RLock()
        # {0: thread id} while a thread reads. Taken by setdefault, which is atomic; a thread that
        # an exception threw out of reading still has the role when it comes back.
        self._reader: dict[int, int] = {}
        # How often another engine has taken this connection over. Calls posted before that are
        # posted again: what the last engine had read is lost.
        self._takeovers = 0
        # When the reader last showed that it is there (monotonic clock).
        self._read_at_s = 0.0
        self._arenas: tuple[Arena, ...] = ()
        self._socket = connect(path)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "open"
        return f"LocalTransport({self.path}, {state}, arenas={len(self._arenas)})"

    def welcome(self, hello: pb.HelloReply) -> None:
        """See `Transport.welcome`."""
        self._packet_bytes = min(limits.PACKET_BYTES, hello.limits.packet_bytes or 1 << 62)
        self._arena_limit = hello.limits.arena_bytes

    def owns(self, block: Block) -> bool:
        """See `Transport.owns`."""
        return isinstance(block, ArenaBlock) and block.arena in self._arenas

    # ------------------------------------------------------------------------------------ sending

    def post(self, call: Call) -> None:
        """See `Transport.post`."""
        request = call.request
        if request is None:
            raise TypeError("prepare() the call first")
        number = next(self._ids)
        request.id = number
        packet = request.SerializeToString()
        if len(packet) > self._packet_bytes:
            packet = self._oversize(number, packet)
        sent: list[int] = []
        call.takeovers = self._takeovers
        try:
            self._calls[number] = call
            self._send(packet, sent)
        finally:
            if not sent:
                # No reply will come that would let go of its memory.
                self._calls.pop(number, None)
        call.on = self

    def _oversize(self, number: int, packet: bytes) -> bytes:
        block = self.allocate(len(packet))
        block.array(0, (len(packet),), _UINT8)[:] = memoryview(packet)
        request = pb.Request(id=number)
        block.target(request.oversize, 0, len(packet))
        # The daemon copies it before it answers anything; the holder keeps it until then.
        self._calls[-number] = _Holder(block)
        return request.SerializeToString()

    def _send(self, packet: bytes, sent: list[int]) -> None:
        """Send one packet; `sent` is not empty if and only if it is on its way."""
        deadline_s = time.monotonic() + _GROW_TIMEOUT_S
        while True:
            try:
                # One C call: nothing can come between sending and noting it.
                sent.extend(map(self._socket.send, (packet,), _SEND_FLAGS))
            except BlockingIOError:
                # The daemon does not read; its socket buffer is full of other threads' requests.
                if time.monotonic() > deadline_s:
                    raise errors.DaemonUnavailable(
                        f"the daemon at unix:{self.path} has not read from its socket for "
                        f"{_GROW_TIMEOUT_S:g} s"
                    ) from None
            except OSError as error:
                raise self._broken(error) from error
            else:
                return

    def _broken(self, error: OSError) -> Exception:
        if error.errno not in _CONNECTION_ERRORS:
            return error
        self.lost = True
        return ConnectionLost(f"the daemon closed the connection ({error.strerror})")

    # ------------------------------------------------------------------------------------ waiting

    def advance(self, call: Call, patience: Patience) -> None:
        """See `Transport.advance`."""
        seen = dict(call.progress)
        thread = threading.get_ident()
        while call.reply is None and call.progress == seen:
            if call.takeovers != self._takeovers:
                self.post(call)
            try:
                if self._reader.setdefault(0, thread) == thread:
                    self._read(call, seen)
                else:
                    self._follow(call, thread)
            finally:
                self._stop_reading(thread)
                if len(self._calls) > 1:
                    self._wake_others(call)
            if call.reply is None:
                patience.tick()

    def _stop_reading(self, thread: int) -> None:
        # Signal handlers run after calls and backward jumps; between these lines there is none.
        try:
            reader = self._reader[0]
        except KeyError:
            return
        if reader == thread:
            del self._reader[0]

    def _read(self, call: Call, seen: dict[int, int]) -> None:
        """Read and deliver until there is news of `call`, or a tick has passed without any."""
        while True:
            with self._inbox_lock:
                while self._inbox:
                    self._deliver(self._inbox[0])
                    self._inbox.popleft()
            if call.reply is not None or call.progress != seen:
                return
            if call.takeovers != self._takeovers:
                return
            if self.lost:
                raise ConnectionLost("the daemon closed the connection")
            self._read_at_s = time.monotonic()
            try:
                # One C call from the socket into the inbox: no signal handler runs in between.
                self._inbox.extend(
                    map(self._socket.recvmsg, _RECEIVE_BYTES, _RECEIVE_ANCILLARY, _RECEIVE_FLAGS)
                )
            except BlockingIOError:
                return
            except OSError as error:
                self._drain(error)

    def _drain(self, error: OSError) -> None:
        """A reset is reported before what the daemon said last: read that as well."""
        broken = self._broken(error)
        if not isinstance(broken, ConnectionLost):
            raise broken from error
        self._socket.setblocking(False)
        try:
            while not (self._inbox and not self._inbox[-1][0]):
                self._inbox.extend(
                    map(self._socket.recvmsg, _RECEIVE_BYTES, _RECEIVE_ANCILLARY, _RECEIVE_FLAGS)
                )
        except OSError:
            return

    def _follow(self, call: Call, thread: int) -> None:
        """Another thread reads: wait until it has news or stops reading."""
        if call.wake is None:
            # It may stop before it could see the event: look at everything once more first.
            wake = threading.Lock()
            wake.acquire()
            call.wake = wake
            return
        woken = call.wake.acquire(timeout=TICK_S)
        if not woken and time.monotonic() > self._read_at_s + _READER_GONE_S:
            self._reader[0] = thread

    def _wake_others(self, own: Call) -> None:
        for other in list(self._calls.values()):
            if other is not own:
                _wake(other)

    # ------------------------------------------------------------------------------------ delivery

    def _deliver(self, packet: _Packet) -> None:
        """Hand one packet over. May be repeated for the same packet."""
        data, ancillary, _, _ = packet
        if not data:
            self.lost = True
            return
        reply = pb.Reply.FromString(data)
        if reply.HasField("resumed"):
            self._takeovers += 1
            for waiting in list(self._calls.values()):
                _wake(waiting)
            return
        if reply.WhichOneof("result") == "fragment":
            parts = self._fragments.setdefault(reply.id, [])
            if not (parts and parts[-1] is data):
                parts.append(data)
            if not reply.fragment.last:
                return
            whole = b"".join(pb.Reply.FromString(part).fragment.data for part in parts)
            reply = pb.Reply.FromString(whole)
        if reply.HasField("grow_arena"):
            self._map(reply.grow_arena, ancillary)
        call = self._calls.get(reply.id)
        if call is not None:
            self._hand_over(call, reply)

    def _hand_over(self, call: Call, reply: pb.Reply) -> None:
        last = not reply.HasField("progress")
        if not last:
            call.progress[reply.progress.table] = reply.progress.rows_done
        elif call.reply is None:
            call.reply = reply
        _wake(call)
        if last:
            self._fragments.pop(reply.id, None)
            self._calls.pop(-reply.id, None)
            self._calls.pop(reply.id, None)
            if self._takeovers:  # it may have been posted more than once
                for number, other in list(self._calls.items()):
                    if other is call:
                        self._calls.pop(-number, None)
                        self._calls.pop(number, None)

    def _map(self, grown: pb.GrowArenaReply, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Map a new arena at once, whoever asked for it: the daemon counts it from now on."""
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not any(arena.number == grown.arena for arena in self._arenas):
            if not descriptors:
                raise errors.InternalError(
                    "the daemon sent an arena without its descriptor: too many open files in "
                    "this process? (`ulimit -n`)"
                )
            self._arenas = (*self._arenas, Arena(grown.arena, grown.bytes, descriptors[0]))
        ancillary.clear()  # before closing: a second delivery must not close again
        for descriptor in descriptors:
            os.close(descriptor)

    # ------------------------------------------------------------------------------------ arenas

    def allocate(self, nbytes: int) -> ArenaBlock:
        """See `Transport.allocate`. Asks for a larger arena if need be."""
        block = self._place(nbytes)
        while block is None:
            self._grow(nbytes)
            block = self._place(nbytes)
        if len(self._arenas) > 1:
            self._trim(self._arenas[:-1])
        self.announce()
        return block

    def _place(self, nbytes: int) -> ArenaBlock | None:
        # The newest is the largest; the older ones are to become empty.
        for arena in reversed(self._arenas):
            block = arena.place(nbytes)
            if block is not None:
                return block
        return None

    def _grow(self, nbytes: int) -> None:
        least = round_up(nbytes, limits.ARENA_GRANULE)
        wanted = max(FIRST_ARENA_BYTES, least, 2 * self._held_bytes())
        if self._arena_limit and self._held_bytes() + wanted > self._arena_limit:
            self._trim(self._arenas)
            # Rather a small step than none where doubling would pass the limit.
            wanted = max(least, min(wanted, self._arena_limit - self._held_bytes()))
        self._ask(pb.Request(grow_arena=pb.GrowArenaRequest(bytes=wanted)))

    def _held_bytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def _trim(self, arenas: tuple[Arena, ...]) -> None:
        """Give back those that nobody uses (any more: a larger one has replaced them)."""
        for arena in arenas:
            if arena.retire():
                with self._inbox_lock:  # which new arenas come under
                    self._arenas = tuple(other for other in self._arenas if other is not arena)
                self._ask(pb.Request(drop_arena=pb.DropArenaRequest(arena=arena.number)))

    def _ask(self, request: pb.Request) -> None:
        patience = Patience(_GROW_TIMEOUT_S, "an arena", f"unix:{self.path}")
        call = Call(request)
        self.post(call)
        while call.reply is None:
            self.advance(call, patience)
        if call.reply.HasField("error"):
            raise errors.from_wire(call.reply.error)

    def announce(self) -> None:
        """Tell the hooks of arenas they have not seen."""
        for arena in self._arenas:
            if not arena.announced:
                for mapped, unmapped in self._hooks:
                    arena.announce(mapped, unmapped)
                arena.announced = True

    def announce_to(self, mapped: Hook, unmapped: Hook | None) -> None:
        """Tell a new hook of the arenas that were announced before it came."""
        for arena in self._arenas:
            if arena.announced:
                arena.announce(mapped, unmapped)

    # ------------------------------------------------------------------------------------ ending

    def close(self, *, resume: bool = False) -> None:
        """See `Transport.close`. The daemon decides: a local session outlives only a restart."""
        del resume
        self.lost = True
        self._calls = {}
        self._arenas = ()
        with contextlib.suppress(OSError):
            # Wakes a thread that is reading, which closing alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """See `Transport.abandon`. Shutting down would end the parent's connection."""
        self.lost = True
        self._calls = {}
        self._arenas = ()
        self._inbox.clear()
        self._socket.close()


def _wake(call: Call) -> None:
    wake = call.wake
    if wake is not None and wake.locked():
        # Two may have the same idea at once.
        with contextlib.suppress(RuntimeError):
            wake.release()


class _Holder(Call):
    """Keeps a block referenced."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
