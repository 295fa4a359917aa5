"""The port between sessions and the two planes: calls go out, replies come back.

A `Call` may be posted several times (a lost connection, an exception in the middle): whoever made
it answers for that being harmless, by a sequence number or because it only reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np

from momentd._waits import Patience
from momentd_wire.addresses import DEFAULT_TIMEOUT_S
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Hook: TypeAlias = Callable[[int, int], None]
Regions: TypeAlias = "RepeatedCompositeFieldContainer[pb.Region]"
# After these nothing was changed and the number of the request is free: send it again.
_NOT_FINAL: Final = frozenset(
    {pb.REASON_UNAVAILABLE, pb.REASON_CANCELLED, pb.REASON_SESSION_NOT_FOUND}
)


class ConnectionLost(Exception):
    """The connection is gone; a new one may be made. Says nothing about the call's fate."""


class Block(Protocol):
    """Memory of one call: inputs first, then room for results."""

    nbytes: int

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A writable view of the block from byte `offset` on."""
        ...

    def refer(self, bulk: pb.Bulk, offset: int, nbytes: int) -> None:
        """Let a bulk field of a request name this range."""
        ...

    def target(self, region: pb.Region, offset: int, nbytes: int) -> None:
        """Ask for results in this range (nothing to say on the gRPC plane)."""
        ...

    def target_in(self, regions: Regions, offset: int, nbytes: int) -> None:
        """The same for the next one of a list of regions."""
        ...


class Call:
    """One request and, in the end, its reply. Subclasses with bulk data override the hooks."""

    def __init__(self, request: pb.Request | None = None, nbytes: int = 0) -> None:
        self.request = request
        self.nbytes = nbytes
        self.block: Block | None = None
        # The transport that certainly has it. A post that was broken off leaves this as it was.
        self.on: Transport | None = None
        self.reply: pb.Reply | None = None
        # table index -> distinct rows finished so far.
        self.progress: dict[int, int] = {}
        # How many engines had taken the connection over when it was posted last (local plane).
        self.takeovers = 0
        # What the gRPC plane has in work.
        self.attempt: Any = None
        # Held; released to wake a thread that waits while another one reads. A bare lock: an
        # exception inside threading.Event or Condition can leave their locks held.
        self.wake: threading.Lock | None = None
        # Deadline of one attempt where the plane has deadlines.
        self.timeout_s = DEFAULT_TIMEOUT_S

    @property
    def settled(self) -> bool:
        """Whether there is an answer that repeating the call would not change."""
        reply = self.reply
        return reply is not None and not (
            reply.HasField("error") and reply.error.reason in _NOT_FINAL
        )

    def build(self, block: Block | None) -> pb.Request:
        """The request, with its bulk fields naming ranges of `block`."""
        del block
        if self.request is None:
            raise TypeError("a call without a request must override build()")
        return self.request

    def fill(self, block: Block) -> None:
        """Write the bulk inputs into a block that was never used for this call."""

    def sources(self) -> list[np.ndarray]:
        """The bulk inputs in wire order, for the gRPC plane."""
        return []

    def sink(self, table: int, field: str) -> np.ndarray | None:
        """Where a bulk field of the reply goes, for the gRPC plane: a view with room enough."""
        del table, field
        return None

    def prepare(self, transport: Transport) -> None:
        """Make the request fit for a transport; the memory of an earlier one is copied."""
        if self.nbytes and not (self.block is not None and transport.owns(self.block)):
            block = transport.allocate(self.nbytes)
            self.fill(block)
            # In this order: an exception in between must not leave a request for other memory.
            self.request = None
            self.block = block
        if self.request is None:
            self.request = self.build(self.block)

    def again(self) -> None:
        """Forget the reply, so that the call is posted anew."""
        # The reply last: a waiting call without reply and transport is simply posted.
        self.on = None
        self.attempt = None
        self.reply = None


class Transport(Protocol):
    """One connection. Thread-safe. Methods may be left by an exception at any instruction."""

    plane: ClassVar[str]

    @property
    def lost(self) -> bool:
        """Whether this connection is of no use any more."""
        ...

    def welcome(self, hello: pb.HelloReply) -> None:
        """What the daemon said: limits, and the session that later calls belong to."""
        ...

    def owns(self, block: Block) -> bool:
        """Whether the daemon at the other end can reach this memory."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Memory that nobody else uses while the block is referenced. Raises LimitExceeded."""
        ...

    def post(self, call: Call) -> None:
        """Send a prepared call. Raises ConnectionLost."""
        ...

    def advance(self, call: Call, patience: Patience) -> None:
        """Block until the call has a reply, or more progress. Raises ConnectionLost."""
        ...

    def announce_to(self, mapped: Hook, unmapped: Hook | None) -> None:
        """Tell a new hook of the arenas that were announced before it came (local plane)."""
        ...

    def close(self, *, resume: bool = False) -> None:
        """End the connection, and the session unless it is to be resumed. Idempotent."""
        ...

    def abandon(self) -> None:
        """In a forked child: let go of inherited descriptors without a word to the daemon."""
        ...
