"""The pages of an LMDB file: good ones pass in every state, bad pointers are found before use."""

import os
import random
import tracemalloc

import lmdb
import pytest

from momentd_server.storage.lmdb_pages import DamagedPages, check_pages


def _work(path, seed, rounds):
    """Yields the file's bytes after each transaction of a random history."""
    rng = random.Random(seed)
    environment = lmdb.open(str(path), map_size=64 << 20, max_dbs=0)
    keys = set()
    for _ in range(rounds):
        with environment.begin(write=True) as transaction:
            for _ in range(rng.randint(1, 30)):
                if keys and rng.random() < 0.35:
                    key = rng.choice(sorted(keys))
                    transaction.delete(key)
                    keys.discard(key)
                else:
                    key = rng.choice(b"tfsc").to_bytes(1, "big") + rng.randbytes(2)
                    transaction.put(key, rng.randbytes(rng.choice([10, 60, 500, 2000, 9000])))
                    keys.add(key)
        yield (path / "data.mdb").read_bytes()
    environment.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_state_of_a_long_history_is_accepted(tmp_path, seed):
    for data in _work(tmp_path, seed, 80):
        check_pages(data)


def test_a_file_of_no_transaction_is_accepted(tmp_path):
    lmdb.open(str(tmp_path), map_size=1 << 20).close()
    check_pages((tmp_path / "data.mdb").read_bytes())


def test_free_pages_that_were_never_written_may_lie_beyond_the_end_of_the_file(tmp_path):
    environment = lmdb.open(str(tmp_path), map_size=1 << 20)
    short = False
    for size in (100, 30_000, 100):
        with environment.begin(write=True) as transaction:
            transaction.put(b"a", os.urandom(size))
            transaction.put(b"b", os.urandom(40_000))
            transaction.delete(b"b")
        data = (tmp_path / "data.mdb").read_bytes()
        check_pages(data)
        short = short or len(data) < (environment.info()["last_pgno"] + 1) * 4096
    environment.close()
    assert short


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    *_, data = _work(tmp_path_factory.mktemp("lmdb"), 7, 120)
    return data


def test_a_file_that_is_cut_at_any_page_is_refused(good):
    last_used = max(n for n in range(len(good) // 4096) if _counts(good, n))
    for pages in range(0, last_used + 1, 7):
        with pytest.raises(DamagedPages):
            check_pages(good[: pages * 4096])


def _counts(good, page):
    """Whether the header of a page is that of one in use: its flags decide where it is found."""
    damaged = bytearray(good)
    damaged[page * 4096] ^= 1
    try:
        check_pages(bytes(damaged))
    except DamagedPages:
        return True
    return False


def test_a_wrong_number_of_the_last_page_is_refused_and_takes_no_memory(good):
    at = 16 + 24 + 2 * 48
    numbers = [int.from_bytes(good[page * 4096 + at + 8 :][:8], "little") for page in (0, 1)]
    meta = numbers.index(max(numbers)) * 4096
    tracemalloc.start()
    try:
        for bit in range(64):
            damaged = bytearray(good)
            damaged[meta + at + bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedPages):
                check_pages(bytes(damaged))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_the_state_of_an_earlier_commit_is_not_taken_for_the_newest(good):
    """Every bit of both transaction numbers, and every bit of the newest roots."""
    at = 16 + 24 + 2 * 48 + 8  # of the transaction number in a meta page
    numbers = [int.from_bytes(good[page * 4096 + at :][:8], "little") for page in (0, 1)]
    newest = numbers.index(max(numbers)) * 4096
    places = [at, 4096 + at, newest + 16 + 24 + 40, newest + 16 + 24 + 88]
    for place in places:
        for bit in range(64):
            damaged = bytearray(good)
            damaged[place + bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedPages):
                check_pages(bytes(damaged))
