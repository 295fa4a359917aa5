"""One OpenMP thread for torch's CPU kernels while a step copies and adds rows.

These operations are bound by memory, and some (`index_add_`) meet their helper threads at a barrier
for every few rows. Beside a busy daemon or data loader that costs a hundred times what a second
thread could gain: 10,000 rows of 128 were added in 2 ms with one thread, in 20 to 180 ms with two.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType

import torch


class _Saved(threading.local):
    threads: int | None = None


_saved = _Saved()


def _find_setter() -> Callable[[int], None] | None:
    """OpenMP's own setter: unlike `torch.set_num_threads` it concerns the calling thread only."""
    try:
        setter = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return None
    before = torch.get_num_threads()
    setter(1)
    ours = torch.get_num_threads() == 1
    setter(before)
    # Another library's OpenMP, or a torch built without: nothing to be had.
    return setter if ours else None


_set_threads = _find_setter()


class SingleThreaded:
    """Runs its block with one OpenMP thread; other threads of the process keep theirs.

    Left by an exception between two instructions of its own, it is undone by the next one.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        if _set_threads is None:
            return
        if _saved.threads is None:
            _saved.threads = torch.get_num_threads()
        _set_threads(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _set_threads is None or _saved.threads is None:
            return
        _set_threads(_saved.threads)
        _saved.threads = None
