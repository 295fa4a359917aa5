"""Compaction beside everything else, and compaction that is killed or has no space."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from momentd_server.engine import compaction
from momentd_server.engine.lifecycle import Tables
from momentd_server.storage.segments import SegmentStore
from momentd_wire.errors import CorruptRecord, MomentdError, OutOfSpace
from tests.support.compaction import Trainer, books_are_right, check, compact, files
from tests.support.disks import small_file_system
from tests.support.local_engine import (
    AdamModel,
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)

ROWS, WIDTH = 40_000, 128  # 40 MB of records beside 16 MiB of cache


class Killed(BaseException):
    """Nothing in the engine catches this."""


@pytest.fixture
def by_hand(monkeypatch):
    """No compaction but by `run_once`, which has much to do."""
    monkeypatch.setattr(compaction.Compactor, "start", lambda self: None)
    monkeypatch.setattr(compaction, "_SLACK_BYTES", 0)


def kill_at(monkeypatch, owner: type, method: str, call: int, *, after: bool) -> None:
    """This thread's nth call of a method from now on raises, before or after its work."""
    real, calls = getattr(owner, method), iter(range(1, 1000))
    thread = threading.current_thread()

    def killed(*args, **more):
        dies = threading.current_thread() is thread and next(calls) == call
        if dies and not after:
            raise Killed
        result = real(*args, **more)
        if dies:
            raise Killed
        return result

    monkeypatch.setattr(owner, method, killed)


