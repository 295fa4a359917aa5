"""Sessions: one connected training process each, with its streams and their last outcomes.

Exactly once: a stream is a counter with one mutating request outstanding. The outcome of the last
number is kept until the next number acknowledges it; a resent request gets the stored outcome.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from momentd_server.obs import process
from momentd_server.storage.catalog import SessionRecord, StreamRecord
from momentd_wire.errors import LimitExceeded, OutOfSequence, SessionNotFound

Plane = Literal["local", "grpc"]
MAX_STREAMS: Final = 1 << 16
SESSION_BYTES: Final = 16
# A longer answer that a client has not fetched is not kept over a restart.
SAVED_OUTCOME_BYTES: Final = 64 << 20
# Body of an outcome whose answer was not kept.
LOST: Final = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished request answers: a serialized reply and the bulk arrays that follow it."""

    body: bytes
    bulk: tuple[np.ndarray, ...] = ()

    @property
    def bulk_bytes(self) -> int:
        return sum(array.nbytes for array in self.bulk)


class StreamState:
    """Position of one stream. `lock` is held while a request of the stream runs."""

    __slots__ = ("fingerprint", "lock", "number", "outcome")

    def __init__(
        self, number: int = 0, fingerprint: bytes = b"", outcome: Outcome | None = None
    ) -> None:
        self.lock = threading.Lock()  # guards the three fields below
        self.number = number  # of the last finished request; 0 before the first
        self.fingerprint = fingerprint
        self.outcome = outcome


class Session:
    """One connected training process.

    `tables` holds the ids of the unnamed tables that end with it; the engine keeps it. The other
    plain attributes are written by the session's own connection only.
    """

    def __init__(
        self, session_id: bytes, *, plane: Plane, pid: int, uid: int, run: str, program: str
    ) -> None:
        self.id: Final = session_id
        self.plane: Final[Plane] = plane
        self.uid: Final = uid
        self.pid = pid
        self.pid_start = process.start_time(pid)
        self.boot_id = process.boot_id()
        self.run = run
        self.program = program
        self.tables: set[int] = set()
        self.arena_bytes = 0
        # Arena numbers are never reused, not even by a restarted daemon.
        self.arenas_made = 0
        self.requests = 0
        self.last_seen_s = time.monotonic()
        self._lock = threading.Lock()  # guards the three fields below
        self._streams: dict[int, StreamState] = {}
        self._attachment = 0  # counts connections; the latest one owns the session
        self._detached_at_s: float | None = self.last_seen_s

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"Session({self.short_id}, {self.plane}, pid={self.pid}, uid={self.uid}, {state})"

    @property
    def short_id(self) -> str:
        """First 8 hex digits, for people. The whole id is a secret."""
        return self.id.hex()[:8]

    @property
    def attached(self) -> bool:
        return self._detached_at_s is None

    @property
    def detached_at_s(self) -> float | None:
        """Since when nobody is connected (monotonic clock); None while somebody is."""
        return self._detached_at_s

    def moved_to(self, pid: int) -> None:
        """Note which process resumed the session."""
        self.pid, self.pid_start = pid, process.start_time(pid)
        self.boot_id = process.boot_id()

    def attach(self) -> int:
        """Make the caller's connection the session's; returns what `detach` asks for."""
        with self._lock:
            self._attachment += 1
            self._detached_at_s = None
            return self._attachment

    def detach(self, attachment: int, now_s: float) -> bool:
        """Note that a connection is gone. False if a later one has taken the session over."""
        with self._lock:
            if attachment != self._attachment:
                return False
            self._detached_at_s = now_s
            return True

    def seen(self) -> None:
        """Count one request."""
        self.requests += 1
        self.last_seen_s = time.monotonic()

    def once(
        self, stream: int, number: int, fingerprint: bytes, call: Callable[[], Outcome]
    ) -> tuple[Outcome, bool]:
        """Run `call` under the next number of a stream, or return the last number's outcome.

        Returns (outcome, whether it was stored). An exception of `call` leaves the number free:
        the same request may be sent again. Errors that are final are outcomes, so they return.

        Raises OutOfSequence for any number but the last (with the same fingerprint) and the next.
        """
        state = self._streams.get(stream) or self._add_stream(stream)
        with state.lock:
            if number == state.number and state.outcome is not None:
                if fingerprint != state.fingerprint:
                    raise OutOfSequence(
                        f"request {number} of stream {stream} was already done with other content; "
                        f"send new content under number {number + 1}",
                        stream=stream, number=number, last=state.number,
                    )  # fmt: skip
                return state.outcome, True
            if number != state.number + 1:
                raise OutOfSequence(
                    f"request number {number} of stream {stream} is out of sequence: the last one "
                    f"done is {state.number}; send number {state.number + 1}",
                    stream=stream, number=number, last=state.number,
                )  # fmt: skip
            # This number acknowledges the one before: its reply is not needed any more.
            state.outcome = None
            outcome = call()
            state.number, state.fingerprint, state.outcome = number, fingerprint, outcome
            return outcome, False

    def done(self) -> list[tuple[int, int]]:
        """(stream, last finished number) of each stream."""
        with self._lock:
            return [(stream, state.number) for stream, state in sorted(self._streams.items())]

    def held_bytes(self) -> int:
        """Bulk bytes of stored outcomes."""
        with self._lock:
            outcomes = [state.outcome for state in self._streams.values()]
        return sum(outcome.bulk_bytes for outcome in outcomes if outcome is not None)

    def save(self) -> SessionRecord:
        """The session as it is now. Call when no request is in work."""
        with self._lock:
            streams = tuple(
                StreamRecord(stream, state.number, state.fingerprint, _pack(state.outcome))
                for stream, state in sorted(self._streams.items())
            )
        return SessionRecord(
            session=self.id, plane=self.plane, pid=self.pid, pid_start=self.pid_start,
            boot_id=self.boot_id, uid=self.uid, run=self.run, program=self.program,
            streams=streams,
        )  # fmt: skip

    @classmethod
    def restore(cls, record: SessionRecord) -> Session:
        """A detached session with the streams it had."""
        session = cls(
            record.session, plane="local" if record.plane == "local" else "grpc", pid=record.pid,
            uid=record.uid, run=record.run, program=record.program,
        )  # fmt: skip
        session.pid_start, session.boot_id = record.pid_start, record.boot_id
        # The client may still name arenas of the daemon's last run, whose numbers were not saved:
        # the clock gives ones that are certainly later.
        session.arenas_made = int(time.time()) & 0x7FFF_FFFF
        session._streams = {
            item.stream: StreamState(item.number, item.fingerprint, _unpack(item.outcome))
            for item in record.streams
        }
        return session

    def process_is_gone(self) -> bool:
        """Whether the client's process has certainly ended. False where that cannot be known."""
        if self.boot_id != process.boot_id():
            return True
        if self.plane != "local" or self.pid <= 0 or self.pid_start == 0:
            return False
        return process.start_time(self.pid) != self.pid_start

    def _add_stream(self, stream: int) -> StreamState:
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise LimitExceeded(
                    f"session {self.short_id} has {len(self._streams)} streams, the limit is "
                    f"{MAX_STREAMS}: use one stream for each optimizer, or a new session",
                    limit=MAX_STREAMS,
                )
            return self._streams.setdefault(stream, StreamState())


