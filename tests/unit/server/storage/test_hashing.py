"""XXH64 by its published vectors; what a record's hash depends on."""

import numpy as np
import pytest

from momentd_server.storage import hashing


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_bytes_hash_as_xxh64_publishes(data, expected):
    assert hashing.hash_bytes(data) == expected


def test_seed_and_words_agree_with_bytes():
    data = np.random.default_rng(0).integers(0, 255, 1032).astype(np.uint8)
    words = data.view(np.uint64)
    assert hashing.hash_words(words, 0, words.size, np.uint64(77)) == hashing.hash_bytes(data, 77)


def _hash(record, row=5, initial=None):
    words = record.view(np.uint64)
    initial = np.zeros(words.size, np.uint64) if initial is None else initial.view(np.uint64)
    out = np.zeros(1, np.uint64)
    hashing.hash_records(words, np.zeros(1, np.int64), np.array([row]), initial, out)
    return int(out[0])


@pytest.mark.parametrize("nbytes", [8, 32, 40, 1024, 1032, 6144])
def test_every_byte_and_the_row_change_the_hash(nbytes):
    record = np.random.default_rng(nbytes).integers(0, 255, nbytes).astype(np.uint8)
    seen = {_hash(record), _hash(record, row=6), _hash(record, row=5 + (1 << 40))}
    for byte in range(nbytes):
        changed = record.copy()
        changed[byte] ^= 1
        seen.add(_hash(changed))
    assert len(seen) == 3 + nbytes
    assert 0 not in seen


def test_initial_record_counts_zero_whatever_the_row():
    initial = np.full(256, 0.1, np.float32)
    assert _hash(initial.copy(), row=9, initial=initial) == 0
    assert _hash(np.zeros(256, np.float32), row=9) == 0
    assert _hash(np.zeros(256, np.float32), row=9, initial=initial) != 0


def test_records_are_found_at_their_offsets():
    memory = np.random.default_rng(1).integers(0, 1 << 62, 600).astype(np.uint64)
    offsets, rows = np.array([0, 2000, 1032]), np.array([3, 1 << 33, 4])
    initial, out = np.zeros(129, np.uint64), np.zeros(3, np.uint64)
    hashing.hash_records(memory, offsets, rows, initial, out)
    for i, offset in enumerate(offsets):
        record = memory[offset // 8 : offset // 8 + 129].copy()
        assert out[i] == _hash(record, row=int(rows[i]))


def test_check_depends_on_hash_and_family():
    hashes = np.arange(1, 2001, dtype=np.uint64)
    checks = np.zeros((2, 2000), np.uint32)
    for family in (1, 2):
        hashing.fold_checks(hashes, np.uint64(family), checks[family - 1])
    assert np.unique(checks).size >= 3998  # 32 bits: a collision or two would be chance
    assert checks[0, 7] == hashing.fold_check(np.uint64(8), np.uint64(1))
