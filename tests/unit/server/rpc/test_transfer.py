"""The budget of bytes in flight: bounded, in order of arrival, given up by those who left."""

import threading

import pytest

from momentd_server.rpc.transfer import ByteBudget
from momentd_wire import errors


def alive():
    return None


def start(budget, nbytes, log, name, leave):
    entered = threading.Event()

    def run():
        with budget.hold(nbytes, alive):
            log.append(name)
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, entered


def test_more_than_the_whole_is_refused_at_once():
    with pytest.raises(errors.LimitExceeded, match="100 B"), ByteBudget(100).hold(101, alive):
        pass


def test_calls_enter_in_order_and_never_exceed_the_limit():
    budget, log, leave = ByteBudget(100), [], threading.Event()
    threads = []
    for name, nbytes in (("a", 60), ("b", 60), ("c", 10)):
        threads.append(start(budget, nbytes, log, name, leave)[0])
        while len(budget._queue) + len(log) < len(threads):
            pass
    assert log == ["a"]  # c would fit, but b was first
    assert budget.used_bytes == 60
    leave.set()
    for thread in threads:
        thread.join(20)
    assert log[:1] == ["a"]
    assert sorted(log) == ["a", "b", "c"]
    assert budget.used_bytes == 0


def test_a_caller_that_left_gives_its_place_in_the_queue_up():
    budget = ByteBudget(10)

    def gone():
        raise errors.Cancelled("gave up")

    with budget.hold(10, alive):
        with pytest.raises(errors.Cancelled), budget.hold(1, gone):
            pass
        assert not budget._queue
    with budget.hold(10, alive):
        assert budget.used_bytes == 10
