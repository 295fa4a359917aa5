"""Sessions and the outcomes of their requests, as they lie in the space.

What is written here is what the next engine knows: each entry becomes valid by one store that comes
after all others (storage/blocks.py). Outcomes of requests that change records are stored in the
lane, together with the effect (engine/journal.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from momentd_server.storage import blocks
from momentd_server.storage.space import Space
from momentd_wire.errors import LimitExceeded

_FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """The last finished request of a stream. `body` is None if its outcome is not known."""

    stream: int
    number: int
    fingerprint: bytes
    body: bytes | None
    bulk: tuple[np.ndarray, ...]  # uint8; the arrays that follow the body


class Ledger:
    """Thread-safe; one entry is written by one thread at a time."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._lock = threading.Lock()  # guards the lists
        self._free_sessions = np.flatnonzero(space.sessions["state"] == 0).tolist()[::-1]
        self._free_streams = np.flatnonzero(space.streams["owner"] == 0).tolist()[::-1]

    # ------------------------------------------------------------------------------ sessions

    def add_session(self, facts: dict[str, Any]) -> int:
        """Index of the new entry. Raises LimitExceeded."""
        with self._lock:
            if not self._free_sessions:
                raise LimitExceeded(
                    f"{blocks.MAX_SESSIONS} sessions are open, which is the limit: end one",
                    limit=blocks.MAX_SESSIONS,
                )
            index = self._free_sessions.pop()
        self.put_session(index, facts)
        return index

    def put_session(self, index: int, facts: dict[str, Any]) -> None:
        """Replace what is known of a session, as a whole."""
        text = json.dumps(facts, separators=(",", ":")).encode()
        block = self._space.sessions[index]
        other = 1 if int(block["state"]) == 2 else 2
        self._space.session_texts[index, other - 1, : len(text)] = np.frombuffer(text, np.uint8)
        block["bytes"][other - 1] = len(text)
        block["state"] = other

    def remove_session(self, index: int, streams: list[int]) -> None:
        for stream in streams:
            self._release(stream)
            self._space.streams[stream]["owner"] = 0
        self._space.sessions[index]["state"] = 0
        with self._lock:
            self._free_streams += streams
            self._free_sessions.append(index)

    def sessions(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, facts) of every entry."""
        for index in np.flatnonzero(self._space.sessions["state"]).tolist():
            block = self._space.sessions[index]
            which = int(block["state"]) - 1
            text = self._space.session_texts[index, which, : int(block["bytes"][which])]
            yield index, json.loads(text.tobytes())

    # ------------------------------------------------------------------------------ streams

    def add_stream(self, session: int, stream: int) -> int:
        """Index of the new stream's entry. Raises LimitExceeded."""
        with self._lock:
            if not self._free_streams:
                raise LimitExceeded(
                    f"all sessions together have {blocks.MAX_STREAMS} streams, which is the "
                    "limit: close optimizers that are not used any more",
                    limit=blocks.MAX_STREAMS,
                )
            index = self._free_streams.pop()
        block = self._space.streams[index]
        block["stream"], block["number"], block["outcome"] = stream, 0, 0
        block["extent_bytes"] = 0
        block["owner"] = session + 1
        return index

    def streams(self, session: int) -> dict[int, StoredOutcome]:
        """Entries of a session's streams by their index."""
        found: dict[int, StoredOutcome] = {}
        for index in np.flatnonzero(self._space.streams["owner"] == session + 1).tolist():
            found[index] = self._outcome(index)
        return found

    def owner(self, index: int) -> int:
        """Index of the session to which a stream's entry belongs; -1: none."""
        return int(self._space.streams[index]["owner"]) - 1

    def _outcome(self, index: int) -> StoredOutcome:
        block = self._space.streams[index]
        body, bulk = None, ()
        if int(block["outcome"]):
            nbytes, at = int(block["body_bytes"]), int(block["extent_at"])
            if nbytes <= blocks.STREAM_BODY_BYTES:
                body = self._space.stream_bodies[index, :nbytes].tobytes()
            else:
                body = self._space.view(at, nbytes, "u1").tobytes()
                at += _aligned(nbytes)
            bulk = self._arrays(at) if int(block["bulk"]) else ()
        return StoredOutcome(
            int(block["stream"]), int(block["number"]), block["fingerprint"].tobytes(), body, bulk
        )

    def _arrays(self, at: int) -> tuple[np.ndarray, ...]:
        """What `reserve_bulk` laid out: how many arrays, their bytes, the arrays."""
        count = int(self._space.view(at, 8, "<u8")[0])
        sizes = self._space.view(at + 8, 8 * count, "<u8").tolist()
        return tuple(self._space.view(start, size, "u1") for start, size in _layout(at, sizes))

    def forget_outcome(self, index: int) -> None:
        """The stream's last outcome is acknowledged."""
        self._space.streams[index]["outcome"] = 0
        self._release(index)

    def reserve_bulk(self, index: int, sizes: list[int]) -> tuple[np.ndarray, ...]:
        """uint8 arrays of these bytes that will follow the next outcome's body.

        After `forget_outcome`. Raises OutOfMemory.
        """
        block = self._space.streams[index]
        nbytes = _aligned(8 + 8 * len(sizes)) + sum(map(_aligned, sizes))
        at, size = self._space.allocate_extent(nbytes)
        self._space.view(at, 8, "<u8")[0] = len(sizes)
        self._space.view(at + 8, 8 * len(sizes), "<u8")[:] = sizes
        block["extent_at"], block["bulk"] = at, nbytes
        block["extent_bytes"] = size
        return self._arrays(at)

    def store(self, index: int, number: int, fingerprint: bytes, body: bytes) -> None:
        """The outcome of `number`, after `forget_outcome`; its bulk was reserved before."""
        block = self._space.streams[index]
        if len(body) <= blocks.STREAM_BODY_BYTES:
            self._space.stream_bodies[index, : len(body)] = np.frombuffer(body, np.uint8)
        else:
            self._store_long(block, body)
        block["body_bytes"] = len(body)
        block["fingerprint"] = np.frombuffer(fingerprint, np.uint8)
        block["outcome"] = 1
        # The last: an outcome of a number that is not done yet is nobody's.
        block["number"] = number

    def set_number(self, index: int, number: int) -> None:
        """A number whose outcome nobody asks for any more."""
        self._space.streams[index]["number"] = number

    def _store_long(self, block: np.void, body: bytes) -> None:
        bulk = self._space.view(int(block["extent_at"]), int(block["bulk"]), "u1")
        old = int(block["extent_at"]), int(block["extent_bytes"])
        at, size = self._space.allocate_extent(_aligned(len(body)) + bulk.size)
        self._space.view(at, len(body), "u1")[:] = np.frombuffer(body, np.uint8)
        self._space.view(at + _aligned(len(body)), bulk.size, "u1")[:] = bulk
        block["extent_at"], block["extent_bytes"] = at, size
        if old[1]:
            self._space.free_extent(*old)

    def _release(self, index: int) -> None:
        block = self._space.streams[index]
        at, size = int(block["extent_at"]), int(block["extent_bytes"])
        block["extent_bytes"], block["bulk"] = 0, 0
        if size:
            self._space.free_extent(at, size)


def _layout(at: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    start = at + _aligned(8 + 8 * len(sizes))
    for size in sizes:
        yield start, size
        start += _aligned(size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
