"""Would it pay if the kernel added to the weights itself, in memory shared with the trainer?

Measures the two parts of a hot step that would become one: the kernel that writes deltas and
torch's `index_add_` that adds them, against a kernel that updates moments and weights in one pass.
Both with all cores and with the stores that protect an update from a kill. No daemon takes part.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from momentd._apply import add_rows
from momentd._threads import throttle_idle_threads
from momentd_server import rules
from momentd_server.jit import Pool
from momentd_server.jit.row_protocol import PROGRESS_WORDS
from momentd_server.rules import sparse_adam
from momentd_server.schema import Schema
from momentd_server.storage import space

from .baselines.in_place import apply_in_place
from .harness import Result, Row, Settings

DIM = 128
BATCHES = 12
BLOCK = 10
HYPER = rules.SparseAdamHyper(lr=1e-3)
WORD = 1 << 8 | 2
LEAST_ROWS = 128
HUGE = space.SLAB_BYTES


def run(settings: Settings) -> Result:
    result = Result("inplace")
    cores = len(os.sched_getaffinity(0))
    pool = Pool(cores)
    # As the client does: torch's threads would spin on the cores that the kernel's threads need.
    throttle_idle_threads()
    try:
        for name, rows, batches in (
            ("1 M x 128", settings.rows(1_000_000), (2_048, 10_000, 100_000)),
            ("4 M x 128", settings.rows(4_000_000), (10_000,)),
        ):
            world = World(rows, DIM, pool)
            for batch in batches:
                settings.console.print(f"{name}, {batch:,} rows ...")
                times = _measure(world, min(batch, rows // 8), settings.repeats)
                result.rows.append(_row(f"{name}, {batch:,} rows", times))
    finally:
        pool.close()
    result.notes += [
        f"Medians; blocks of {BLOCK} calls in turns, {BATCHES} batches of random rows that each "
        f"side takes in another order. Records are in huge pages, as the daemon's are; {cores} "
        "threads.",
        "deltas: kernel, then index_add_ into weights as torch allocates them. deltas_huge: the "
        "same with the weights in huge pages. in_place, in_place_huge: one pass, weights in a "
        "shared mapping of 4 KiB or huge pages. saved_ms: deltas - in_place_huge.",
    ]
    return result


@dataclass(frozen=True)
class Job:
    """One batch of distinct rows, ready for the kernels."""

    plan: rules.Plan
    grads: np.ndarray
    frame_index: np.ndarray
    frame_offset: np.ndarray


class World:
    """Records of all rows in frames, and weights in four places."""

    def __init__(self, rows: int, dim: int, pool: Pool) -> None:
        self.rule = rules.get("sparse_adam")
        self.schema = Schema(rows, dim, self.rule.field_specs(dim, "float32"), self.rule.name)
        self.pool = pool
        self.records = shared_memory(rows * self.schema.record_bytes, huge=True)
        self.words = np.zeros(rows, np.uint64)
        self.random = np.random.default_rng(0)
        # As after a while of training: the frames of neighbouring rows are not neighbours.
        self._frames = self.random.permutation(rows)
        # As the rule's kernels do it, with the weight's row beside the others. Measured: 3 to 8
        # rows are alike, 16 or none are slower.
        row_bytes = self.schema.record_bytes + 2 * dim * 4
        self._ahead_rows = max(1, min(sparse_adam.AHEAD_BYTES // row_bytes, sparse_adam.AHEAD_ROWS))
        self._undo = np.zeros((pool.threads, self.schema.record_bytes), np.uint8)
        self._undo_weights = np.zeros((pool.threads, dim), np.float32)
        self._progress = np.zeros((pool.threads, PROGRESS_WORDS), np.int64)
        self._spare = np.zeros((pool.threads, 2, -(-dim // 32) * 32), np.float32)
        self._values = np.zeros((0, dim), np.float32)
        shape = (rows, dim)
        self.weights = {
            "deltas": torch.full(shape, 0.01),
            **{
                name: torch.from_numpy(_filled(shape, huge=huge))
                for name, huge in (
                    ("deltas_huge", True), ("in_place", False), ("in_place_huge", True),
                )
            },
        }  # fmt: skip

    def job(self, batch: int, entries: int | None = None) -> Job:
        """Random rows; more entries than rows: some of them several times."""
        ids = self.random.choice(self.schema.rows, batch, replace=False)
        if entries is not None:
            ids = np.concatenate([ids, self.random.choice(ids, entries - batch)])
        # A scratch of its own: a plan is a view of it.
        plan = rules.plan(ids, self.schema.rows, rules.Scratch())
        frames = self._frames[plan.unique]
        grads = self.random.standard_normal((len(ids), self.schema.width), np.float32)
        return Job(plan, grads, frames, frames * self.schema.record_bytes)

    def sides(self) -> dict[str, Callable[[Job, int], None]]:
        found: dict[str, Callable[[Job, int], None]] = {}
        for name, weights in self.weights.items():
            call = self.with_deltas if name.startswith("deltas") else self.in_place
            found[name] = partial(call, weights)
        return found

    def with_deltas(self, weights: torch.Tensor, job: Job, step: int) -> None:
        """As today: the daemon's kernel, then the client's addition."""
        if len(self._values) < job.plan.distinct:
            self._values = np.zeros((job.plan.distinct, self.schema.width), np.float32)
        values = self._values[: job.plan.distinct]
        records = rules.Records(
            space=self.records, words=self.words, frame_index=job.frame_index,
            frame_offset=job.frame_offset, word=WORD, undo=self._undo, progress=self._progress,
            schema=self.schema,
        )  # fmt: skip
        batch = rules.Batch(job.plan, job.grads, out_values=values)
        self.rule.apply(self.pool, records, batch, HYPER, step, 0, job.plan.distinct)
        add_rows(weights, job.plan.unique, values)

    def in_place(self, weights: torch.Tensor, job: Job, step: int) -> None:
        """One pass over moments and weights."""
        self.pool.run(
            apply_in_place,
            job.plan.distinct,
            self.records.view(np.float32),
            self.words,
            job.frame_index,
            job.frame_offset,
            np.uint64(WORD),
            self._undo.view(np.float32),
            self._undo_weights,
            self._progress,
            job.plan.unique,
            weights.numpy(),
            job.plan.order,
            job.plan.starts,
            job.grads,
            self._spare,
            sparse_adam._numbers(HYPER, step, np.dtype(np.float32)),
            sparse_adam.layout_of(self.schema, "none"),
            self._ahead_rows,
            least=LEAST_ROWS,
        )


def shared_memory(nbytes: int, *, huge: bool) -> np.ndarray:
    """uint8 (nbytes,) of a memfd, every page there; OSError if huge pages cannot be had."""
    size = -(-nbytes // HUGE) * HUGE
    descriptor = space.create_memfd("benchmark")
    try:
        os.ftruncate(descriptor, size)
        address = space._map_aligned(descriptor, size)
    finally:
        os.close(descriptor)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, space._libc.munmap, address, size)
    array = np.ctypeslib.as_array(memory)
    array[:: mmap.PAGESIZE] = 0
    if huge and space._libc.madvise(address, size, space._MADV_COLLAPSE):
        code = ctypes.get_errno()
        raise OSError(code, f"no huge pages for {size} bytes: {os.strerror(code)}")
    return array[:nbytes]


def _filled(shape: tuple[int, int], *, huge: bool) -> np.ndarray:
    weights = shared_memory(shape[0] * shape[1] * 4, huge=huge).view(np.float32).reshape(shape)
    weights[:] = 0.01
    return weights


def _measure(world: World, batch: int, repeats: int) -> dict[str, list[float]]:
    jobs = [world.job(batch) for _ in range(BATCHES)]
    sides = world.sides()
    times: dict[str, list[float]] = {name: [] for name in sides}
    calls = 0
    for turn in range(repeats + 1):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            spent = []
            for _ in range(BLOCK):
                # The next batch that nobody has used of late: its rows are not in the CPU's cache.
                calls += 1
                job = jobs[calls % BATCHES]
                began = time.perf_counter()
                sides[name](job, calls)
                spent.append(time.perf_counter() - began)
            if turn:
                # The first turn compiles and warms up.
                times[name] += spent
    return times


def _row(label: str, times: dict[str, list[float]]) -> Row:
    numbers = {f"{name}_ms": statistics.median(spent) * 1e3 for name, spent in times.items()}
    numbers["saved_ms"] = numbers["deltas_ms"] - numbers["in_place_huge_ms"]
    numbers["ratio"] = numbers["deltas_ms"] / numbers["in_place_huge_ms"]
    return Row(label, numbers)