def train_and_compact(trainer: Trainer) -> int:
    """What is worth compacting depends on when the cleaner wrote which records."""
    count = 0
    for _ in range(8):
        trainer.rewrite(high=ROWS // 2)
        count += compact(trainer.engine)
    return count


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize(
    ("owner", "method", "call", "after"),
    [
        (SegmentStore, "append", 1, False),
        (SegmentStore, "append", 2, True),
        (compaction.Compactor, "_publish", 2, True),
        (Tables, "commit_without", 1, False),
        (Tables, "commit_without", 1, True),
        (SegmentStore, "unlink", 1, True),
    ],
)  # fmt: skip
def test_a_kill_in_the_middle_leaves_the_last_flush(
    tmp_path, monkeypatch, owner, method, call, after
):
    engine = start_engine(tmp_path, disk_ratio=1.2)
    schema = adam_schema(ROWS, WIDTH)
    trainer = Trainer(engine, open_table(engine, open_session(engine), schema, "named"))
    trainer.write_all()
    engine.flush([])
    flushed = trainer.model.copy()
    with monkeypatch.context() as patch:
        kill_at(patch, owner, method, call, after=after)
        with pytest.raises(Killed):
            train_and_compact(trainer)
    # Nothing that runs may depend on what was left half done either.
    trainer.check()
    engine.stop(discard=True)
    engine.close()

    engine = start_engine(tmp_path, disk_ratio=1.2)
    again = Trainer(engine, open_table(engine, open_session(engine), schema, "named"), seed=1)
    again.model = flushed.copy()
    again.check()
    assert train_and_compact(again) > 0
    books_are_right(engine)
    again.check()
    engine.stop(discard=True)
    engine.close()


def wait_until(reached) -> None:
    until = time.monotonic() + 20
    while not reached() and time.monotonic() < until:
        time.sleep(0.05)
    assert reached()


def wait_until_idle(engine) -> None:
    """Until the thread has found for a while that nothing is worth compacting."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        now = sum(t.counters.bytes_compacted for t in engine.tables.all())
        if now != count or engine.compactor._running.locked():
            count, since = now, time.monotonic()
        time.sleep(0.05)


def test_a_drop_gives_back_what_compaction_was_writing(tmp_path, monkeypatch):
    """And does not wait for somebody to write something first."""
    monkeypatch.setattr(compaction, "_SLACK_BYTES", 0)
    engine = start_engine(tmp_path, disk_ratio=1.2)
    session = open_session(engine)
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))
    trainer.write_all()
    for _ in range(20):
        trainer.rewrite(high=ROWS // 2)
        if engine.compactor._outputs:
            break
    wait_until_idle(engine)
    assert engine.compactor._outputs
    engine.drop_tables(session, ids=[trainer.table.id], run=None, force=False)
    wait_until(lambda: not files(engine))
    engine.stop(discard=True)
    engine.close()


def test_what_only_the_last_flush_needed_is_given_back_after_the_next(tmp_path, monkeypatch):
    """Although nobody writes anything after it."""
    monkeypatch.setattr(compaction, "_SLACK_BYTES", 0)
    engine = start_engine(tmp_path, disk_ratio=1.2)
    session = open_session(engine)
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH), "named"))
    table = engine.tables.get(trainer.table.id)
    trainer.write_all()
    engine.flush([])
    trainer.rewrite(2)
    engine.tables.spiller.spill_all(table)
    wait_until_idle(engine)
    compacted = table.counters.segments_compacted
    engine.flush([])
    wait_until(lambda: table.counters.segments_compacted > compacted)
    wait_until_idle(engine)
    books_are_right(engine)
    trainer.check()
    engine.stop(discard=True)
    engine.close()


@pytest.mark.usefixtures("by_hand")
def test_a_flush_whose_files_are_given_back_while_it_syncs(engine, session, monkeypatch):
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))
    trainer.write_all()
    for _ in range(6):
        trainer.rewrite(high=ROWS // 2)
    engine.compactor._ratio = 1.2
    before, real = set(files(engine)), SegmentStore._sync_file
    given_back: list[int] = []

    def sync_and_compact(store, segment):
        real(store, segment)
        if not given_back:
            assert compact(engine) > 0
            given_back.extend(before - set(files(engine)))

    monkeypatch.setattr(SegmentStore, "_sync_file", sync_and_compact)
    engine.flush([])
    assert given_back
    trainer.check()


@pytest.mark.usefixtures("by_hand")
def test_a_drop_between_choice_and_start(engine, session, monkeypatch):
    """Somebody else's flush may be waiting for the room."""
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))
    trainer.write_all()
    for _ in range(4):
        trainer.rewrite(high=ROWS // 2)
    engine.compactor._ratio = 1.2
    real = engine.compactor._choose

    def choose_and_drop():
        chosen = real()
        if chosen is not None:
            engine.drop_tables(session, ids=[trainer.table.id], run=None, force=False)
        return chosen

    monkeypatch.setattr(engine.compactor, "_choose", choose_and_drop)
    assert compact(engine) == 1
    assert files(engine) == {}


@pytest.mark.usefixtures("by_hand")
def test_a_clone_and_a_drop_in_the_middle_of_a_segment(tmp_path):
    engine = start_engine(tmp_path, disk_ratio=1.2)
    session = open_session(engine)
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))
    trainer.write_all()
    for _ in range(4):
        trainer.rewrite(high=ROWS // 2)
    compactor, real = engine.compactor, engine.compactor._move_some
    clones: list[Trainer] = []

    def clone_and_drop(job, at):
        done = real(job, at)
        if len(clones) < 4:
            engine.tables.moving.release()
            try:
                source = trainer.table
                twin = engine.clone_table(
                    session, id=source.id, generation=source.generation, name=None, label="",
                    run="test",
                )  # fmt: skip
                clones.append(Trainer(engine, twin, seed=len(clones)))
                clones[-1].model = trainer.model.copy()
                clones[-1].update(np.arange(len(clones), ROWS, 40))
                if len(clones) == 2:
                    engine.drop_tables(session, ids=[clones[0].table.id], run=None, force=False)
            finally:
                engine.tables.moving.acquire()
        return done

    compactor._move_some = clone_and_drop
    for _ in range(4):
        compact(engine)
        for _ in range(4):
            trainer.rewrite(high=ROWS // 2)
    assert len(clones) > 1
    books_are_right(engine)
    for one in (trainer, *clones[1:]):
        one.check()
    engine.stop(discard=True)
    engine.close()


class Storm:
    """Two tables, of records of 4 KiB and of 32 bytes, and threads that use them at once."""

    schemas = {"wide": adam_schema(12_000, 512), "narrow": adam_schema(600_000, 4)}  # noqa: RUF012

    def __init__(self, engine, seconds: float) -> None:
        self.engine, self.session = engine, open_session(engine)
        self.ends = time.monotonic() + seconds
        self.trainers = {
            name: Trainer(engine, open_table(engine, self.session, schema, name), seed=len(name))
            for name, schema in self.schemas.items()
        }
        # While one is held, the model is as its table.
        self.locks = {name: threading.Lock() for name in self.schemas}
        self.flushed: dict[str, AdamModel] = {}

    def run(self) -> None:
        with ThreadPoolExecutor(4) as threads:
            works = [threads.submit(self.train, name) for name in self.schemas]
            works += [threads.submit(self.flush), threads.submit(self.clone)]
            for work in works:
                work.result(120)

    def train(self, name: str) -> None:
        one, rng = self.trainers[name], np.random.default_rng(1)
        count = 900 if name == "wide" else 20_000
        while time.monotonic() < self.ends:
            rows = np.unique(rng.integers(0, one.model.rows, count))
            self.engine.prefetch(id=one.table.id, generation=one.table.generation, rows=rows)
            with self.locks[name]:
                one.update(rows)

    def flush(self) -> None:
        while time.monotonic() < self.ends:
            for name, one in self.trainers.items():
                with self.locks[name]:
                    self.engine.flush([one.table.id])
                    self.flushed[name] = one.model.copy()
            time.sleep(0.3)

    def clone(self) -> None:
        while time.monotonic() < self.ends:
            for name, one in self.trainers.items():
                with self.locks[name]:
                    twin = self.engine.clone_table(
                        self.session, id=one.table.id, generation=one.table.generation, name=None,
                        label="", run="test",
                    )  # fmt: skip
                    model = one.model.copy()
                other = Trainer(self.engine, twin, seed=9)
                other.model = model
                other.update(np.arange(0, model.rows, 50))
                other.check()
                self.engine.drop_tables(self.session, ids=[twin.id], run=None, force=False)


def test_everything_at_once_and_then_the_power_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "_SLACK_BYTES", 0)
    engine = start_engine(tmp_path, disk_ratio=1.2)
    storm = Storm(engine, 8)
    storm.run()
    engine.compactor.stop()
    assert sum(t.counters.segments_compacted for t in engine.tables.all()) > 1
    books_are_right(engine)
    for one in storm.trainers.values():
        one.check()
    engine.stop(discard=True)
    engine.close()
    engine = start_engine(tmp_path)
    for name, model in storm.flushed.items():
        check(engine, open_table(engine, open_session(engine), storm.schemas[name], name), model)
    engine.stop(discard=True)
    engine.close()


@pytest.mark.root
def test_a_disk_that_was_full_goes_on_by_itself(tmp_path):
    """Rows in the cache are updated meanwhile; compaction and spills need no call to resume."""
    with small_file_system(tmp_path / "disk", 200) as where:
        engine = start_engine(where)
        table = open_table(engine, open_session(engine), adam_schema(ROWS, WIDTH))
        trainer = Trainer(engine, table)
        trainer.write_all()
        status = os.statvfs(where)
        ballast = where / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
        failed, start = None, 0
        for start in range(0, ROWS, 2000):
            rows = np.arange(start, start + 2000)
            try:
                trainer.update(rows)
            except OutOfSpace as error:
                failed = error
                break
        assert failed is not None, "more was written than there was space for"
        assert "free space" in str(failed)
        # Of the rows that were updated last, all are still there.
        trainer.update(np.arange(start - 2000, start))
        books_are_right(engine)
        ballast.unlink()
        counters = engine.tables.get(table.id).counters
        written, until = counters.bytes_written, time.monotonic() + 30
        while counters.bytes_written == written and time.monotonic() < until:
            time.sleep(0.05)
        assert counters.bytes_written > written, "the cleaner did not go on"
        for _ in range(4):
            trainer.rewrite()
        assert counters.segments_compacted > 0
        books_are_right(engine)
        trainer.check()
        engine.stop(discard=True)
        engine.close()


def test_a_damaged_block_fails_only_calls_that_need_it(engine, session, monkeypatch):
    """Updates and compaction beside it go on, and nothing is changed by those that fail."""
    monkeypatch.setattr(compaction, "_SLACK_BYTES", 0)
    trainer = Trainer(engine, open_table(engine, session, adam_schema(ROWS, WIDTH)))
    engine.compactor.stop()
    trainer.write_all()
    table = engine.tables.get(trainer.table.id)
    first = table.segments[min(table.segments)]
    trailer = next(iter(engine._store.read_trailers(first)))
    with engine._lane:
        slots = table.location[trailer.rows]
    on_disk = np.flatnonzero(slots > 0)
    bad = int(trailer.rows[on_disk[0]])
    with engine._store.path(first).open("r+b") as file:
        file.seek(int(slots[on_disk[0]]) & ((1 << 28) - 1))
        file.write(os.urandom(512))
    others = np.setdiff1d(np.arange(ROWS), [bad])
    step = trainer.model.step
    for seed in range(6):
        rows = np.random.default_rng(seed).choice(others, 3000, replace=False)
        trainer.update(np.sort(rows))
        with contextlib.suppress(MomentdError):
            compact(engine)
        with pytest.raises(CorruptRecord, match=f"row {bad} "):
            engine.update([
                batch(trainer.table, np.append(rows[:50], bad), np.ones((51, WIDTH), np.float32))
            ])  # fmt: skip
    assert engine.get_table(id=table.id).step == step + 6
    found = engine.gather(
        id=table.id, generation=trainer.table.generation, rows=others, range=None, fields=[],
        outs=None,
    )  # fmt: skip
    assert np.array_equal(found.values[0], trainer.model.exp_avg[others])
    assert np.array_equal(found.values[1], trainer.model.exp_avg_sq[others])
    books_are_right(engine)
