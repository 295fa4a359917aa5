"""Threads that share one kernel call. No queue: a lock per thread to start, one to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Part = Callable[..., object]


class Pool:
    """`threads` workers, the caller's thread being worker 0.

    `run` may be called from any thread, one call at a time runs; it must not be called from
    within a part. Close it to end the threads.
    """

    def __init__(self, threads: int, *, name: str = "momentd-kernel") -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least 1 thread, not {threads}")
        self.threads = threads
        self._running = threading.Lock()  # held by the caller of run(); guards the helpers
        self._helpers = [_Helper(worker, f"{name}-{worker}") for worker in range(1, threads)]

    def run(self, function: Part, count: int, *args: Any, least: int = 1) -> None:
        """Call `function(worker, start, stop, *args)` for contiguous parts of range(count).

        There are as many parts as threads, fewer if a part would have less than `least` items;
        one part costs no hand-off. Returns when all parts have ended; the exception of the
        lowest worker that failed is raised then. Part k is always given to worker k.
        """
        parts = max(1, min(self.threads, count // max(least, 1)))
        if parts == 1:
            function(0, 0, count, *args)
            return
        with self._running:
            helpers = self._helpers[: parts - 1]
            for helper in helpers:
                start, stop = bounds(helper.worker, parts, count)
                helper.begin(function, (helper.worker, start, stop, *args))
            failures: list[BaseException | None] = []
            try:
                function(0, *bounds(0, parts, count), *args)
            except BaseException as error:  # noqa: BLE001  the helpers still use the arrays
                failures.append(error)
            failures.extend(helper.wait() for helper in helpers)
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the threads and join them. Calling it again does nothing."""
        with self._running:
            helpers, self._helpers, self.threads = self._helpers, [], 1
        for helper in helpers:
            helper.close()

    def __repr__(self) -> str:
        return f"Pool(threads={self.threads})"


def bounds(worker: int, parts: int, count: int) -> tuple[int, int]:
    """Part `worker` of range(count) cut into `parts` pieces whose sizes differ by at most 1."""
    return worker * count // parts, (worker + 1) * count // parts


class _Helper:
    """One thread and the part that it is given. A job of None ends it."""

    def __init__(self, worker: int, name: str) -> None:
        self.worker = worker
        self._job: tuple[Part, tuple[Any, ...]] | None = None
        self._failure: BaseException | None = None
        self._go = threading.Lock()
        self._done = threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def begin(self, function: Part, args: tuple[Any, ...]) -> None:
        self._job = (function, args)
        self._go.release()

    def wait(self) -> BaseException | None:
        """Wait for the part; returns its exception. An interrupt is delivered after the wait."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._done.acquire()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        failure, self._failure = self._failure, None
        return failure or interrupt

    def close(self) -> None:
        self._job = None
        self._go.release()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._job is None:
                return
            function, args = self._job
            try:
                function(*args)
            except BaseException as error:  # noqa: BLE001  raised by run()
                self._failure = error
            # Not kept between calls: they would hold the arrays of the last batch.
            self._job = None
            del function, args
            self._done.release()
