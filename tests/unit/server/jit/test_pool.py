"""Parts, order of exceptions, and that nothing is left behind."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentd_server.jit import Pool
from momentd_server.jit.pool import bounds


@pytest.fixture
def pool():
    pool = Pool(4, name="test-pool")
    yield pool
    pool.close()


@given(st.integers(1, 9), st.integers(0, 1_000))
def test_parts_cover_the_range_without_overlap(parts, count):
    cut = [bounds(worker, parts, count) for worker in range(parts)]
    assert [i for start, stop in cut for i in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in cut]
    assert max(sizes) - min(sizes) <= 1


def test_each_part_runs_once_on_its_own_thread(pool):
    seen = {}

    def part(worker, start, stop, out):
        seen[worker] = (start, stop, threading.current_thread().name)
        out[start:stop] += 1

    out = np.zeros(10)
    pool.run(part, 10, out)
    assert out.tolist() == [1] * 10
    assert {worker: cut[:2] for worker, cut in seen.items()} == {
        0: (0, 2), 1: (2, 5), 2: (5, 7), 3: (7, 10)
    }  # fmt: skip
    assert seen[0][2] == threading.current_thread().name
    assert [seen[worker][2] for worker in (1, 2, 3)] == [f"test-pool-{k}" for k in (1, 2, 3)]


@pytest.mark.parametrize(
    ("count", "least", "parts"), [(10, 20, 1), (10, 5, 2), (0, 1, 1), (2, 1, 2)]
)
def test_small_ranges_get_fewer_parts(pool, count, least, parts):
    seen = []
    pool.run(lambda worker, *_: seen.append(worker), count, least=least)
    assert sorted(seen) == list(range(parts))


@pytest.mark.parametrize("failing", [{0}, {2}, {1, 3}, {0, 1, 2, 3}])
def test_lowest_failed_workers_exception_comes_after_all_parts_ended(pool, failing):
    ended = []

    def part(worker, _start, _stop):
        if worker in failing:
            raise ValueError(f"worker {worker}")
        ended.append(worker)

    with pytest.raises(ValueError, match=f"worker {min(failing)}"):
        pool.run(part, 4)
    assert set(ended) | failing == {0, 1, 2, 3}
    pool.run(lambda worker, *_: ended.append(worker), 4)
    assert len(ended) == 8 - len(failing)


def test_an_interrupt_of_the_caller_waits_for_the_others(pool):
    release, ended = threading.Event(), []

    def part(worker, _start, _stop):
        if worker == 0:
            threading.Timer(0.05, release.set).start()
            raise KeyboardInterrupt
        assert release.wait(10)
        ended.append(worker)

    with pytest.raises(KeyboardInterrupt):
        pool.run(part, 4)
    assert sorted(ended) == [1, 2, 3]


def test_calls_from_several_threads_take_turns(pool):
    counts = np.zeros(100)

    def part(_worker, start, stop):
        for i in range(start, stop):
            counts[i] += 1

    threads = [threading.Thread(target=lambda: [pool.run(part, 100) for _ in range(50)])
               for _ in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.tolist() == [150] * 100


def test_close_ends_the_threads():
    pool = Pool(3, name="closing")
    pool.close()
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("closing")]
    seen = []
    pool.run(lambda *part: seen.append(part), 5)
    assert seen == [(0, 0, 5)]


def test_batches_are_not_kept_alive(pool):
    class Payload:
        ended = threading.Event()

        def __del__(self):
            self.ended.set()

    pool.run(lambda *_: None, 4, Payload())
    pool.run(lambda *_: None, 4)
    assert Payload.ended.wait(10)


def test_a_pool_needs_a_thread():
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)
