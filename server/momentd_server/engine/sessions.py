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
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from momentd_server.obs import process
from momentd_server.storage.catalog import SessionRecord, StreamRecord
from momentd_wire.errors import LimitExceeded, OutOfSequence, SessionNotFound

if TYPE_CHECKING:
    from momentd_server.engine.arenas import Arena
    from momentd_server.engine.ledger import Ledger

Plane = Literal["local", "grpc"]
MAX_STREAMS: Final = 1 << 16
SESSION_BYTES: Final = 16
# A longer answer that a client has not fetched is not kept over a restart.
SAVED_OUTCOME_BYTES: Final = 64 << 20
# Of the named tables that a session opened so many are known to the next engine.
_NOTED_TABLES: Final = 200
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

    __slots__ = ("fingerprint", "index", "inherited", "lock", "number", "outcome")

    def __init__(
        self, number: int = 0, fingerprint: bytes = b"", outcome: Outcome | None = None,
        index: int = -1,
    ) -> None:  # fmt: skip
        self.lock = threading.Lock()  # guards the three fields below
        self.number = number  # of the last finished request; 0 before the first
        self.fingerprint = fingerprint
        self.outcome = outcome
        self.index = index  # of its entry in the ledger, if there is one
        # An engine that is gone may have done the next request, all but storing its outcome.
        self.inherited = False


class Ticket:
    """A numbered request in work. Whoever makes its effect may store its outcome with it."""

    __slots__ = ("fingerprint", "index", "number", "repeated", "session", "stored", "stream")

    def __init__(
        self, session: Session, stream: int, state: StreamState, number: int, fingerprint: bytes
    ) -> None:
        self.session = session
        self.stream = stream
        self.index = state.index  # of its stream's entry in the ledger
        self.number = number
        self.fingerprint = fingerprint
        self.stored = False  # the ledger has the outcome
        # Whether an engine that is gone may have done it already. Requests that change records are
        # never in doubt, they are in the journal; those that change the catalog look there.
        self.repeated = state.inherited

    @property
    def name(self) -> str:
        """Of the request, among all of all sessions."""
        return f"{self.session.id.hex()}/{self.stream}/{self.number}"


