"""Sessions and streams: exactly once as a state machine, expiry by a clock that the test turns."""

import os
import threading

import numpy as np
import pytest

from momentd_server.engine import sessions as module
from momentd_server.engine.sessions import LOST, Outcome, Session, Sessions
from momentd_wire import errors

DONE = Outcome(b"done")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def open_session(sessions=None, **fields):
    facts = {"plane": "local", "pid": os.getpid(), "uid": 0, "run": "r", "program": "p", **fields}
    return (Sessions() if sessions is None else sessions).open(**facts)


def fail(error):
    def call(_):
        raise error

    return call


def never(_):
    raise AssertionError("ran twice")


def test_the_next_number_runs_and_the_last_is_answered_from_memory():
    session = open_session()
    assert session.once(1, 1, b"a", lambda _: DONE) == (DONE, False)
    assert session.once(1, 1, b"a", never) == (DONE, True)
    other = Outcome(b"two")
    assert session.once(1, 2, b"b", lambda _: other) == (other, False)
    assert session.done() == [(1, 2)]


@pytest.mark.parametrize(("number", "fingerprint"), [(0, b"a"), (3, b"a"), (1, b"other")])
def test_any_other_number_or_content_is_refused(number, fingerprint):
    session = open_session()
    session.once(1, 1, b"a", lambda _: DONE)
    with pytest.raises(errors.OutOfSequence):
        session.once(1, number, fingerprint, never)
    assert session.once(1, 1, b"a", never) == (DONE, True)


def test_an_acknowledged_number_is_not_answered_any_more():
    session = open_session()
    session.once(1, 1, b"a", lambda _: DONE)
    session.once(1, 2, b"b", lambda _: DONE)
    with pytest.raises(errors.OutOfSequence):
        session.once(1, 1, b"a", never)


def test_an_exception_leaves_the_number_free():
    session = open_session()
    with pytest.raises(errors.DaemonUnavailable):
        session.once(1, 1, b"a", fail(errors.DaemonUnavailable("busy")))
    assert session.once(1, 1, b"other", lambda _: DONE) == (DONE, False)


def test_the_next_number_frees_the_arrays_of_the_last():
    session = open_session()
    session.once(1, 1, b"a", lambda _: Outcome(b"x", (np.zeros(1000),)))
    assert session.held_bytes() == 8000
    session.once(1, 2, b"b", lambda _: DONE)
    assert session.held_bytes() == 0


def test_the_same_request_twice_at_once_runs_once():
    session = open_session()
    entered, leave, calls = threading.Event(), threading.Event(), []

    def call(_):
        calls.append(1)
        entered.set()
        assert leave.wait(20)
        return DONE

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(session.once(1, 1, b"a", call)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert sorted(repeated for _, repeated in results) == [False, True]
    assert calls == [1]


def test_the_number_of_streams_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_STREAMS", 2)
    session = open_session()
    for stream in (1, 2):
        session.once(stream, 1, b"", lambda _: DONE)
    with pytest.raises(errors.LimitExceeded, match="2"):
        session.once(3, 1, b"", never)


def test_saved_sessions_come_back_with_outcomes_and_arrays():
    sessions = Sessions()
    session = open_session(sessions)
    array = np.arange(5, dtype=np.float32)
    session.once(7, 1, b"a", lambda _: Outcome(b"body", (array, array[:0])))
    again = Sessions()
    assert again.restore(sessions.save()) == []
    restored = again.get(session.id)
    outcome, repeated = restored.once(7, 1, b"a", never)
    assert repeated
    assert outcome.body == b"body"
    assert [part.tobytes() for part in outcome.bulk] == [array.tobytes(), b""]
    assert not restored.attached
    assert restored.arenas_made > session.arenas_made


def test_an_answer_too_large_to_keep_is_known_to_be_done(monkeypatch):
    monkeypatch.setattr(module, "SAVED_OUTCOME_BYTES", 10)
    session = open_session()
    session.once(1, 1, b"a", lambda _: Outcome(b"", (np.zeros(100),)))
    restored = Session.restore(session.save())
    assert restored.once(1, 1, b"a", never) == (Outcome(LOST), True)


def test_a_session_of_another_boot_or_process_is_gone():
    sessions = Sessions()
    session = open_session(sessions)
    [record] = sessions.save()
    from dataclasses import replace

    for changed in (
        replace(record, boot_id="another"),
        replace(record, pid_start=record.pid_start + 1),
        replace(record, pid=2**22 + 1),
    ):
        assert [gone.id for gone in Sessions().restore([changed])] == [session.id]
    unknown = replace(record, plane="grpc", pid_start=1)
    assert Sessions().restore([unknown]) == []


def test_only_the_same_user_on_the_same_plane_resumes():
    sessions = Sessions()
    session = open_session(sessions, uid=5)
    assert sessions.resume(session.id, plane="local", uid=5) is session
    assert sessions.resume(session.id, plane="local", uid=6) is None
    assert sessions.resume(session.id, plane="grpc", uid=5) is None
    assert sessions.resume(bytes(16), plane="local", uid=5) is None


def test_a_detached_session_expires_after_the_grace_and_not_before():
    clock = Clock()
    sessions = Sessions(attach_grace_s=10, clock=clock)
    session = open_session(sessions, plane="grpc")
    session.last_seen_s = 0.0
    attachment = session.attach()
    clock.now = 100.0
    assert sessions.expired() == []
    session.detach(attachment, 100.0)
    clock.now = 109.0
    assert sessions.expired() == []
    clock.now = 111.0
    assert sessions.expired() == [session]
    session.last_seen_s = 105.0  # it still calls
    assert sessions.expired() == []


def test_a_late_end_of_an_old_connection_does_not_detach_the_new_one():
    session = open_session()
    old, new = session.attach(), session.attach()
    assert not session.detach(old, 1.0)
    assert session.attached
    assert session.detach(new, 2.0)
    assert session.detached_at_s == 2.0


def test_session_ids_are_not_shown_in_full():
    session = open_session()
    assert session.id.hex() not in repr(session)
    assert session.id.hex()[:8] in repr(session)
