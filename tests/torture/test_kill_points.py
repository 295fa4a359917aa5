"""An engine is killed between any two lines, alone and again while the next one takes over.

Each request is then done once or not at all, over all its tables; what was acknowledged is there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from momentd_server import jit
from momentd_server.config import MIB, ServeConfig
from momentd_server.engine.arenas import ArenaBudget
from momentd_server.engine.engine import LocalEngine
from momentd_server.engine.inherit import Inheritance
from momentd_server.engine.journal import Journal
from momentd_server.engine.sessions import Outcome
from momentd_wire import addresses
from momentd_wire.errors import InternalError
from tests.support.kill_points import HeldByTest, LineCounter, in_child
from tests.support.local_engine import AdamModel, adam_schema, batch

ROWS, WIDTH = 400, 8
BIG = 30_000  # rows of a table that does not fit the cache
FINGERPRINT = bytes(16)


@dataclass
class Script:
    """A session that does numbered requests; the same ones whoever runs it."""

    path: Path
    held: HeldByTest
    sabotage: Callable[[], object] | None = None  # a seeded bug, for engines that take over

    def config(self) -> ServeConfig:
        return ServeConfig(
            data_dir=self.path / "data", cache_bytes=16 * MIB,
            address=addresses.parse(f"unix:{self.path}/s"), threads=2, read_threads=4,
        )  # fmt: skip

    def start(self) -> LocalEngine:
        if self.sabotage is not None:
            self.sabotage()
        return LocalEngine.start(self.config(), lambda: None, self.held)

    def prepare(self) -> None:
        """In a child: an engine with a session, its tables, and records on disk."""
        engine = self.start()
        session = engine.sessions.open(plane="local", pid=os.getppid(), uid=0, run="r", program="p")
        budget = ArenaBudget(session_bytes=1 << 30, total_bytes=1 << 30, kept=self.held)
        budget.make(session, 4 << 20)
        for rows, width in ((ROWS, WIDTH), (ROWS, WIDTH), (BIG, 128)):
            engine.open_table(
                session, name=None, label="t", schema=adam_schema(rows, width), run="r",
                mode="open_or_create",
            )  # fmt: skip
        big = self.tables(engine)[-1]
        grads = np.ones((3000, 128), np.float32)
        for start in range(0, BIG, 3000):
            engine.update([batch(big, np.arange(start, start + 3000), grads)])
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def tables(engine):
        return engine.list_tables()

    def request(self, engine, session, number: int) -> None:
        """Request `number` of the session, from arrays in the arena and beside it."""
        rng = np.random.default_rng(number)
        tables = self.tables(engine)
        kind = number % 4
        if kind == 3:
            rows, values = scatter_of(rng)

            def call(ticket):
                reply = [b"none"]

                def encode(step, update_number):
                    reply[0] = b"%d %d" % (step, update_number)
                    return reply[0]

                engine.scatter(
                    id=tables[0].id, generation=tables[0].generation, rows=rows, range=None,
                    fields=["exp_avg"], values=[values], step=None, ticket=ticket, encode=encode,
                )  # fmt: skip
                return Outcome(reply[0])
        else:
            parts = [update_of(rng, ROWS, WIDTH, 60), update_of(rng, ROWS, WIDTH, 40)]
            chosen = tables[:2]
            if kind == 2:
                parts.append(update_of(rng, BIG, 128, 500))
                chosen = tables
            arena = next(iter(session.arenas.values()))
            batches = [
                batch(table, rows, in_arena(arena, k, grads))
                for k, (table, (rows, grads)) in enumerate(zip(chosen, parts, strict=True))
            ]

            def call(ticket):
                body = []

                def encode(outcomes):
                    body.append(b" ".join(b"%d" % each.update_number for each in outcomes))
                    return body[0]

                progress = (lambda *_: None) if kind == 1 else None
                engine.update(batches, progress, ticket, encode)
                return Outcome(body[0])

        outcome, _ = session.once(1, number, FINGERPRINT, call)
        assert outcome.body != b"none"


def update_of(rng, rows, width, count):
    ids = rng.integers(0, rows, count)
    return ids, rng.standard_normal((count, width), np.float32)


def scatter_of(rng):
    rows = rng.choice(ROWS, 30, replace=False).astype(np.int64)
    return rows, rng.standard_normal((30, WIDTH), np.float32)


def in_arena(arena, k, grads):
    view = np.ndarray(grads.shape, np.float32, arena.memory, k << 20)
    view[:] = grads
    return view


class Oracle:
    """What the tables are after each request."""

    def __init__(self) -> None:
        self.models = [AdamModel(ROWS, WIDTH), AdamModel(ROWS, WIDTH), AdamModel(BIG, 128)]
        for start in range(0, BIG, 3000):
            self.models[2].update(np.arange(start, start + 3000), np.ones((3000, 128), np.float32))

    def do(self, number: int) -> None:
        rng = np.random.default_rng(number)
        kind = number % 4
        if kind == 3:
            rows, values = scatter_of(rng)
            self.models[0].exp_avg[rows] = values
            return
        for model in self.models[:2]:
            count = 60 if model is self.models[0] else 40
            model.update(*update_of(rng, ROWS, WIDTH, count))
        if kind == 2:
            self.models[2].update(*update_of(rng, BIG, 128, 500))


def states(numbers: int):
    """(exp_avg, exp_avg_sq) of all tables after 0, 1, ... requests."""
    oracle, found = Oracle(), []
    for number in range(numbers + 1):
        if number:
            oracle.do(number)
        found.append([(m.exp_avg.copy(), m.exp_avg_sq.copy()) for m in oracle.models])
    return found


def check(engine, expected) -> None:
    for table, (exp_avg, exp_avg_sq) in zip(Script.tables(engine), expected, strict=True):
        found = engine.gather(
            id=table.id, generation=table.generation, rows=None, range=(0, table.schema.rows),
            fields=[], outs=None,
        )  # fmt: skip
        assert np.array_equal(found.values[0], exp_avg), f"table {table.id}: exp_avg"
        assert np.array_equal(found.values[1], exp_avg_sq), f"table {table.id}: exp_avg_sq"


REQUESTS = 8


class Killer:
    """Runs engines on a copy of one prepared memory and directory, and kills them."""

    def __init__(self, path, expected) -> None:
        self.path, self.expected = path, expected
        self.sabotage: Callable[[], object] | None = None

    @contextmanager
    def script(self):
        """A prepared session; everything anew, because a killed run leaves its traces."""
        held = HeldByTest()
        where = self.path / str(next(_numbers))
        where.mkdir()
        script = Script(where, held, self.sabotage)
        assert in_child(script.prepare) == -signal.SIGKILL
        held.collect()
        assert "space" in held.held
        try:
            yield script
        finally:
            held.close()
            shutil.rmtree(where)

    def lines(self) -> tuple[int, int]:
        """Lines of the requests, and of a take-over, if nobody is killed."""
        with self.script() as script:
            run = self._count(script, lambda counter: run_requests(script, counter))
            over = self._count(script, lambda counter: take_over(script, self.expected, counter))
        return run, over

    def _count(self, script: Script, work) -> int:
        reading, writing = os.pipe()

        def run() -> None:
            counter = LineCounter(0)
            work(counter)
            os.write(writing, counter.count.to_bytes(8, "little"))
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(run) == -signal.SIGKILL
        script.held.collect()
        count = int.from_bytes(os.read(reading, 8), "little")
        os.close(reading)
        os.close(writing)
        return count

    def kill(self, at: int, again_at: int = 0) -> None:
        """Kill at a line of the requests, and maybe again during the take-over; then go on."""
        with self.script() as script:
            self._die(script, lambda: run_requests(script, LineCounter(at)))
            if again_at:
                self._die(script, lambda: take_over(script, self.expected, LineCounter(again_at)))
            where = f"killed at line {at}" + f" and {again_at}" * bool(again_at)
            assert in_child(lambda: finish(script, self.expected)) == 0, where
            script.held.collect()
            assert in_child(lambda: look(script, self.expected[-1])) == 0, where

    @staticmethod
    def _die(script: Script, work) -> None:
        """Work that is killed; if it waits less than it did the first time, at its end."""

        def run() -> None:
            work()
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(run) == -signal.SIGKILL
        script.held.collect()


def run_requests(script: Script, counter: LineCounter) -> None:
    """In a child: do what is not done."""
    engine = script.start()
    (session,) = engine.sessions.all()
    counter.start()
    for number in range(done(session) + 1, REQUESTS + 1):
        script.request(engine, session, number)
    counter.stop()


def done(session) -> int:
    return dict(session.done()).get(1, 0)


def take_over(script: Script, expected, counter: LineCounter) -> None:
    """In a child: the next engine has what is said to be done, and nothing else."""
    counter.start()
    engine = script.start()
    counter.stop()
    (session,) = engine.sessions.all()
    check(engine, expected[done(session)])


def finish(script: Script, expected) -> None:
    """In a child: what is said to be done is there; the client repeats the last, does the rest."""
    engine = script.start()
    (session,) = engine.sessions.all()
    last = done(session)
    check(engine, expected[last])
    # The last one is repeated, as after a lost answer, unless the next one was sent already.
    repeated = last > 0 and session._streams[1].outcome is not None
    for number in range(last + (not repeated), REQUESTS + 1):
        script.request(engine, session, number)
    check(engine, expected[-1])
    os._exit(0)  # a crash of no consequence


def look(script: Script, expected) -> None:
    """In a child: an orderly stop and a start without memory change nothing of it."""
    engine = script.start()
    check(engine, expected)
    engine.stop()
    engine.close()
    os._exit(0)


_numbers = itertools.count()


@pytest.fixture(scope="module")
def killer(tmp_path_factory):
    jit.warm_up()
    return Killer(tmp_path_factory.mktemp("kills"), states(REQUESTS))


def points(lines: int, count: int) -> list[int]:
    """So many places, spread over all lines."""
    return sorted({1 + k * (lines - 1) // max(count - 1, 1) for k in range(count)})


def kills_at_random_instants(killer, count: int, seed: int = 0) -> None:
    """Also between two stores of a kernel, and while other threads work."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        with killer.script() as script:
            delay_s = rng.uniform(0, 0.05)

            def run(script=script, delay_s=delay_s) -> None:
                engine = script.start()
                (session,) = engine.sessions.all()
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                for number in range(1, REQUESTS + 1):
                    script.request(engine, session, number)
                time.sleep(10)

            assert in_child(run) == -signal.SIGKILL
            script.held.collect()
            assert in_child(lambda script=script: finish(script, killer.expected)) == 0
            script.held.collect()
            assert in_child(lambda script=script: look(script, killer.expected[-1])) == 0


