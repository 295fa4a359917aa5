"""Forks, spawned processes and threads: each process has its own session, threads share one."""

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback

import numpy as np
import pytest

from momentd import rules
from momentd._session import Session
from momentd._stream import UpdateSpec
from momentd.errors import StateRolledBack

F4 = np.dtype(np.float32)
SCHEMA = rules.SparseAdam().schema(1000, 8)


def in_fork(action, seconds=30):
    """Run `action` in a forked child; returns what it raised, as text, or None."""
    report = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the parent alone
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os.write(report.fileno(), traceback.format_exc().encode())
        finally:
            os._exit(1)
    timer = threading.Timer(seconds, os.kill, (pid, 9))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    with report:
        report.seek(0)
        text = report.read().decode()
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}: it hung. {text}"
    return text or None


@pytest.fixture
def session(daemon):
    session = Session(daemon.local, "test")
    yield session
    session.close()


def test_a_forked_child_gets_a_session_of_its_own(daemon, session):
    table = session.open_table(SCHEMA, name="shared")
    table.update([1], np.ones((1, 8)), lr=0.1)
    own = session.hello.session

    def child():
        assert not session.is_open
        assert table.update([1], np.ones((1, 8)), lr=0.1).update_number == 2
        assert session.hello.session != own
        session.open_table(SCHEMA)

    assert in_fork(child) is None
    # The child's end has not ended ours.
    assert table.update([1], np.ones((1, 8)), lr=0.1).update_number == 3
    assert session.hello.session == own
    assert session.incarnation == 1


def test_a_child_that_does_nothing_leaves_the_parents_session_alone(daemon, session):
    table = session.open_table(SCHEMA)
    assert in_fork(lambda: None) is None
    assert in_fork(session.close) is None
    assert table.update([1], np.ones((1, 8)), lr=0.1).update_number == 1


def test_the_parents_end_ends_its_session_although_a_child_lives(daemon):
    parent_done, child_done = os.pipe(), os.pipe()

    def parent():
        session = Session(daemon.local)
        session.open_table(SCHEMA)
        if os.fork() == 0:
            signal.alarm(20)
            os.write(parent_done[1], b"x")
            os.read(child_done[0], 1)
            os._exit(0)

    assert in_fork(parent) is None
    os.read(parent_done[0], 1)
    try:
        assert wait_for(lambda: len(daemon.engine.list_tables()) == 0)
    finally:
        os.write(child_done[1], b"x")
        for descriptor in (*parent_done, *child_done):
            os.close(descriptor)


def test_an_update_of_the_parent_is_not_pending_in_the_child(session):
    table = session.open_table(SCHEMA, name="shared")
    stream = session.stream()
    update = stream.new_update([UpdateSpec(table, 1, F4, rules.SparseAdam.hyper(lr=0.1))])
    update.inputs[0].rows[:] = 3
    update.inputs[0].grads[:] = 1
    update.send()

    def child():
        assert stream.pending is None
        with pytest.raises(StateRolledBack, match="parent"):
            update.results()
        mine = stream.new_update([UpdateSpec(table, 1, F4, rules.SparseAdam.hyper(lr=0.1))])
        mine.inputs[0].rows[:] = 4
        mine.inputs[0].grads[:] = 1
        mine.send()
        assert mine.results()[0].rows.tolist() == [4]
        mine.close()

    assert in_fork(child) is None
    assert update.results()[0].rows.tolist() == [3]
    update.close()


def test_a_fork_while_another_thread_waits_is_harmless(daemon, session):
    table = session.open_table(SCHEMA, name="shared")
    release, held = threading.Event(), threading.Event()

    def hold():
        held.set()
        release.wait(20)

    daemon.engine.before_update = hold
    thread = threading.Thread(target=lambda: table.update([1], np.ones((1, 8)), lr=0.1))
    thread.start()
    held.wait(10)
    try:
        assert in_fork(table.refresh) is None
    finally:
        release.set()
        thread.join(10)
    assert table.refresh().update_number == 1


def _worker(address, seed):
    session = Session(address)
    table = session.get_table(name="shared")
    for _ in range(20):
        table.update([seed], np.ones((1, 8)), lr=0.1)
    session.close()


def test_spawned_processes_train_one_named_table(daemon, session):
    table = session.open_table(SCHEMA, name="shared")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(daemon.local, seed)) for seed in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert table.refresh().update_number == 40
    moments = table.gather([1, 2, 3], "exp_avg")
    np.testing.assert_allclose(moments[:2], 1 - 0.9**20, rtol=1e-5)
    assert not moments[2].any()


def test_threads_share_a_session_each_with_its_stream(address):
    session = Session(address)
    tables = [session.open_table(SCHEMA) for _ in range(4)]
    failures = []

    def train(number):
        try:
            stream, table = session.stream(), tables[number]
            chance = np.random.default_rng(number)
            for step in range(1, 41):
                count = int(chance.integers(1, 1000))
                spec = UpdateSpec(table, count, F4, rules.SparseAdam.hyper(lr=0.1))
                update = stream.new_update([spec])
                ids = chance.permutation(1000)[:count]
                update.inputs[0].rows[:] = ids
                update.inputs[0].grads[:] = number + 1
                update.send()
                result = update.results()[0]
                assert result.update_number == step
                np.testing.assert_array_equal(result.rows, np.sort(ids))
                assert (result.values < 0).all()
                update.close()
                table.gather(ids[:10])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(n,), name=f"train-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for number, table in enumerate(tables):
        biggest = table.gather(None, "exp_avg").max()
        assert 0 < biggest <= number + 1
    session.close()


def test_no_thread_is_left_on_the_local_plane(session):
    before = threading.active_count()
    table = session.open_table(SCHEMA)
    table.update([1], np.ones((1, 8)), lr=0.1)
    # The daemon in this process has one for the connection; the client has none.
    names = [thread.name for thread in threading.enumerate()]
    assert threading.active_count() <= before + 1, names


def wait_for(condition, seconds=5.0):
    import time

    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
