"""The pages of an LMDB file, looked at before LMDB follows them.

LMDB believes every pointer that it reads: a flipped bit in a page would be a crash of the daemon,
an endless loop, or the state of an earlier commit. So the whole file (some MiB) is walked first,
each number compared with its bounds: both meta pages belong to neighbouring commits, keys ascend,
each page is in exactly one place (a tree, or the list of free pages), and all counts are right.

Format of LMDB 0.9 (data version 1) on 64-bit little-endian machines.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

_PAGE_HEADER: Final = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_HEADER_BYTES: Final = _PAGE_HEADER.size
# magic, version, address, map size, then the two databases, last page, transaction
_META: Final = struct.Struct("<IIQQ")
_DB: Final = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, four counts, root
_META_TAIL: Final = struct.Struct("<QQ")
_NODE: Final = struct.Struct("<HHHH")  # low, high, flags, key bytes
_NODE_BYTES: Final = _NODE.size

_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG_DATA: Final = 1
_INTEGER_KEYS: Final = 8
_NO_ROOT: Final = (1 << 64) - 1
_MOST_DEPTH: Final = 32


class DamagedPages(Exception):
    """What is wrong and where; `page` is the number of the page."""

    def __init__(self, what: str, page: int) -> None:
        super().__init__(what)
        self.page = page


@dataclass(frozen=True, slots=True)
class _Db:
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Meta:
    page_bytes: int
    free: _Db
    main: _Db
    last_page: int
    transaction: int


def check_pages(data: bytes) -> None:
    """Walk all pages of a whole LMDB file. Raises DamagedPages."""
    newest = _newest_meta(data)
    walk = _Walk(data, newest)
    walk.tree(newest.main)
    free = walk.tree(newest.free)
    for page in _free_pages(free, newest):
        walk.claim(page)
    # All that were claimed are different and among these. Counted, never listed: the number of the
    # last page is a number of the file as well, and a flipped bit makes it astronomic.
    lost = newest.last_page - 1 - len(walk.claimed)
    if lost:
        raise DamagedPages(f"{lost} pages are neither used nor free", newest.last_page)


def _newest_meta(data: bytes) -> _Meta:
    first = _read_meta(data, 0, 0)
    second = _read_meta(data, 1, first.page_bytes)
    if first.page_bytes != second.page_bytes:
        raise DamagedPages("the meta pages have different page sizes", 1)
    newest, other = (second, first) if second.transaction > first.transaction else (first, second)
    # Commits write the two in turn: even ones the first, odd ones the second.
    fresh = newest.transaction == other.transaction == 0
    at = 1 if newest is second else 0
    if not fresh and (newest.transaction != other.transaction + 1 or newest.transaction % 2 != at):
        raise DamagedPages(
            f"the meta pages are of transactions {first.transaction} and {second.transaction}, "
            "not of neighbours",
            at,
        )
    return newest


def _read_meta(data: bytes, number: int, page_bytes: int) -> _Meta:
    at = number * page_bytes
    need = _HEADER_BYTES + _META.size + 2 * _DB.size + _META_TAIL.size
    if len(data) < at + need:
        raise DamagedPages("it was cut short: a meta page is missing", number)
    page, _, flags, _, _ = _PAGE_HEADER.unpack_from(data, at)
    at += _HEADER_BYTES
    magic, version, address, _ = _META.unpack_from(data, at)
    if (page, flags, magic, version, address) != (number, _META_PAGE, _MAGIC, _VERSION, 0):
        raise DamagedPages("a meta page is not one", number)
    at += _META.size
    pad, *free = _DB.unpack_from(data, at)
    _, *main = _DB.unpack_from(data, at + _DB.size)
    last_page, transaction = _META_TAIL.unpack_from(data, at + 2 * _DB.size)
    if pad not in (4096, 8192, 16384, 32768, 65536):
        raise DamagedPages(f"a page size of {pad} bytes is none", number)
    return _Meta(pad, _Db(*free), _Db(*main), last_page, transaction)


def _free_pages(entries: list[tuple[bytes, bytes]], meta: _Meta) -> list[int]:
    """Numbers of pages that some earlier transaction gave up."""
    pages: list[int] = []
    for key, value in entries:
        if len(key) != 8 or len(value) < 8 or len(value) % 8:
            raise DamagedPages("an entry of the list of free pages is none", meta.free.root)
        count, *numbers = struct.unpack(f"<{len(value) // 8}Q", value)
        if int.from_bytes(key, "little") > meta.transaction or count > len(numbers):
            raise DamagedPages("an entry of the list of free pages is none", meta.free.root)
        pages += numbers[:count]
    return pages


class _Walk:
    """Visits pages from a root; every page at most once."""

    def __init__(self, data: bytes, meta: _Meta) -> None:
        self.claimed: set[int] = set()
        self._data = data
        self._meta = meta
        self._branches = self._leaves = self._overflow = 0
        self._order: Callable[[bytes], int | bytes] = bytes

    def tree(self, db: _Db) -> list[tuple[bytes, bytes]]:
        """All entries of one database, in order."""
        self._branches = self._leaves = self._overflow = 0
        entries: list[tuple[bytes, bytes]] = []
        is_free_list = db is self._meta.free
        self._order = _as_integer if is_free_list else bytes
        if db.flags != (_INTEGER_KEYS if is_free_list else 0):
            raise DamagedPages(f"a database has flags {db.flags:#x}", 0)
        if db.root != _NO_ROOT:
            if not 0 < db.depth <= _MOST_DEPTH:
                raise DamagedPages(f"a tree of depth {db.depth}", db.root)
            self._visit(db.root, db.depth, entries)
        keys: list[Any] = [self._order(key) for key, _ in entries]
        if any(a >= b for a, b in itertools.pairwise(keys)):
            raise DamagedPages("keys do not ascend", db.root)
        found = (self._branches, self._leaves, self._overflow, len(entries))
        if found != (db.branches, db.leaves, db.overflow, db.entries):
            raise DamagedPages(
                f"(branches, leaves, overflow, entries) are {found}, written were "
                f"{(db.branches, db.leaves, db.overflow, db.entries)}",
                db.root if db.root != _NO_ROOT else 0,
            )
        return entries

    def claim(self, page: int) -> None:
        if not 2 <= page <= self._meta.last_page:
            raise DamagedPages(f"page {page} is beyond the last one, {self._meta.last_page}", page)
        if page in self.claimed:
            raise DamagedPages("a page is used twice", page)
        self.claimed.add(page)

    def _claim_written(self, first: int, count: int) -> None:
        """Pages of a tree. Free ones may never have been written: the file can end before them."""
        if (first + count) * self._meta.page_bytes > len(self._data):
            raise DamagedPages("it was cut short, or a page number is wrong", first)
        for page in range(first, first + count):
            self.claim(page)

    def _visit(self, page: int, depth: int, entries: list[tuple[bytes, bytes]]) -> None:
        self._claim_written(page, 1)
        at = page * self._meta.page_bytes
        number, _, flags, lower, upper = _PAGE_HEADER.unpack_from(self._data, at)
        wanted = _LEAF if depth == 1 else _BRANCH
        size = self._meta.page_bytes
        if (number, flags) != (page, wanted) or not _HEADER_BYTES <= lower <= upper <= size:
            raise DamagedPages("a page's header is wrong", page)
        if (lower - _HEADER_BYTES) % 2:
            raise DamagedPages("a page's header is wrong", page)
        count = (lower - _HEADER_BYTES) // 2
        nodes = struct.unpack_from(f"<{count}H", self._data, at + _HEADER_BYTES)
        if depth == 1:
            self._leaves += 1
            entries += [self._entry(page, node, upper) for node in nodes]
        else:
            self._branches += 1
            self._branch(page, nodes, upper, depth, entries)

    def _branch(
        self,
        page: int,
        nodes: tuple[int, ...],
        upper: int,
        depth: int,
        entries: list[tuple[bytes, bytes]],
    ) -> None:
        if len(nodes) < 2:
            raise DamagedPages("a branch without branches", page)
        for index, node in enumerate(nodes):
            low, high, rest, key_bytes = self._node(page, node, upper)
            start = page * self._meta.page_bytes + node + _NODE_BYTES
            if node + _NODE_BYTES + key_bytes > self._meta.page_bytes:
                self._beyond(page)
            key = self._data[start : start + key_bytes]
            before = len(entries)
            self._visit(low | high << 16 | rest << 32, depth - 1, entries)
            if not index:
                continue  # it has no key
            # Keys ascend, which is looked at elsewhere: the last one before is the largest.
            around = [key for key, _ in entries[before - 1 : before + 1]]
            keys: list[Any] = [self._order(one) for one in (*around, key)]
            if len(keys) != 3 or not keys[0] < keys[2] <= keys[1]:
                raise DamagedPages("a branch leads to other keys than it says", page)

    def _entry(self, page: int, node: int, upper: int) -> tuple[bytes, bytes]:
        low, high, flags, key_bytes = self._node(page, node, upper)
        value_bytes = low | high << 16
        size, start = self._meta.page_bytes, page * self._meta.page_bytes
        in_page = 8 if flags == _BIG_DATA else value_bytes
        if flags not in (0, _BIG_DATA) or not key_bytes:
            raise DamagedPages(f"an entry has flags {flags:#x} and {key_bytes} bytes of key", page)
        at = node + _NODE_BYTES
        if at + key_bytes + in_page > size:
            self._beyond(page)
        key = self._data[start + at : start + at + key_bytes]
        value = self._data[start + at + key_bytes : start + at + key_bytes + in_page]
        if flags == _BIG_DATA:
            value = self._big(int.from_bytes(value, "little"), value_bytes)
        return key, value

    def _big(self, page: int, nbytes: int) -> bytes:
        """A value in pages of its own."""
        size = self._meta.page_bytes
        self._claim_written(page, 1)
        found, _, flags, low, high = _PAGE_HEADER.unpack_from(self._data, page * size)
        # More than the value needs if a longer one was there before.
        pages = low | high << 16
        needed = -(-(_HEADER_BYTES + nbytes) // size)
        if (found, flags) != (page, _OVERFLOW) or pages < needed:
            raise DamagedPages("a page's header is wrong", page)
        self._claim_written(page + 1, pages - 1)
        self._overflow += pages
        at = page * size + _HEADER_BYTES
        return self._data[at : at + nbytes]

    def _node(self, page: int, node: int, upper: int) -> tuple[int, int, int, int]:
        if not upper <= node <= self._meta.page_bytes - _NODE_BYTES:
            self._beyond(page)
        return _NODE.unpack_from(self._data, page * self._meta.page_bytes + node)

    def _beyond(self, page: int) -> NoReturn:
        raise DamagedPages("an entry reaches beyond its page", page)


def _as_integer(key: bytes) -> int:
    return int.from_bytes(key, "little")
