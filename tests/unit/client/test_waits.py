import pytest

from momentd import _waits
from momentd._waits import Patience
from momentd_wire.errors import DaemonUnavailable


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeping moves."""

    class Clock:
        def __init__(self):
            self.now_s = 100.0
            self.slept = []

    clock = Clock()

    def sleep(seconds):
        clock.slept.append(seconds)
        clock.now_s += seconds

    monkeypatch.setattr(_waits.time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(_waits.time, "sleep", sleep)
    monkeypatch.setattr(_waits, "_last_notice_s", {})
    return clock


def patience(timeout_s=60.0):
    return Patience(timeout_s, "an update", "unix:/run/m.sock")


def test_nothing_is_said_before_two_seconds(clock, capsys):
    waiting = patience()
    clock.now_s += 1.9
    waiting.tick()
    assert capsys.readouterr().err == ""


def test_after_two_seconds_one_line_says_what_is_waited_for(clock, capsys):
    waiting = patience()
    clock.now_s += 2.1
    waiting.tick()
    clock.now_s += 10
    waiting.tick()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    for part in ("an update", "unix:/run/m.sock", "60 s", "Ctrl-C"):
        assert part in lines[0]


def test_every_slow_step_of_a_minute_is_told_once(clock, capsys):
    for _ in range(10):
        waiting = patience()
        clock.now_s += 3
        waiting.tick()
    assert len(capsys.readouterr().err.splitlines()) == 1
    clock.now_s += 60
    waiting = patience()
    clock.now_s += 3
    waiting.tick()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_end_of_patience_names_time_place_cause_and_remedy(clock):
    waiting = patience(5)

    def wait():
        while True:
            waiting.pause("nobody listens")

    with pytest.raises(DaemonUnavailable) as caught:
        wait()
    text = str(caught.value)
    for part in ("5 s", "unix:/run/m.sock", "nobody listens", "momentd status", "MOMENTD_TIMEOUT"):
        assert part in text
    assert 105 <= clock.now_s < 106.1


def test_pauses_double_up_to_a_second(clock):
    waiting = patience()
    for _ in range(8):
        waiting.pause("x")
    assert clock.slept[:3] == [0.05, 0.1, 0.2]
    assert max(clock.slept) == 1.0


def test_progress_starts_the_clock_again(clock):
    waiting = patience(5)
    clock.now_s += 4.9
    waiting.extend()
    clock.now_s += 4.9
    waiting.tick()
    assert waiting.remaining_s == pytest.approx(0.1)