def test_a_kill_between_two_lines_loses_nothing_and_doubles_nothing(killer):
    lines, _ = killer.lines()
    for at in points(lines, 12):
        killer.kill(at)


def test_a_kill_during_the_take_over_loses_nothing_either(killer):
    lines, over = killer.lines()
    for k, again_at in enumerate(points(over, 6)):
        killer.kill(1 + (7919 * (k + 1)) % lines, again_at)


def test_a_kill_at_a_random_instant_loses_nothing(killer):
    kills_at_random_instants(killer, 12)


def test_a_request_that_kills_engine_after_engine_breaks_its_own_tables_only(killer):
    with killer.script() as script:
        killer._die(script, lambda: run_requests(script, LineCounter(0, "_apply_rows")))
        for _ in range(2):
            killer._die(
                script, lambda: take_over(script, killer.expected, LineCounter(0, "_finish_table"))
            )

        def look_at_it() -> None:
            engine = script.start()
            (session,) = engine.sessions.all()
            one, two, big = script.tables(engine)
            with pytest.raises(InternalError, match="again and again"):
                script.request(engine, session, done(session) + 1)
            for table in (one, two):
                assert engine.tables.get(table.id).broken is not None
            # The others serve, and the broken ones can be dropped.
            engine.update([batch(big, [1], np.ones((1, 128), np.float32))])
            engine.drop_tables(session, ids=[one.id, two.id], run=None, force=False)
            os._exit(0)

        assert in_child(look_at_it) == 0


