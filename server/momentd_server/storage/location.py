"""Location words: where a row's record is now. One aligned 8-byte word a row.

    bits 63..62   tag: 0 nowhere (never touched), 1 slot on disk, 2 frame in RAM
    slot          bits 61..28 segment id, bits 27..0 byte offset in the segment's file
    frame         bits 47..16 slab, bits 15..0 index within the slab

Versions are words too: generation << 44 | update number.
"""

from typing import Final

import numpy as np

NOWHERE: Final = np.uint64(0)
TAG_SHIFT: Final = np.uint64(62)
SLOT_TAG: Final = np.uint64(1 << 62)
FRAME_TAG: Final = np.uint64(2 << 62)
SEGMENT_SHIFT: Final = np.uint64(28)
SEGMENT_MASK: Final = np.uint64((1 << 34) - 1)
OFFSET_MASK: Final = np.uint64((1 << 28) - 1)

GENERATION_SHIFT: Final = np.uint64(44)
UPDATE_MASK: Final = np.uint64((1 << 44) - 1)


def slot(segment: int, offset: int) -> int:
    """The location word of a slot."""
    return int(SLOT_TAG) | segment << 28 | offset


def version(generation: int, update_number: int) -> int:
    """The version word of a record changed by an update of a generation."""
    return generation << 44 | update_number