@dataclass
class Sessions:
    """All sessions of the daemon. Thread-safe."""

    max_sessions: int = 256
    # How long a session without a connection is kept: gRPC ones, and restored ones.
    attach_grace_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _by_id: dict[bytes, Session] = field(default_factory=dict, repr=False)  # guarded by _lock

    def open(self, *, plane: Plane, pid: int, uid: int, run: str, program: str) -> Session:
        """A new session, detached. Raises LimitExceeded."""
        session = Session(
            secrets.token_bytes(SESSION_BYTES), plane=plane, pid=pid, uid=uid, run=run,
            program=program,
        )  # fmt: skip
        with self._lock:
            if len(self._by_id) >= self.max_sessions:
                raise LimitExceeded(
                    f"{len(self._by_id)} sessions are open, the limit is {self.max_sessions}: end "
                    "a training process, or start the daemon with a higher --max-sessions",
                    limit=self.max_sessions,
                )
            self._by_id[session.id] = session
        return session

    def resume(self, session_id: bytes, *, plane: Plane, uid: int) -> Session | None:
        """The session with this id if it belongs to this user and plane, else None."""
        with self._lock:
            session = self._by_id.get(session_id)
        if session is None or session.plane != plane or session.uid != uid:
            return None
        return session

    def get(self, session_id: bytes) -> Session:
        """The session with this id. Raises SessionNotFound."""
        session = self._by_id.get(session_id)
        if session is None:
            raise SessionNotFound(
                f"session {session_id.hex()[:8] or '(none)'} is unknown or has ended: its tables "
                "were dropped; connect anew and load a checkpoint",
                session=session_id.hex()[:8],
            )
        return session

    def end(self, session_id: bytes) -> Session | None:
        """Take a session out of the registry; None if it was not there (any more)."""
        with self._lock:
            return self._by_id.pop(session_id, None)

    def all(self) -> list[Session]:
        """Sessions in order of opening."""
        with self._lock:
            return list(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def expired(self) -> list[Session]:
        """Detached sessions whose grace is over or whose process is gone. They are not ended."""
        now_s = self.clock()
        return [session for session in self.all() if self._is_expired(session, now_s)]

    def _is_expired(self, session: Session, now_s: float) -> bool:
        since_s = session.detached_at_s
        if since_s is None:
            return False
        # A gRPC client that never attaches lives as long as it calls.
        idle_s = now_s - max(since_s, session.last_seen_s)
        return idle_s > self.attach_grace_s or session.process_is_gone()

    def save(self) -> list[SessionRecord]:
        """All sessions, for an orderly restart. Call when no request is in work."""
        return [session.save() for session in self.all()]

    def restore(self, saved: Iterable[SessionRecord]) -> list[Session]:
        """Take over the sessions of the daemon's last run; returns those whose process is gone.

        The caller ends the returned ones (they are not in the registry) and drops their tables.
        """
        gone: list[Session] = []
        for item in saved:
            session = Session.restore(item)
            if session.process_is_gone():
                gone.append(session)
                continue
            with self._lock:
                self._by_id[session.id] = session
        return gone


def _pack(outcome: Outcome | None) -> bytes:
    """An outcome as one string: number of parts, bytes of each (u64), the parts."""
    if outcome is None:
        return b""
    parts = [outcome.body, *(array.tobytes() for array in outcome.bulk)]
    if sum(map(len, parts)) > SAVED_OUTCOME_BYTES:
        # Its effect is kept and not repeated; only the answer is lost.
        parts = []
    return struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unpack(packed: bytes) -> Outcome | None:
    """The reverse of `_pack`; bulk arrays come back as bytes (uint8): all a reply needs."""
    if not packed:
        return None
    (count,) = struct.unpack_from("<I", packed)
    if not count:
        return Outcome(LOST)
    lengths = struct.unpack_from(f"<{count}Q", packed, 4)
    bounds = np.cumsum([4 + 8 * count, *lengths])
    body, *bulk = (packed[a:b] for a, b in itertools.pairwise(bounds))
    return Outcome(body, tuple(np.frombuffer(part, np.uint8) for part in bulk))
