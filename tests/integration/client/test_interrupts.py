"""Ctrl-C at every line: no update is lost or doubled, and nothing hangs."""

import random
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from momentd import rules
from momentd._session import Session
from momentd._stream import UpdateSpec
from tests.support.interrupt import interrupted_at

ROWS = np.array([2, 5, 7])


class Trainer:
    """What an optimizer does: makes an update, and completes one that was broken off."""

    def __init__(self, session, table):
        self.table = table
        self.stream = session.stream()
        self.update = None
        self.applied = None

    def spec(self):
        return UpdateSpec(self.table, 3, np.dtype(np.float32), rules.SparseAdam.hyper(lr=0.1))

    def step(self):
        update = self.stream.new_update([self.spec()])
        update.inputs[0].rows[:] = ROWS
        update.inputs[0].grads[:] = 1.0
        self.applied = None
        self.update = update
        self.finish()

    def finish(self):
        if self.applied is None:
            self.update.send()
            for _ in self.update.progress():
                pass
            result = self.update.results()[0]
            self.applied = (result.update_number, result.rows.copy(), result.values.copy())
        self.update.close()
        self.update = None

    def complete(self):
        if self.update is None:
            self.step()
        else:
            self.finish()


def first_moment(updates: int) -> float:
    return 1 - 0.9**updates


@pytest.mark.parametrize("connection", ["open", "new", "lost"])
def test_an_update_broken_off_at_any_line_is_applied_exactly_once(daemon, address, connection):
    if connection == "lost" and address == daemon.local:
        pytest.skip("a local session ends with its connection")
    session = Session(address, "test")
    table = session.open_table(rules.SparseAdam().schema(10, 4), name="shared")
    trainer, line, updates = Trainer(session, table), 0, 0
    # Making a connection takes a while over gRPC: every third line, beginning with another one.
    stride = 3 if address == daemon.grpc and connection != "open" else 1
    while True:
        line += stride
        updates += 1
        if connection == "new":
            # Nothing is open yet: the step connects.
            trainer = Trainer(Session(address, "test"), table)
        elif connection == "lost":
            trainer.stream.session._transport.close()
        hit = interrupted_at(line, trainer.step)
        if hit is not None:
            trainer.complete()
        assert trainer.applied[0] == updates, hit and hit.raised_in
        np.testing.assert_array_equal(trainer.applied[1], ROWS)
        assert (trainer.applied[2] < 0).all(), hit and hit.raised_in
        assert trainer.stream.pending is None
        if connection == "new":
            trainer.stream.session.close()
        if hit is None:
            break
    assert line > 100
    moments = table.gather([2, 5, 7, 3], "exp_avg")
    np.testing.assert_allclose(moments[:3], first_moment(updates), rtol=1e-5)
    assert not moments[3].any()
    session.close()


def test_calls_broken_off_at_any_line_leave_the_session_usable(session):
    table = session.open_table(rules.SparseAdam().schema(10, 4))
    table.scatter([1], exp_avg=np.ones((1, 4)))

    def calls():
        table.gather([1, 2], "exp_avg")
        table.scatter([3], exp_avg=np.ones((1, 4)))
        table.prefetch([1])
        table.clone()

    line = 0
    while True:
        line += 1
        hit = interrupted_at(line, calls)
        np.testing.assert_array_equal(table.gather([1, 2], "exp_avg"), [[1] * 4, [0] * 4])
        if hit is None:
            break
    assert line > 100


def test_a_table_made_for_a_call_that_was_broken_off_is_dropped(session, daemon):
    schema = rules.SparseAdam().schema(10, 4)
    line = 0
    while True:
        line += 1
        hit = interrupted_at(line, lambda: session.open_table(schema))
        if hit is None:
            break
        kept = session.open_table(schema)
        assert session.drop_tables([kept.id]) == 1
    # Some were made, and their caller broken off on the way back from the call.
    assert len(daemon.engine.list_tables()) < 10


def test_updates_through_a_table_survive_interrupts(session):
    table = session.open_table(rules.SparseAdam().schema(10, 4))
    grads = np.ones((1, 4), np.float32)
    line = 0
    while True:
        line += 1
        before = table.refresh().update_number
        hit = interrupted_at(line, lambda: table.update([3], grads, lr=0.1))
        result = table.update([4], grads, lr=0.1)
        assert result.update_number - before in (1, 2)
        if hit is None:
            break
    assert line > 100


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)
def test_real_signals_at_random_moments_lose_and_double_nothing(session):
    trainer = Trainer(session, session.open_table(rules.SparseAdam().schema(10, 4)))
    chance = random.Random(7)

    def ring(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, ring)
    hits = 0
    try:
        for updates in range(1, 301):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 1.5e-3))
                trainer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                if trainer.update is not None or trainer.applied is None:
                    trainer.complete()
                elif trainer.applied[0] != updates:
                    trainer.step()
            assert trainer.applied[0] == updates
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits > 10


def test_a_second_thread_is_served_while_the_first_is_interrupted(session):
    table = session.open_table(rules.SparseAdam().schema(1000, 4))
    stop, failures = threading.Event(), []

    def other():
        try:
            while not stop.is_set():
                assert table.gather(range(1000), "exp_avg").shape == (1000, 4)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other, name="other")
    thread.start()
    try:
        for line in range(1, 300, 7):
            with suppress(KeyboardInterrupt):
                interrupted_at(line, lambda: table.gather([1], "exp_avg"))
            table.gather([1], "exp_avg")
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert not failures
