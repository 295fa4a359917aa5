"""The daemon goes and comes back: sessions are resumed, updates applied once, waits are bounded."""

import threading
import time

import numpy as np
import pytest

from momentd import rules
from momentd._session import Session
from momentd._stream import UpdateSpec
from momentd.errors import DaemonUnavailable, InvalidArgument, StateRolledBack

F4 = np.dtype(np.float32)
HYPER = rules.SparseAdam.hyper(lr=0.1)


@pytest.fixture
def table(session):
    return session.open_table(rules.SparseAdam().schema(100, 4))


def begin(stream, table, rows=(1, 2), **spec):
    update = stream.new_update([UpdateSpec(table, len(rows), F4, HYPER, **spec)])
    update.inputs[0].rows[:] = rows
    update.inputs[0].grads[:] = 1
    return update


def later(delay_s, action):
    thread = threading.Timer(delay_s, action)
    thread.start()
    return thread


def check_once(update, table, number=1):
    result = update.results()[0]
    assert result.update_number == number
    assert result.rows.tolist() == [1, 2]
    np.testing.assert_allclose(result.values, -0.1, rtol=1e-4)
    update.close()
    assert table.refresh().update_number == number


def test_a_session_is_resumed_with_its_unnamed_tables(daemon, session, table):
    table.update([1], np.ones((1, 4)), lr=0.1)
    daemon.stop()
    daemon.start()
    assert table.update([1], np.ones((1, 4)), lr=0.1).update_number == 2
    assert session.incarnation == 1


def test_calls_wait_for_a_daemon_that_is_away_and_say_so(daemon, session, table, capsys):
    daemon.stop()
    timer = later(2.5, daemon.start)
    started_s = time.monotonic()
    assert not table.gather([1], "exp_avg").any()
    # Back within a second of the socket, whatever the calls made meanwhile.
    assert 2.4 < time.monotonic() - started_s < 4.5
    timer.join()
    said = capsys.readouterr().err
    assert "waiting for" in said
    assert "connected again" in said


def test_an_update_prepared_before_the_restart_is_sent_after_it(daemon, session, table):
    update = begin(session.stream(), table)
    daemon.stop()
    daemon.start()
    update.send()
    check_once(update, table)


def test_an_update_whose_answer_was_lost_is_answered_from_the_stored_outcome(
    daemon, session, table
):
    stream = session.stream()
    update = begin(stream, table)
    update.send()
    until = time.monotonic() + 5
    while daemon.engine.update_calls < 1 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    # The reply is on its way, or here; it is never looked at.
    transport = session._transport
    if transport.plane == "local":
        transport._socket.recv(65536)
        transport._socket.recv(65536)
    else:
        wait_until(lambda: update._call.attempt.done)
        update._call.attempt = None
        update._call.on = None
    daemon.stop()
    daemon.start()
    check_once(update, table)
    assert daemon.engine.update_calls == 1
    check_once(again := resend(stream, table), table, 2)
    assert again.number == 2


def resend(stream, table):
    update = begin(stream, table)
    update.send()
    return update


def test_an_update_that_a_stopping_daemon_refuses_is_applied_by_the_next_one(
    daemon, session, table
):
    daemon.engine.stopped = False  # "stopping": UNAVAILABLE, the number stays free
    update = begin(session.stream(), table)
    update.send()
    timer = later(0.3, lambda: (daemon.stop(), daemon.start()))
    result = update.results()[0]
    timer.join()
    assert result.update_number == 1
    assert result.rows.tolist() == [1, 2]


def test_a_daemon_that_lost_the_session_ends_the_update_for_good(daemon, session, table):
    stream = session.stream()
    update = begin(stream, table)
    daemon.stop()
    daemon.forget_sessions()
    daemon.start()
    update.send()
    with pytest.raises(StateRolledBack, match="checkpoint"):
        update.results()
    assert update.done
    with pytest.raises(StateRolledBack):
        update.results()
    update.close()
    assert stream.pending is None
    fresh = session.open_table(rules.SparseAdam().schema(100, 4))
    check_once(resend(stream, fresh), fresh)


def test_control_calls_work_again_after_the_session_was_lost(daemon, session, table):
    table.scatter([1], exp_avg=np.ones((1, 4)))
    daemon.stop()
    daemon.forget_sessions()
    daemon.start()
    with pytest.raises(StateRolledBack):
        # The first one finds out.
        session.finish(NumberedProbe(session), "a probe", session.incarnation)
    assert session.open_table(rules.SparseAdam().schema(10, 4)).update_number == 0


def NumberedProbe(session):
    from momentd._transport import Call
    from momentd_wire.v1 import momentd_pb2 as pb

    return Call(
        pb.Request(
            drop_table=pb.DropTableRequest(sequence=pb.Sequence(stream=9, number=1), ids=[1])
        )
    )


def test_waiting_is_bounded_and_the_update_can_still_be_completed(
    daemon, session, table, monkeypatch
):
    monkeypatch.setenv("MOMENTD_TIMEOUT", "0.6")
    stream = session.stream()
    update = begin(stream, table)
    update.send()
    update.results()
    update.close()
    update = begin(stream, table)
    daemon.stop()
    update.send()
    started_s = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="MOMENTD_TIMEOUT"):
        update.results()
    assert 0.5 < time.monotonic() - started_s < 2
    assert not update.done
    assert stream.pending is update
    with pytest.raises(InvalidArgument, match="no outcome"):
        update.close()
    daemon.start()
    monkeypatch.setenv("MOMENTD_TIMEOUT", "20")
    assert update.results()[0].update_number == 2
    update.close()


def test_a_slow_answer_is_waited_for_no_longer_than_told(daemon, session, table, monkeypatch):
    release = threading.Event()
    daemon.engine.before_update = lambda: release.wait(20)
    monkeypatch.setenv("MOMENTD_TIMEOUT", "0.5")
    update = begin(session.stream(), table)
    update.send()
    with pytest.raises(DaemonUnavailable):
        update.results()
    release.set()
    monkeypatch.setenv("MOMENTD_TIMEOUT", "20")
    check_once(update, table)


def test_nobody_at_the_address_is_told_with_the_address(tmp_path, monkeypatch):
    monkeypatch.setenv("MOMENTD_TIMEOUT", "0.3")
    for address in (f"unix:{tmp_path}/none.sock", f"grpc+unix:{tmp_path}/none.sock", "127.0.0.1:1"):
        with pytest.raises(DaemonUnavailable, match=r"none\.sock|127\.0\.0\.1:1"):
            Session(address).open_table(rules.SparseAdam().schema(10, 4))


def test_training_goes_on_over_restarts_as_if_there_were_none(daemon, session):
    table = session.open_table(rules.SparseAdam().schema(50, 4))
    mirror = session.open_table(rules.SparseAdam().schema(50, 4))
    chance = np.random.default_rng(3)
    batches = [(chance.integers(0, 50, 20), chance.normal(size=(20, 4))) for _ in range(60)]
    for rows, grads in batches:
        mirror.update(rows, grads, lr=0.1)
    stopping = threading.Event()

    def disturb():
        while not stopping.wait(0.1):
            daemon.stop()
            daemon.start()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for rows, grads in batches:
            table.update(rows, grads, lr=0.1)
            time.sleep(0.01)
    finally:
        stopping.set()
        thread.join()
    assert table.refresh().update_number == 60
    for field in table.fields:
        np.testing.assert_array_equal(table.gather(None, field), mirror.gather(None, field))


def wait_until(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
