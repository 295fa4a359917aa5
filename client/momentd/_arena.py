"""Memory shared with the daemon: arenas (memfds that the daemon made) and blocks within them.

There is no free list: free is what no living `ArenaBlock` covers. So a block that is dropped by an
exception anywhere is free again, and one that is referenced (by a call without a reply, say) is
never given out twice.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Final

import numpy as np

from momentd._transport import Hook, Regions
from momentd_wire.limits import ARENA_ALIGN, ARENA_GRANULE
from momentd_wire.v1 import momentd_pb2 as pb

# The first arena; later ones double.
FIRST_ARENA_BYTES: Final = 2 * ARENA_GRANULE


def round_up(nbytes: int, to: int = ARENA_ALIGN) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


class Arena:
    """One mapped memfd. The mapping goes when the last block and the last view are gone."""

    def __init__(self, number: int, nbytes: int, descriptor: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self.announced = False
        self._retired = False
        self._blocks: dict[int, weakref.ref[ArenaBlock]] = {}
        # Guards _blocks and _retired. Re-entrant: an exception that a debugger or a test injects on
        # leaving the `with` block must not lock the thread out of its own arena.
        self._lock = threading.RLock()

    @property
    def address(self) -> int:
        """Where the mapping begins in this process."""
        return int(np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0])

    def announce(self, mapped: Hook, unmapped: Hook | None) -> None:
        """Tell a hook of this mapping now, and another one before it goes."""
        address = self.address
        if unmapped is not None:
            weakref.finalize(self, unmapped, address, self.nbytes).atexit = False
        mapped(address, self.nbytes)

    def place(self, nbytes: int) -> ArenaBlock | None:
        """The lowest free range of `nbytes`, or None."""
        wanted = max(ARENA_ALIGN, round_up(nbytes))
        with self._lock:
            if self._retired:
                return None
            offset = 0
            for start, end in self._used_locked():
                if start - offset >= wanted:
                    break
                offset = max(offset, end)
            if self.nbytes - offset < wanted:
                return None
            block = ArenaBlock(self, offset, wanted)
            self._blocks[offset] = weakref.ref(block)
            return block

    def retire(self) -> bool:
        """True if no block lives in it: none ever will, and the caller gives it back.

        False for everybody else, so that it is given back once.
        """
        with self._lock:
            if self._retired or self._used_locked():
                return False
            self._retired = True
            return True

    def _used_locked(self) -> list[tuple[int, int]]:
        blocks = {at: ref for at, ref in self._blocks.items() if ref() is not None}
        self._blocks = blocks
        living = [block for ref in blocks.values() if (block := ref()) is not None]
        return sorted((block.offset, block.offset + block.nbytes) for block in living)


class ArenaBlock:
    """A range of an arena; free again when nobody refers to the block. See `Block`."""

    __slots__ = ("__weakref__", "arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """See `Block.array`."""
        return np.ndarray(shape, dtype, self.arena.memory, self.offset + offset)

    def refer(self, bulk: pb.Bulk, offset: int, nbytes: int) -> None:
        """See `Block.refer`."""
        self.target(bulk.arena, offset, nbytes)

    def target(self, region: pb.Region, offset: int, nbytes: int) -> None:
        """See `Block.target`."""
        region.arena = self.arena.number
        region.offset = self.offset + offset
        region.length = nbytes

    def target_in(self, regions: Regions, offset: int, nbytes: int) -> None:
        """See `Block.target_in`."""
        self.target(regions.add(), offset, nbytes)


class HeapBlock:
    """Ordinary memory, for the gRPC plane. See `Block`."""

    __slots__ = ("_memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = np.empty(max(1, nbytes), np.uint8)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """See `Block.array`."""
        return np.ndarray(shape, dtype, self._memory.data, offset)

    def refer(self, bulk: pb.Bulk, offset: int, nbytes: int) -> None:
        """See `Block.refer`."""
        del offset
        bulk.streamed = nbytes

    def target(self, region: pb.Region, offset: int, nbytes: int) -> None:
        """See `Block.target`."""

    def target_in(self, regions: Regions, offset: int, nbytes: int) -> None:
        """See `Block.target_in`."""
