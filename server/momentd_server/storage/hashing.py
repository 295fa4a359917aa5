# pyright: basic
"""The hash of a record: XXH64 of its bytes, seeded with its row; 0 if it was never changed.

A record that equals the schema's initial record hashes to 0, so a touched-but-equal table has the
digest of an untouched one. The hash knows neither family nor version, because digests compare
contents of different timelines; `fold_check` binds the family, a batch trailer the rest.

All kernels see memory as 8-byte words: records lie at multiples of 8 bytes and are multiples of 8
bytes long.
"""

from __future__ import annotations

import numpy as np

from momentd_server.jit import inline_kernel, kernel, register_warmup

# The five primes of XXH64.
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)

_WORD_BYTES = np.uint64(8)
_32 = np.uint64(32)
_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)


@inline_kernel
def _rotl(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inline_kernel
def _round(lane, word):
    return _rotl(lane + word * _P2, 31) * _P1


@inline_kernel
def _merge(digest, lane):
    return (digest ^ _round(_0, lane)) * _P1 + _P4


@inline_kernel
def _avalanche(digest):
    digest ^= digest >> np.uint64(33)
    digest *= _P2
    digest ^= digest >> np.uint64(29)
    digest *= _P3
    return digest ^ (digest >> _32)


@kernel
def _absorb_words(memory, first, count, seed, total_bytes):
    """XXH64 before its tail bytes and final mix: `count` words of `memory` from `first`."""
    # Unsigned indices: numba guards signed ones against being negative, which costs a third.
    at = np.uint64(first)
    end = at + np.uint64(count)
    if count >= 4:
        lane1 = seed + _P1 + _P2
        lane2 = seed + _P2
        lane3 = seed
        lane4 = seed - _P1
        while at + _4 <= end:
            lane1 = _round(lane1, memory[at])
            lane2 = _round(lane2, memory[at + _1])
            lane3 = _round(lane3, memory[at + _2])
            lane4 = _round(lane4, memory[at + _3])
            at += _4
        digest = _rotl(lane1, 1) + _rotl(lane2, 7) + _rotl(lane3, 12) + _rotl(lane4, 18)
        digest = _merge(_merge(_merge(_merge(digest, lane1), lane2), lane3), lane4)
    else:
        digest = seed + _P5
    digest += total_bytes
    while at < end:
        digest = _rotl(digest ^ _round(_0, memory[at]), 27) * _P1 + _P4
        at += _1
    return digest


@kernel
def hash_words(memory, first, count, seed):
    """XXH64 of `count` words of uint64 `memory` from index `first`, seeded with uint64 `seed`."""
    return _avalanche(
        _absorb_words(memory, first, count, np.uint64(seed), np.uint64(count) * _WORD_BYTES)
    )


@kernel
def hash_record(memory, word, row, initial):
    """The hash of the record at word index `word`; `initial` is uint64[record_bytes / 8]."""
    count = np.uint64(initial.shape[0])
    at = np.uint64(word)
    same = _0
    while same < count and memory[at + same] == initial[same]:
        same += _1
    if same == count:
        return _0
    digest = hash_words(memory, word, count, np.uint64(row))
    # 0 is taken by "equal to the initial record".
    return digest if digest != _0 else _1


@kernel
def hash_records(memory, offsets, rows, initial, hashes):
    """Hash m records.

    memory   uint64[w]  the space (or any buffer), viewed as words
    offsets  int64[m]   byte offset of each record in `memory`, multiples of 8
    rows     int64[m]
    initial  uint64[record_bytes / 8]  the schema's initial record
    hashes   uint64[m]  out
    """
    for i in range(offsets.shape[0]):
        hashes[i] = hash_record(memory, offsets[i] >> 3, rows[i], initial)


@kernel
def fold_check(record_hash, family):
    """The 32-bit record check kept beside a location: binds a record hash to a family."""
    return np.uint32(_avalanche(record_hash ^ _avalanche(np.uint64(family) + _P5)))


@kernel
def fold_checks(hashes, family, checks):
    """`fold_check` of each of uint64[m] `hashes` into uint32[m] `checks`."""
    for i in range(hashes.shape[0]):
        checks[i] = fold_check(hashes[i], family)


@kernel
def _hash_with_tail(words, tail, seed):
    total = np.uint64(words.shape[0]) * _WORD_BYTES + np.uint64(tail.shape[0])
    digest = _absorb_words(words, 0, words.shape[0], seed, total)
    at = 0
    if tail.shape[0] >= 4:
        half = _0
        for i in range(4):
            half |= np.uint64(tail[i]) << np.uint64(8 * i)
        digest = _rotl(digest ^ (half * _P1), 23) * _P2 + _P3
        at = 4
    while at < tail.shape[0]:
        digest = _rotl(digest ^ (np.uint64(tail[at]) * _P5), 11) * _P1
        at += 1
    return _avalanche(digest)


def hash_bytes(data: bytes | bytearray | memoryview | np.ndarray, seed: int = 0) -> int:
    """XXH64 of bytes of any length and alignment: headers, trailers, catalog values."""
    raw = np.frombuffer(data, np.uint8)
    whole = raw.size & ~7
    words = raw[:whole].copy().view(np.uint64)
    return int(_hash_with_tail(words, raw[whole:].copy(), np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)))


@register_warmup
def compile_hashing() -> None:
    """The kernels of this module, with the argument types that the engine and the store use."""
    words, rows, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64), np.uint64(0)
    hash_records(words, rows, rows, words, words.copy())
    hash_words(words, 0, 1, zero)
    fold_checks(words, zero, np.zeros(1, np.uint32))
    hash_bytes(b"")
