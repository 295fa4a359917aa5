"""How torch's CPU threads and the daemon's share the cores during a step.

Adding rows is bound by memory, and `index_add_` meets its helper threads at a barrier for every few
rows. While the daemon's threads hold cores that costs a hundred times what a second thread could
gain: 10,000 rows of 128 were added in 2 ms with one thread, in 20 to 180 ms with two.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from types import TracebackType

import torch


def cores_to_spare() -> bool:
    """Whether adding rows while the daemon still computes the next ones is a gain.

    On two cores it is none: kernel and additions then share what either could have alone (10,000
    rows of 128: 6.4 ms one after the other, 7.7 ms at the same time).
    """
    return len(os.sched_getaffinity(0)) > 2


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


def throttle_idle_threads() -> None:
    """Make OpenMP's idle threads sleep at once instead of spinning; once for a process.

    After each parallel operation libgomp's helper threads spin for milliseconds, in case another
    comes. In a `step()` that follows a backward pass they hold the cores that the daemon needs:
    10,000 rows of 128 took 16 ms instead of 7 on two cores. libgomp spins briefly when it manages
    more threads than there are cores, which is what training beside a daemon amounts to. So it is
    given a few threads too many, by a thread that runs one parallel operation and then sleeps.

    `OMP_WAIT_POLICY=passive` has the same effect, but only before torch is imported. Other OpenMP
    libraries are told by their own call.
    """
    if _set_threads is None or _Throttle.started:
        return
    _Throttle.started = True
    threading.Thread(target=_oversubscribe, name="momentd-openmp", daemon=True).start()
    _Throttle.ready.wait(_START_S)


class _Throttle:
    started = False
    ready = threading.Event()


_START_S = 1.0
# torch shares an operation out from twice this many elements on.
_GRAIN = 32768


def _oversubscribe() -> None:
    assert _set_threads is not None
    try:
        set_blocktime = getattr(ctypes.CDLL(None), "kmp_set_blocktime", None)
        if set_blocktime is not None:
            set_blocktime(0)
        cores = len(os.sched_getaffinity(0))
        team = max(2, cores - torch.get_num_threads() + 2)
        _set_threads(team)
        torch.zeros(team * _GRAIN).add_(1)
    finally:
        _Throttle.ready.set()
    # The threads count for as long as their team's first thread lives.
    threading.Event().wait()
