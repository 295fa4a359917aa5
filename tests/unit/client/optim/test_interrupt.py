"""Ctrl-C at every line of a step: no update is lost, none applied twice."""

import gc
import linecache
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import momentd
from momentd._signals import DeferredInterrupt
from tests.support.optim import FakeBackend, embedding, sparse_grad

CLIENT = str(Path(momentd.__file__).parent)
IDS = torch.tensor([1, 7, 1, 3])


class CtrlC:
    """Presses Ctrl-C when the `at`-th line of the client's own code begins."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._entered = []

    def __enter__(self):
        # A collection would run finalizers here, and what they raise is not raised by anyone.
        gc.disable()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        gc.enable()

    def _leaves_lock(self, frame) -> bool:
        """Whether this is the `with lock:` line again, on the way out.

        A tracer can raise there, with the lock still held; a signal cannot: the interpreter looks
        for signals after the call that releases it.
        """
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if not (line.startswith("with ") and "_lock" in line):
            return False
        if frame in self._entered:
            return True
        self._entered.append(frame)
        return False

    def _call(self, frame, event, arg):
        inside = frame.f_code.co_filename.startswith(CLIENT)
        return self._line if inside else None

    def _line(self, frame, event, arg):
        if event == "line" and not self._leaves_lock(frame):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._line


class Trainer:
    """Two tables with rows and one with an empty gradient."""

    def __init__(self) -> None:
        self.modules = [embedding(seed=seed) for seed in range(3)]
        self.optimizer = momentd.SparseAdam([m.weight for m in self.modules], lr=0.1)

    def step(self, number: int) -> None:
        self.give(number)
        self.optimizer.step()

    def give(self, number: int) -> None:
        for module in self.modules[:2]:
            sparse_grad(module.weight, IDS, IDS + float(number))
        sparse_grad(self.modules[2].weight, [], [])

    def weights(self):
        return [module.weight.detach().clone() for module in self.modules]

    def counts(self):
        return {entry.get("step", 0) for entry in self.optimizer.state.values()}


def after(steps: int):
    trainer = Trainer()
    for number in range(1, steps + 1):
        trainer.step(number)
    return trainer.weights()


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def interrupted(call, at: int) -> bool:
    try:
        with CtrlC(at) as ctrl_c:
            call()
    except KeyboardInterrupt:
        return True
    assert ctrl_c.left > 0, "the interrupt was swallowed"
    return False


@pytest.mark.parametrize("done", [0, 1])
def test_a_step_left_at_any_line_happens_once_or_not_at_all(backend, done):
    """`done` = 0: the step also opens tables. Then, and over gRPC, every fifth line is tried."""
    stride = (
        1 if isinstance(backend, FakeBackend) or (done and "grpc" not in backend.address) else 5
    )
    expected = [after(steps) for steps in range(done + 3)]
    at = 1
    while True:
        trainer = Trainer()
        for number in range(1, done + 1):
            trainer.step(number)
        if not interrupted(partial(trainer.step, done + 1), at):
            break
        trainer.optimizer.synchronize()
        happened = same(trainer.weights(), expected[done + 1])
        assert happened or same(trainer.weights(), expected[done]), f"at line event {at}"
        # Either way all counters agree, and training goes on as if nothing had been.
        assert trainer.counts() <= {done + happened}, f"at line event {at}"
        if not happened:
            trainer.step(done + 1)
        trainer.step(done + 2)
        assert same(trainer.weights(), expected[done + 2]), f"at line event {at}"
        at += stride
    assert at > 80


def test_a_second_ctrl_c_while_completing_loses_nothing(fake):
    fake.progress_rows = 2
    expected = after(3)
    at = 1
    while True:
        trainer = Trainer()
        trainer.step(1)
        fake.lose_replies = 1
        with pytest.raises(momentd.errors.DaemonUnavailable):
            trainer.step(2)
        if not interrupted(trainer.optimizer.synchronize, at):
            break
        trainer.step(3)
        assert same(trainer.weights(), expected), f"at line event {at}"
        at += 1
    assert at > 20


@pytest.mark.parametrize("kind", ["handles", "full"])
def test_ctrl_c_in_load_state_dict_leaves_old_state_or_new(fake, kind):
    source = Trainer()
    source.step(1)
    optimizer = source.optimizer
    saved = optimizer.full_state_dict() if kind == "full" else optimizer.state_dict()
    at, seen = 1, set()
    while True:
        trainer = Trainer()
        for number in range(1, 4):
            trainer.step(number)
        if not interrupted(partial(trainer.optimizer.load_state_dict, saved), at):
            break
        seen |= trainer.counts()
        assert trainer.counts() in ({1}, {3}), f"at line event {at}"
        assert {e["step"] for e in trainer.optimizer.state_dict()["state"].values()} in ({1}, {3})
        at += 7
    assert seen == {1, 3}


def test_deferred_interrupts_arrive_when_the_block_ends():
    reached = []

    def block():
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_defer_to_the_outer_one():
    reached = []

    def block():
        with DeferredInterrupt():
            with DeferredInterrupt():
                signal.raise_signal(signal.SIGINT)
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["outer"]


def test_other_threads_and_ignored_signals_are_left_alone():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    inside = []

    def work():
        with DeferredInterrupt():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [previous]
