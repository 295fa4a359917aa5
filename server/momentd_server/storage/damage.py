"""What a check of the store reports: damages, and what was looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Final

# (bytes read so far, bytes that will be read)
Progress = Callable[[int, int], None]
# Rows of one damage that are named; more are only counted.
MOST_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was written."""

    what: str  # what is wrong and what to do
    path: str
    offset: int | None = None  # bytes from the start of the file
    tables: tuple[int, ...] = ()  # ids of the tables that need it
    rows: tuple[int, ...] = ()  # whose records it is: the first MOST_ROWS
    row_count: int = 0  # how many in all; 0 where they cannot be told
    snapshots: tuple[str, ...] = ()  # names of those that need it


@dataclass(slots=True)
class Counts:
    """What was looked at."""

    tables: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0  # older versions included
    locations: int = 0  # rows whose location was compared with what lies there
    bytes: int = 0
    snapshots: int = 0

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Report:
    damages: list[Damage] = field(default_factory=list[Damage])
    counts: Counts = field(default_factory=Counts)
    # Files that no table needs: the next start deletes them.
    unlisted: list[str] = field(default_factory=list[str])
