"""Open files of segments: as many as the limit allows, least recently used closed first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np

from momentd_server.storage.files import raise_descriptor_limit

_MOST: Final = 8192


@dataclass(slots=True, eq=False)
class _File:
    fd: int
    pins: int = 0
    forgotten: bool = False  # closed with its last pin


class Pins:
    """Descriptors that stay open until `close`; a context manager."""

    def __init__(
        self, fds: np.ndarray, files: Sequence[_File], unpin: Callable[[Sequence[_File]], None]
    ) -> None:
        self.fds = fds  # int64[n], aligned with the segment ids asked for
        self._files = files
        self._unpin = unpin

    def close(self) -> None:
        """Let them go. Repeated calls do nothing."""
        files, self._files = self._files, ()
        self._unpin(files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Descriptors:
    """An LRU of descriptors by segment id. Pinned ones are never closed."""

    def __init__(self, open_file: Callable[[int], int], most: int | None = None) -> None:
        self._open_file = open_file
        # Half of the limit: sockets, arenas and clients need theirs.
        self._most = min(raise_descriptor_limit() // 2, _MOST) if most is None else most
        self._lock = threading.Lock()  # guards all below
        self._files: OrderedDict[int, _File] = OrderedDict()

    def add(self, segment_id: int, fd: int) -> None:
        """Take over an open descriptor."""
        with self._lock:
            self._files[segment_id] = _File(fd)
            self._close_surplus_locked()

    def pin(self, segment_ids: np.ndarray | Sequence[int]) -> Pins:
        """Open what is not open yet. Raises what `open_file` raises, with nothing pinned."""
        unique, inverse = np.unique(np.asarray(segment_ids, np.int64), return_inverse=True)
        with self._lock:
            # All at once, so that a failed open leaves no pin behind.
            files = [self._get_locked(int(segment_id)) for segment_id in unique]
            for file in files:
                file.pins += 1
            self._close_surplus_locked()
        fds = np.array([file.fd for file in files], np.int64)
        return Pins(fds[inverse], files, self._unpin)

    def forget(self, segment_id: int) -> None:
        """Close now, or with the last pin."""
        with self._lock:
            file = self._files.pop(segment_id, None)
            if file is None:
                return
            file.forgotten = True
            if file.pins == 0:
                os.close(file.fd)

    def close(self) -> None:
        """Close all that is not pinned."""
        with self._lock:
            segment_ids = list(self._files)
        for segment_id in segment_ids:
            self.forget(segment_id)

    def __len__(self) -> int:
        with self._lock:
            return len(self._files)

    def _get_locked(self, segment_id: int) -> _File:
        file = self._files.get(segment_id)
        if file is None:
            file = self._files[segment_id] = _File(self._open_file(segment_id))
        self._files.move_to_end(segment_id)
        return file

    def _unpin(self, files: Sequence[_File]) -> None:
        with self._lock:
            for file in files:
                file.pins -= 1
                if file.forgotten and file.pins == 0:
                    os.close(file.fd)
            self._close_surplus_locked()

    def _close_surplus_locked(self) -> None:
        surplus = len(self._files) - self._most
        if surplus <= 0:
            return
        idle = [segment_id for segment_id, file in self._files.items() if file.pins == 0]
        for segment_id in idle[:surplus]:
            os.close(self._files.pop(segment_id).fd)
