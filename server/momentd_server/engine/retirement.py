"""When a file may go: after the last read that may use it, however many newer ones overlap."""

from __future__ import annotations


class Retirement:
    """Reads in flight of one table, and its segments that wait for them. All in the lane.

    A read gets its slots in the lane and opens their files later; in between only its number here
    keeps them. Reads that begin after a segment was retired cannot have its slots.
    """

    def __init__(self) -> None:
        self.reads: set[int] = set()  # in flight, by number
        self._next = 0
        # Segments, each with the number of the first read that cannot use it.
        self._waiting: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin_read(self) -> int:
        """From here to `end_read` of this number all slots can be read that are in use now."""
        number = self._next
        self._next += 1
        self.reads.add(number)
        return number

    def end_read(self, number: int) -> None:
        self.reads.remove(number)

    def add(self, segment: int) -> None:
        """Nothing of the table refers to this segment any more."""
        self._waiting.append((self._next, segment))

    def take(self) -> list[int]:
        """The segments that no read in flight may use."""
        oldest = min(self.reads, default=self._next)
        ended = [segment for first, segment in self._waiting if first <= oldest]
        self._waiting = [entry for entry in self._waiting if entry[0] > oldest]
        return ended

    def take_all(self) -> list[int]:
        """All of them, of a table that nobody reads any more."""
        segments = [segment for _, segment in self._waiting]
        self._waiting = []
        return segments
