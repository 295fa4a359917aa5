"""A model of the order of stores in memory that outlives the engine; kills between any two.

Two rows, two frames, two requests, a spill, an eviction, a fetch, a compaction, each as a sequence
of single stores. Every run is killed at every store, and again at every store of the take-over, and
then goes on. A record is two halves, so that it can be torn; its value is the list of the requests
that changed it, so that one lost or done twice shows. Each seeded fault of the order must be found.

What the model says in one line each is in engine/journal.py, storage/frames.py,
storage/victim_kernels.py and storage/compaction_kernels.py as real stores.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import pytest

FREE, CLEAN, DIRTY, COPIED = "free", "clean", "dirty", "copied"
ROWS = (0, 1)
REQUESTS = {1: (0, 1), 2: (1,)}
Value = tuple[int, ...]
Steps = Generator[None]


@dataclass
class Frame:
    row: int = -1
    state: str = FREE
    version: int = 0
    halves: list[Value] = field(default_factory=lambda: [(), ()])
    backing: int | None = None


@dataclass
class Memory:
    """Outlives the engine: the space, and the disk."""

    frames: list[Frame] = field(default_factory=lambda: [Frame(), Frame()])
    location: list[tuple[str, int] | None] = field(default_factory=lambda: [None, None])
    slots: dict[int, tuple[int, int, Value]] = field(default_factory=dict)  # row, version, value
    fill: int = 0  # slots below it count
    files: set[int] = field(default_factory=set)  # slots that were not unlinked
    update_number: int = 0
    outcome: int = 0  # number of the last request whose outcome is stored
    journal: int = 0  # request that is being applied; 0: idle
    in_work: int = -1
    undo: list[Value] = field(default_factory=lambda: [(), ()])
    done: set[int] = field(default_factory=set)  # rows of the request in the journal


class Engine:
    """One process. `bugs`: faults of the order, by name."""

    def __init__(self, memory: Memory, bugs: frozenset[str]) -> None:
        self.m, self.bugs = memory, bugs
        self.free = [k for k, f in enumerate(memory.frames) if f.state == FREE]

    def has(self, bug: str) -> bool:
        return bug in self.bugs

    def frame_of(self, row: int) -> Frame | None:
        place = self.m.location[row]
        return self.m.frames[place[1]] if place is not None and place[0] == "frame" else None

    # -- what a request does ---------------------------------------------------------------

    def touch(self, row: int) -> Steps:
        """First touch, or a fetch from disk: bytes and metadata before the location."""
        place = self.m.location[row]
        if place is not None and place[0] == "frame":
            return
        number = self.free.pop()
        frame = self.m.frames[number]
        if self.has("location first"):
            self.m.location[row] = ("frame", number)
            yield
        value = () if place is None else self.m.slots[place[1]][2]
        for half in (0, 1):
            frame.halves[half] = value
            yield
        frame.row = row
        frame.backing = None if place is None else place[1]
        frame.version = 0 if place is None else self.m.slots[place[1]][1]
        yield
        frame.state = DIRTY if place is None else CLEAN
        yield
        self.m.location[row] = ("frame", number)
        yield

    def update(self, number: int) -> Steps:
        for row in REQUESTS[number]:
            yield from self.touch(row)
        if self.has("outcome first"):
            self.m.outcome = number
            yield
        self.m.done, self.m.in_work = set(), -1
        yield
        if not self.has("no journal"):
            self.m.journal = number
            yield
        yield from self.apply(number)
        yield from self.finish(number)

    def apply(self, number: int) -> Steps:
        for row in REQUESTS[number]:
            if row in self.m.done:
                continue
            frame = self.frame_of(row)
            assert frame is not None, "a row of a request in work is not in memory"
            frame.state, frame.version = DIRTY, self.m.update_number + 1
            yield
            if not self.has("no undo"):
                self.m.undo = list(frame.halves)
                yield
                self.m.in_work = row
                yield
            if self.has("done first"):
                self.m.done = self.m.done | {row}
                yield
            for half in (0, 1):
                frame.halves[half] = (*frame.halves[half], number)
                yield
            self.m.done = self.m.done | {row}
            yield

    def finish(self, number: int) -> Steps:
        self.m.update_number = number
        yield
        if self.has("idle before outcome"):
            self.m.journal = 0
            yield
        self.m.outcome = number
        yield
        self.m.journal = 0
        yield

    # -- what happens beside ---------------------------------------------------------------

    def spill(self) -> Steps:
        """Copies and writes what is dirty; frames become clean if nobody has changed them since."""
        for frame in self.m.frames:
            if frame.state != DIRTY or self.frame_of(frame.row) is not frame:
                continue
            version, value = frame.version, frame.halves[0]
            frame.state = COPIED
            yield
            slot = max(self.m.slots, default=-1) + 1
            if self.has("fill first"):
                self.m.fill = slot + 1
                yield
                frame.backing, frame.state = slot, CLEAN
                yield
            self.m.slots[slot] = (frame.row, version, value)
            self.m.files.add(slot)
            yield
            self.m.fill = slot + 1
            yield
            changed = frame.state != COPIED or frame.version != version
            if changed and not self.has("clean although changed"):
                continue
            if self.has("clean before backed"):
                frame.state = CLEAN
                yield
            frame.backing = slot
            yield
            frame.state = CLEAN
            yield

    def evict(self, row: int) -> Steps:
        place, frame = self.m.location[row], self.frame_of(row)
        if place is None or frame is None or frame.state != CLEAN or frame.backing is None:
            return
        if self.has("free before evicted"):
            frame.state = FREE
            yield
            frame.row, frame.halves = -1, [(), ()]
            yield
        self.m.location[row] = ("slot", frame.backing)
        yield
        frame.state = FREE
        yield
        self.free.append(place[1])

    def compact(self) -> Steps:
        """Copies what is needed of slot 0, points there whoever points here, lets the file go."""
        if 0 not in self.m.files or 0 not in self.m.slots or self.m.fill == 0:
            return
        row, version, value = self.m.slots[0]
        if self.has("unlink first"):
            self.m.files.discard(0)
            yield
        new = max(self.m.slots) + 1
        self.m.slots[new] = (row, version, value)
        self.m.files.add(new)
        yield
        self.m.fill = new + 1
        yield
        place, frame = self.m.location[row], self.frame_of(row)
        if place == ("slot", 0) or (self.has("publish without compare") and frame is None):
            self.m.location[row] = ("slot", new)
            yield
        elif frame is not None and frame.backing == 0 and not self.has("forget backings"):
            frame.backing = new
            yield
        self.m.files.discard(0)
        yield

    # -- after a kill ----------------------------------------------------------------------

    def take_over(self) -> Steps:
        for number, frame in enumerate(self.m.frames):
            if frame.state == FREE or self.m.location[frame.row] != ("frame", number):
                frame.state = FREE
            elif frame.state == COPIED:
                frame.state = DIRTY
            yield
        self.free = [k for k, f in enumerate(self.m.frames) if f.state == FREE]
        number = self.m.journal
        if not number:
            return
        row = self.m.in_work
        if row >= 0 and row not in self.m.done and not self.has("no undo"):
            frame = self.frame_of(row)
            assert frame is not None
            for half in (0, 1):
                frame.halves[half] = self.m.undo[half]
                yield
            self.m.in_work = -1
            yield
        if self.m.update_number < number:
            yield from self.apply(number)
        yield from self.finish(number)


def value_of(memory: Memory, row: int) -> Value:
    """What a reader gets. Whatever it needs must be there, whole."""
    place = memory.location[row]
    if place is None:
        return ()
    if place[0] == "slot":
        assert place[1] in memory.files, f"row {row} is in a file that is gone"
        assert place[1] < memory.fill, f"row {row} is in a slot that does not count"
        stored, _, value = memory.slots[place[1]]
        assert stored == row, f"row {row} points to a record of row {stored}"
        return value
    frame = memory.frames[place[1]]
    assert frame.state != FREE, f"row {row} points to a free frame"
    assert frame.row == row, f"row {row} points to a frame of row {frame.row}"
    assert frame.halves[0] == frame.halves[1], f"row {row} is torn"
    if frame.state == CLEAN:
        assert frame.backing in memory.files, f"row {row} is backed by a file that is gone"
        assert frame.backing is not None
        assert frame.backing < memory.fill, f"row {row} is backed by what does not count"
        assert memory.slots[frame.backing][2] == frame.halves[0], f"row {row} is clean, not written"
    return frame.halves[0]


def expected(row: int, done: int) -> Value:
    return tuple(n for n, rows in REQUESTS.items() if n <= done and row in rows)


def check(memory: Memory, acknowledged: int) -> None:
    assert memory.outcome >= acknowledged, "an acknowledged request is lost"
    for row in ROWS:
        found, wanted = value_of(memory, row), expected(row, memory.outcome)
        assert found == wanted, f"row {row} has had {found}, not {wanted}"


Work = Callable[[Engine], Steps]


def script(order: tuple[str, ...]) -> list[Work]:
    """Two requests, and the others before, between and behind them; a spill overlaps the second."""
    works: dict[str, Work] = {
        "1": lambda e: e.update(1),
        "2": lambda e: e.update(2),
        "spill": lambda e: e.spill(),
        "spill|2": lambda e: overlap(e.spill(), e.update(2)),
        "evict": lambda e: itertools.chain(e.evict(0), e.evict(1)),  # type: ignore[arg-type, return-value]
        "compact": lambda e: e.compact(),
    }
    return [works[name] for name in order]


def overlap(background: Steps, request: Steps) -> Steps:
    """A request comes while a batch is on its way to the disk."""
    for _ in range(2):
        next(background, None)
        yield
    for _ in request:
        yield
    yield from background


ORDERS = (
    ("1", "spill", "evict", "2", "spill", "compact", "evict"),
    ("1", "spill|2", "compact", "spill", "evict", "compact"),
    ("1", "spill", "2", "evict", "compact", "spill", "evict"),
    ("1", "2", "spill", "compact", "evict"),
)


def go_on(memory: Memory, bugs: frozenset[str]) -> None:
    """The client repeats what has no outcome; then everything else happens once more."""
    engine = Engine(memory, bugs)
    for _ in engine.take_over():
        pass
    for number in REQUESTS:
        if number > memory.outcome:
            for _ in engine.update(number):
                pass
            check(memory, number)
    for work in (engine.spill(), engine.compact(), engine.evict(0), engine.evict(1)):
        for _ in work:
            for row in ROWS:
                value_of(memory, row)  # readers
    check(memory, 2)


def states(works: list[Work], bugs: frozenset[str]) -> Iterator[tuple[Memory, int]]:
    """(memory after a kill, requests acknowledged) for every store."""
    memory = Memory()
    engine = Engine(memory, bugs)
    acknowledged = 0
    for work in works:
        for _ in work(engine):
            yield copy.deepcopy(memory), acknowledged
        acknowledged = memory.outcome
        check(memory, acknowledged)
    yield copy.deepcopy(memory), acknowledged


def explore(bugs: frozenset[str] = frozenset()) -> int:
    """Every kill, and every second kill in the take-over; returns how many there were."""
    kills = 0
    for order in ORDERS:
        works = script(order)
        for killed, acknowledged in states(works, bugs):
            for again in itertools.count():
                memory = copy.deepcopy(killed)
                steps = Engine(memory, bugs).take_over()
                ended = sum(1 for _ in itertools.islice(steps, again)) < again
                kills += 1
                second = copy.deepcopy(memory)
                if ended:
                    check(memory, acknowledged)
                    break
                for _ in Engine(second, bugs).take_over():
                    pass
                check(second, acknowledged)
                go_on(second, bugs)
    return kills


def test_no_kill_loses_doubles_or_tears_anything():
    assert explore() > 1000


@pytest.mark.parametrize(
    "bug",
    [
        "location first", "outcome first", "no journal", "no undo", "done first",
        "idle before outcome", "fill first", "clean although changed", "clean before backed",
        "free before evicted", "unlink first", "forget backings",
    ],
)  # fmt: skip
def test_a_wrong_order_is_found(bug):
    with pytest.raises((AssertionError, KeyError, IndexError)):
        explore(frozenset({bug}))