def _do_everything_again() -> None:
    Journal.left_to_do = lambda self: [(0, int(self._block["todo"][:, :, 1].max()))]


def _forget_the_journal() -> None:
    Journal.unfinished = lambda self, _session_of: None


def _store_no_outcome() -> None:
    Journal.finish = lambda self: self.abandon()


def _believe_all_frames() -> None:
    Inheritance._count_rows = lambda self, table: 0


CONTROL = ("open", "clone", "snapshot", "restore", "delete", "drop")


def control(engine, session, kind: str, number: int) -> None:
    """One numbered call that changes the catalog; what it needs is what the ones before made."""
    tables = {t.label: t for t in engine.list_tables()}

    def call(ticket):
        if kind == "open":
            engine.open_table(
                session, name="named", label="opened", schema=adam_schema(100, 8), run="r",
                mode="create", ticket=ticket,
            )  # fmt: skip
        elif kind == "clone":
            source = tables["opened"]
            engine.clone_table(
                session, id=source.id, generation=source.generation, name=None, label="cloned",
                run="r", ticket=ticket,
            )  # fmt: skip
        elif kind == "snapshot":
            source = tables["cloned"]
            engine.create_snapshot(
                [(source.id, source.generation)], run=None, name="s", pinned=True
            )
        elif kind == "restore":
            snapshot_id = engine.get_snapshot(name="s").record.tables[0].id
            engine.restore_table(
                session, id=snapshot_id, name=None, label="restored", run="r", replace=False,
                ticket=ticket,
            )  # fmt: skip
        elif kind == "delete":
            engine.delete_snapshots(["s"], ticket)
        else:
            ids = [tables[label].id for label in ("cloned", "restored") if label in tables]
            assert len(ids) == 2 or ticket.repeated
            wanted = ids if len(ids) == 2 else [1 << 40, (1 << 40) + 1]
            engine.drop_tables(session, ids=wanted, run=None, force=False, ticket=ticket)
        return Outcome(b"done")

    session.once(7, number, FINGERPRINT, call)


