"""The structs that lie in the space: what outlives the process that wrote them, besides frames.

Each becomes valid, or invalid, by one aligned 8-byte store that comes after all others: a table, a
segment and a session by their `id` or `state`, an outcome by `number`, a request by `state`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAGIC: Final = 0x3130_5350_444D_4F4D  # "MOMDPS01"
LAYOUT_VERSION: Final = 2
MAX_TABLES: Final = 4096
MAX_SEGMENTS: Final = 1 << 16
MAX_SESSIONS: Final = 1024
MAX_STREAMS: Final = 8192
MAX_WORKERS: Final = 64
PROGRESS_WORDS: Final = 8

HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("layout_version", "<u8"),
        ("code_version", "<u8"),
        ("engine_epoch", "<u8"),
        ("fsync_failed", "<u8"),
        ("slabs", "<u8"),
        ("slabs_at", "<u8"),
        ("rows_at", "<u8"),
        ("size", "<u8"),
    ]
)

# States of a table's block.
TABLE_WHOLE: Final = 0
TABLE_BROKEN: Final = 1  # its records are not served; the catalog's state of it still exists
TABLE_DTYPE: Final = np.dtype(
    [
        ("id", "<u8"),  # 0: free
        ("generation", "<u8"),
        ("update_number", "<u8"),
        ("step", "<u8"),
        ("location_at", "<u8"),
        ("check_at", "<u8"),
        ("rows", "<u8"),
        ("record_bytes", "<u8"),
        ("state", "<u8"),
        # Sum of the hashes of all records as written last, modulo 2**64.
        ("digest", "<u8"),
        ("digest_torn", "<u8"),  # 1: a batch is being published, the sum is ahead of its frames
    ]
)

# States of a segment's block.
SEGMENT_FREE: Final = 0
SEGMENT_OPEN: Final = 1
SEGMENT_SEALED: Final = 2
SEGMENT_DTYPE: Final = np.dtype(
    [
        ("state", "<u8"),
        ("id", "<u8"),
        ("family", "<u8"),
        ("layout", "<u8"),
        ("record_bytes", "<u8"),
        ("fill", "<u8"),  # bytes that count
        ("durable", "<u8"),  # of them synced
        ("spare", "<u8"),
    ]
)

# What is looked through lies close together: looking at a page is enough to allocate it.
# Two texts: the one that `state` names (1 or 2) counts, the other one is written next.
SESSION_TEXT_BYTES: Final = 4096
SESSION_DTYPE: Final = np.dtype(
    [
        ("state", "<u8"),  # 0: free
        ("bytes", "<u8", 2),
        ("spare", "<u8"),
    ]
)

STREAM_BODY_BYTES: Final = 16 * 1024
STREAM_DTYPE: Final = np.dtype(
    [
        ("owner", "<u8"),  # index of its session's block + 1; 0: free
        ("stream", "<u8"),
        ("number", "<u8"),  # of the last finished request
        ("outcome", "<u8"),  # 1: the fields below are the outcome of `number`
        ("fingerprint", "u1", 16),
        ("body_bytes", "<u8"),
        # The body if it is longer than STREAM_BODY_BYTES; behind it the outcome's arrays.
        ("extent_at", "<u8"),
        ("extent_bytes", "<u8"),
        ("bulk", "<u8"),  # bytes of the arrays in the extent; 0: there are none
        ("spare", "<u8", 2),
    ]
)

JOURNAL_IDLE: Final = 0
JOURNAL_APPLYING: Final = 1
JOURNAL_TEXT_BYTES: Final = 4 << 20
JOURNAL_ROWS: Final = 32 << 20  # row ids of one request, all its tables together
MOST_RANGES: Final = MAX_WORKERS + 1
JOURNAL_DTYPE: Final = np.dtype(
    [
        ("state", "<u8"),
        ("attempts", "<u8"),  # engines that have tried to finish it
        ("stream", "<u8"),  # index of its stream's block + 1; 0: nobody waits for an outcome
        ("number", "<u8"),
        ("fingerprint", "u1", 16),
        ("current", "<u8"),  # the table in work
        # Its rows that were to be done when its progress was cleared: `todo[which]` has so many
        # ranges (start, stop).
        ("which", "<u8"),
        ("ranges", "<u8", 2),
        ("todo", "<i8", (2, MOST_RANGES, 2)),
        ("tables", "<u8"),
        # What is to be done; behind it 16 bytes of counters for each table, then the answer.
        ("text_bytes", "<u8"),
        ("body_bytes", "<u8"),
        ("extent_at", "<u8"),  # what of its input is not in an arena
        ("extent_bytes", "<u8"),
        ("spare", "<u8", 2),
    ]
)
