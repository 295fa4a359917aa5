"""Calls that change something beside updates: numbered like them, completed like them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from momentd._transport import Block, Call
from momentd_wire.errors import DaemonUnavailable, InternalError, MomentdError, StateRolledBack
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd._session import Session


_Wrapped = TypeVar("_Wrapped")
# Replies that name a new table.
_MAKING: Final = ("open_table", "clone_table", "restore_table")


class _Place(NamedTuple):
    """Where the stream is. Replaced as a whole, by one assignment."""

    incarnation: int
    acknowledged: int = 0
    pending: Call | None = None


class Control:
    """The session's own stream: one call after the other, each done exactly once.

    A call that an exception has broken off may or may not have reached the daemon. The next one
    first brings it to its end; a table that it made for nobody is dropped.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._place = _Place(0)
        # Held while a call of this stream is in work. Re-entrant, see Arena._lock.
        self._lock = threading.RLock()

    def run(
        self,
        session: Session,
        request: pb.Request | NumberedCall,
        wrap: Callable[[pb.Reply], _Wrapped],
    ) -> _Wrapped:
        """Do a call; returns `wrap(reply)`.

        Raises the daemon's error. After DaemonUnavailable the call may still be done.
        """
        call = Call(request) if isinstance(request, pb.Request) else request
        with self._lock:
            session.connected()
            self._settle(session)
            place = self._current(session)
            self._number(call, place.acknowledged + 1)
            self._place = place._replace(pending=call)
            result = wrap(self._complete(session, call))
            # Only now: what is broken off before has nobody who knows the result.
            self._acknowledge()
            return result

    def _acknowledge(self) -> None:
        place = self._place
        self._place = _Place(place.incarnation, place.acknowledged + 1)

    def _complete(self, session: Session, call: Call) -> pb.Reply:
        """Bring the pending call to its end. A refusal is acknowledged."""
        place = self._place
        try:
            return session.finish(call, "a reply", place.incarnation)
        except MomentdError as error:
            if call.settled:
                self._acknowledge()
            elif isinstance(error, StateRolledBack):
                # The session is gone, and its numbers with it.
                self._place = place._replace(pending=None)
            raise

    def _settle(self, session: Session) -> None:
        """Complete what an earlier call left behind."""
        call = self._current(session).pending
        if call is None:
            return
        try:
            reply = self._complete(session, call)
        except DaemonUnavailable:
            raise
        except MomentdError:
            return  # its caller is gone
        made = next(
            (getattr(reply, kind).table for kind in _MAKING if reply.HasField(kind)), pb.TableInfo()
        )
        self._acknowledge()
        if made.table.id and not made.name:
            drop = pb.Request(drop_table=pb.DropTableRequest(ids=[made.table.id]))
            self.run(session, drop, lambda _: None)

    def _current(self, session: Session) -> _Place:
        place = self._place
        if place.incarnation != session.incarnation:
            place = self._place = _Place(session.incarnation)
        return place

    def _number(self, call: Call, number: int) -> None:
        sequence = pb.Sequence(stream=self._stream, number=number)
        if isinstance(call, NumberedCall):
            call.sequence = sequence
            return
        request = call.request
        kind = None if request is None else request.WhichOneof("call")
        if kind is None:
            raise InternalError("a call without a request")
        getattr(request, kind).sequence.CopyFrom(sequence)


class NumberedCall(Call):
    """A call that is built for each block, with its number."""

    sequence: pb.Sequence

    def build(self, block: Block | None) -> pb.Request:
        """See `Call.build`."""
        raise NotImplementedError