def run_control(script: Script, counter: LineCounter) -> None:
    engine = script.start()
    (session,) = engine.sessions.all()
    counter.start()
    for number, kind in enumerate(CONTROL, 1):
        if number > dict(session.done()).get(7, 0):
            control(engine, session, kind, number)
            labels = sorted(t.label for t in engine.list_tables())
            # Nothing twice: each call has made one table, or taken two away.
            made = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 1}[number]
            assert len(labels) == 3 + made, (kind, labels)
            assert len(engine.list_snapshots()) == (number in (3, 4))
    counter.stop()
    engine.update([batch(engine.get_table(name="named"), [1], np.ones((1, 8), np.float32))])


def kills_of_control(killer, count: int) -> None:
    with killer.script() as script:
        lines = killer._count(script, lambda counter: run_control(script, counter))
    for at in points(lines, count):
        with killer.script() as script:
            killer._die(script, lambda script=script, at=at: run_control(script, LineCounter(at)))

            def again(script=script) -> None:
                run_control(script, LineCounter(0))
                os._exit(0)

            assert in_child(again) == 0, f"killed at line {at} of {lines}"


def test_calls_that_change_the_catalog_are_done_once(killer):
    kills_of_control(killer, 12)


@pytest.mark.torture
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "bug",
    [_do_everything_again, _forget_the_journal, _store_no_outcome, _believe_all_frames],
)  # fmt: skip
def test_seeded_bugs_are_caught(killer, bug, monkeypatch):
    """The harness must be able to fail. Torn rows have a test of their own (row protocol)."""
    monkeypatch.setattr(killer, "sabotage", bug)

    def search() -> None:
        for at in points(9_000, 40):
            killer.kill(at)
        kills_at_random_instants(killer, 60)

    with pytest.raises(AssertionError):
        search()


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_kills_between_all_lines(killer):
    """MOMENTD_TORTURE_KILLS places (default 400), spread over the lines of requests; as many pairs,
    one there and one in the take-over; and as many random instants."""
    count = int(os.environ.get("MOMENTD_TORTURE_KILLS", "400"))
    lines, over = killer.lines()
    for at in points(lines, count):
        killer.kill(at)
    for k, again_at in enumerate(points(over, count)):
        killer.kill(1 + (7919 * (k + 1)) % lines, again_at)
    kills_at_random_instants(killer, count, seed=1)
    kills_of_control(killer, count)
    print(f"4 x {count} kills: {lines} lines of requests, {over} of take-overs, random instants")