class Session:
    """One connected training process.

    `tables` holds the ids of the unnamed tables that end with it; the engine keeps it. The other
    plain attributes are written by the session's own connection only.
    """

    def __init__(
        self, session_id: bytes, *, plane: Plane, pid: int, uid: int, run: str, program: str,
        ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        self.id: Final = session_id
        self.plane: Final[Plane] = plane
        self.uid: Final = uid
        self.pid = pid
        self.pid_start = process.start_time(pid)
        self.boot_id = process.boot_id()
        self.run = run
        self.program = program
        self.tables: set[int] = set()
        # By number; those of a local session. Its connection adds and removes them.
        self.arenas: dict[int, Arena] = {}
        self.arena_bytes = 0
        self.opened: set[int] = set()  # named tables
        # Arena numbers are never reused, not even by a restarted daemon.
        self.arenas_made = 0
        self.requests = 0
        self.last_seen_s = time.monotonic()
        self._ledger = ledger
        self._index = -1  # of its entry in the ledger
        self._lock = threading.Lock()  # guards the four fields below
        self._ended = False
        self._streams: dict[int, StreamState] = {}
        self._attachment = 0  # counts connections; the latest one owns the session
        self._detached_at_s: float | None = self.last_seen_s

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"Session({self.short_id}, {self.plane}, pid={self.pid}, uid={self.uid}, {state})"

    @property
    def index(self) -> int:
        """Of its entry in the ledger; -1: it has none."""
        return self._index

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
        self.note()

    def note(self) -> None:
        """Let the next engine know what this session is now."""
        if self._ledger is None or self._ended:
            return
        if self._index < 0:
            self._index = self._ledger.add_session(self._facts())
        else:
            self._ledger.put_session(self._index, self._facts())

    def has_opened(self, table_id: int) -> None:
        """A named table: others must not drop it while this session is there."""
        self.opened.add(table_id)
        self.note()

    def _facts(self) -> dict[str, Any]:
        return {
            "id": self.id.hex(), "plane": self.plane, "pid": self.pid,
            "pid_start": self.pid_start, "boot_id": self.boot_id, "uid": self.uid,
            "run": self.run, "program": self.program, "arenas_made": self.arenas_made,
            "arenas": [[arena.number, arena.nbytes] for arena in list(self.arenas.values())],
            "opened": sorted(self.opened)[:_NOTED_TABLES],
        }  # fmt: skip

    def forget(self) -> None:
        """The session has ended: the ledger lets go of it and its outcomes."""
        with self._lock:
            self._ended = True
            streams = list(self._streams.values())
        if self._ledger is not None and self._index >= 0:
            for state in streams:
                with state.lock:
                    pass  # a request that was in work has stored its outcome
            self._ledger.remove_session(self._index, [state.index for state in streams])
            self._index = -1

    @classmethod
    def inherit(cls, ledger: Ledger, index: int, facts: dict[str, Any]) -> Session:
        """A session of an earlier engine of the same memory, without arenas and streams."""
        session = cls(
            bytes.fromhex(facts["id"]), plane=facts["plane"], pid=facts["pid"], uid=facts["uid"],
            run=facts["run"], program=facts["program"], ledger=ledger,
        )  # fmt: skip
        session.pid_start, session.boot_id = facts["pid_start"], facts["boot_id"]
        session.arenas_made = facts["arenas_made"]
        session.opened = set(facts["opened"])
        session._index = index
        return session

    def inherit_streams(self) -> None:
        """The outcomes that an earlier engine has stored."""
        assert self._ledger is not None
        for at, stored in self._ledger.streams(self._index).items():
            outcome = None if stored.body is None else Outcome(stored.body, stored.bulk)
            state = StreamState(stored.number, stored.fingerprint, outcome, at)
            state.inherited = True
            self._streams[stored.stream] = state

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
        self, stream: int, number: int, fingerprint: bytes, call: Callable[[Ticket], Outcome]
    ) -> tuple[Outcome, bool]:
        """Run `call` under the next number of a stream, or return the last number's outcome.

        Returns (outcome, whether it was stored). An exception of `call` leaves the number free:
        the same request may be sent again. Errors that are final are outcomes, so they return.

        Raises OutOfSequence for any number but the last (with the same fingerprint) and the next.
        """
        state = self._streams.get(stream) or self._add_stream(stream)
        with state.lock:
            if self._ended:
                raise SessionNotFound(f"session {self.short_id} has ended: connect anew")
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
            ticket = Ticket(self, stream, state, number, fingerprint)
            if self._ledger is not None:
                self._ledger.forget_outcome(state.index)
            outcome = call(ticket)
            if self._ledger is not None and not ticket.stored:
                self._ledger.forget_outcome(state.index)
                self._ledger.store(state.index, number, fingerprint, outcome.body)
            state.number, state.fingerprint, state.outcome = number, fingerprint, outcome
            state.inherited = False
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
    def restore(cls, record: SessionRecord, ledger: Ledger | None = None) -> Session:
        """A detached session with the streams it had."""
        session = cls(
            record.session, plane="local" if record.plane == "local" else "grpc", pid=record.pid,
            uid=record.uid, run=record.run, program=record.program, ledger=ledger,
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

    def note_streams(self) -> None:
        """Let the next engine know the outcomes that this one was started with."""
        if self._ledger is None:
            return
        for stream, state in self._streams.items():
            state.index = self._ledger.add_stream(self._index, stream)
            if state.outcome is None:
                self._ledger.set_number(state.index, state.number)
            else:
                sizes = [array.nbytes for array in state.outcome.bulk]
                if sizes:
                    places = self._ledger.reserve_bulk(state.index, sizes)
                    for place, array in zip(places, state.outcome.bulk, strict=True):
                        place[:] = array.view(np.uint8).reshape(-1)
                self._ledger.store(state.index, state.number, state.fingerprint, state.outcome.body)

    def process_is_gone(self) -> bool:
        """Whether the client's process has certainly ended. False where that cannot be known."""
        if self.boot_id != process.boot_id():
            return True
        if self.plane != "local" or self.pid <= 0 or self.pid_start == 0:
            return False
        return process.start_time(self.pid) != self.pid_start

    def _add_stream(self, stream: int) -> StreamState:
        with self._lock:
            if self._ended:
                raise SessionNotFound(f"session {self.short_id} has ended: connect anew")
            if len(self._streams) >= MAX_STREAMS:
                raise LimitExceeded(
                    f"session {self.short_id} has {len(self._streams)} streams, the limit is "
                    f"{MAX_STREAMS}: use one stream for each optimizer, or a new session",
                    limit=MAX_STREAMS,
                )
            state = self._streams.get(stream)
            if state is None:
                state = StreamState()
                if self._ledger is not None:
                    state.index = self._ledger.add_stream(self._index, stream)
                self._streams[stream] = state
            return state


@dataclass
class Sessions:
    """All sessions of the daemon. Thread-safe."""

    max_sessions: int = 256
    # How long a session without a connection is kept: gRPC ones, and restored ones.
    attach_grace_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    ledger: Ledger | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _by_id: dict[bytes, Session] = field(default_factory=dict, repr=False)  # guarded by _lock

    def open(self, *, plane: Plane, pid: int, uid: int, run: str, program: str) -> Session:
        """A new session, detached. Raises LimitExceeded."""
        session = Session(
            secrets.token_bytes(SESSION_BYTES), plane=plane, pid=pid, uid=uid, run=run,
            program=program, ledger=self.ledger,
        )  # fmt: skip
        with self._lock:
            if len(self._by_id) >= self.max_sessions:
                raise LimitExceeded(
                    f"{len(self._by_id)} sessions are open, the limit is {self.max_sessions}: end "
                    "a training process, or start the daemon with a higher --max-sessions",
                    limit=self.max_sessions,
                )
            session.note()
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

    def find(self, session_id: bytes) -> Session | None:
        """The session with this id, or None."""
        return self._by_id.get(session_id)

    def end(self, session_id: bytes) -> Session | None:
        """Take a session out of the registry; None if it was not there (any more)."""
        with self._lock:
            session = self._by_id.pop(session_id, None)
        if session is not None:
            session.forget()
        return session

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
            session = Session.restore(item, self.ledger)
            if session.process_is_gone():
                gone.append(session)
                continue
            session.note()
            session.note_streams()
            with self._lock:
                self._by_id[session.id] = session
        return gone

    def inherit(self) -> list[tuple[Session, list[tuple[int, int]]]]:
        """Take over the sessions of an earlier engine; each with its arenas (number, bytes)."""
        assert self.ledger is not None
        found: list[tuple[Session, list[tuple[int, int]]]] = []
        for index, facts in self.ledger.sessions():
            session = Session.inherit(self.ledger, index, facts)
            self._by_id[session.id] = session
            found.append((session, [(number, nbytes) for number, nbytes in facts["arenas"]]))
        return found

    def by_stream(self, index: int) -> Session | None:
        """The session to which an entry of a stream belongs."""
        assert self.ledger is not None
        owner = self.ledger.owner(index)
        return next((s for s in self._by_id.values() if s.index == owner), None)

    def inherit_streams(self) -> None:
        """Once what was in work is finished."""
        for session in self._by_id.values():
            session.inherit_streams()


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
