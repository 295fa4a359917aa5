"""Time the fused `sparse_adam` kernel over random rows, and torch.optim.SparseAdam beside it.

    python benchmarks/bench_kernel.py [--rows 10000] [--dim 128] [--json FILE]

Each call updates other random rows, so that records come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from momentd_server import rules
from momentd_server.jit import Pool, warm_up
from momentd_server.jit.row_protocol import PROGRESS_WORDS
from momentd_server.rules import sparse_adam
from momentd_server.schema import Schema

TABLE_ROWS = 10_000_000
HYPER = rules.SparseAdamHyper(lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One line of the table; times in milliseconds a call."""

    what: str
    rows: int
    dim: int
    dtype: str
    threads: int
    protocol: bool
    prefetch: bool
    best_ms: float
    median_ms: float


class Memory:
    """Frames of a table in one block of memory, and batches of random rows over them."""

    def __init__(self, *, dim: int, dtype: str, space_bytes: int) -> None:
        self.rule = rules.get("sparse_adam")
        specs = self.rule.field_specs(dim, dtype)
        self.schema = Schema(TABLE_ROWS, dim, specs, self.rule.name)
        self.frames = space_bytes // self.schema.record_bytes
        self.space = aligned((1, self.frames * self.schema.record_bytes), "uint8")[0]
        self.space[:] = 0  # zeros() maps one page for all: touch each
        self.words = np.zeros(self.frames, np.uint64)
        self.index = np.zeros(self.frames, np.int64)
        self.offset = np.zeros(self.frames, np.int64)
        self.random = np.random.default_rng(1)

    def records(self, rows: int, *, workers: int) -> rules.Records:
        """Records of `rows` frames, see `shuffle`; with 0 workers there is no row protocol."""
        return rules.Records(
            space=self.space,
            words=self.words,
            frame_index=self.index[:rows],
            frame_offset=self.offset[:rows],
            word=1 << 8 | 2,
            undo=aligned((workers, self.schema.record_bytes), "uint8") if workers else None,
            progress=aligned((workers, PROGRESS_WORDS), "int64"),
            schema=self.schema,
        )

    def shuffle(self, rows: int) -> None:
        """Draw other frames for the first `rows` rows, in place: all cases use the same arrays."""
        self.index[:rows] = self.random.choice(self.frames, rows, replace=False)
        np.multiply(self.index[:rows], self.schema.record_bytes, out=self.offset[:rows])

    def batch(self, rows: int) -> rules.Batch:
        """A batch of distinct rows in random order; results are deltas."""
        dim, dtype = self.schema.width, self.schema.state_dtype
        ids = self.random.choice(TABLE_ROWS, rows, replace=False)
        plan = rules.plan(ids, TABLE_ROWS, rules.Scratch())
        grads = aligned((rows, dim), dtype.name)
        grads[:] = self.random.standard_normal((rows, dim))
        return rules.Batch(plan, grads, out_values=aligned((rows, dim), dtype.name))


def aligned(shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Zeros that start on a cache line, as everything in the daemon's memory does."""
    nbytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    skip = -memory.ctypes.data % 64
    return memory[skip : skip + nbytes].view(dtype).reshape(shape)


def milliseconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def time_kernels(args: argparse.Namespace) -> Iterator[Case]:
    """All combinations of threads, protocol and prefetch, taking turns: noise hits all alike."""
    memory = Memory(dim=args.dim, dtype=args.dtype, space_bytes=args.space)
    batches = itertools.cycle([memory.batch(args.rows) for _ in range(5)])
    pools = {threads: Pool(threads) for threads in args.threads}
    times: dict[tuple[int, bool, bool], list[float]] = {}
    for repeat in range(args.repeats):
        for threads, pool in pools.items():
            for protocol, prefetch in ((True, True), (False, True), (True, False)):
                records = memory.records(args.rows, workers=threads if protocol else 0)
                batch = next(batches)
                memory.shuffle(args.rows)
                with fetching_ahead(prefetch):
                    spent = milliseconds(
                        lambda p=pool, r=records, b=batch, s=repeat: memory.rule.apply(
                            p, r, b, HYPER, s + 1, 0, args.rows
                        )
                    )
                times.setdefault((threads, protocol, prefetch), []).append(spent)
    for pool in pools.values():
        pool.close()
    for (threads, protocol, prefetch), spent in times.items():
        yield case("kernel", args, spent, threads=threads, protocol=protocol, prefetch=prefetch)


class fetching_ahead:  # noqa: N801  used as a statement
    """Within it, kernels prefetch the next rows, or do not."""

    def __init__(self, wanted: bool) -> None:
        self._rows = sparse_adam.AHEAD_ROWS if wanted else 0

    def __enter__(self) -> None:
        self._before = sparse_adam.AHEAD_ROWS
        sparse_adam.AHEAD_ROWS = self._rows
        sparse_adam.layout_of.cache_clear()

    def __exit__(self, *_: object) -> None:
        sparse_adam.AHEAD_ROWS = self._before
        sparse_adam.layout_of.cache_clear()


def time_overhead(args: argparse.Namespace) -> Case:
    """`apply` for one row of one element: what a call costs before the first row."""
    memory = Memory(dim=1, dtype=args.dtype, space_bytes=1 << 20)
    records, batch, pool = memory.records(1, workers=2), memory.batch(1), Pool(2)
    spent = [
        milliseconds(lambda: memory.rule.apply(pool, records, batch, HYPER, 1, 0, 1))
        for _ in range(2_000)
    ]
    pool.close()
    one = argparse.Namespace(rows=1, dim=1, dtype=args.dtype)
    return case("overhead of a call", one, spent, threads=2, protocol=True, prefetch=True)


def time_plan(args: argparse.Namespace) -> Case:
    """Copy, check, sort and deduplicate random ids."""
    random, scratch = np.random.default_rng(2), rules.Scratch()
    ids = [random.integers(0, TABLE_ROWS, args.rows) for _ in range(8)]
    spent = [
        milliseconds(lambda k=k: rules.plan(ids[k % len(ids)], TABLE_ROWS, scratch))
        for k in range(200)
    ]
    return case("plan", args, spent, threads=1, protocol=False, prefetch=False)


def time_torch(args: argparse.Namespace) -> Iterator[Case]:
    """torch.optim.SparseAdam.step on a table of 1 million rows in RAM, gradient not coalesced."""
    import torch

    table_rows = 1_000_000
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.zeros(table_rows, args.dim, dtype=getattr(torch, args.dtype)))
    optimizer = torch.optim.SparseAdam([weight], lr=1e-3)
    values = torch.randn(args.rows, args.dim, generator=generator, dtype=weight.dtype)
    for threads in args.threads:
        torch.set_num_threads(threads)
        spent: list[float] = []
        for _ in range(max(args.repeats // 2, 5)):
            ids = torch.randint(0, table_rows, (1, args.rows), generator=generator)
            weight.grad = torch.sparse_coo_tensor(ids, values, weight.shape)
            spent.append(milliseconds(optimizer.step))
        yield case("torch.optim.SparseAdam", args, spent, threads=threads)


def case(
    what: str,
    args: argparse.Namespace,
    spent: list[float],
    *,
    threads: int,
    protocol: bool = False,
    prefetch: bool = False,
) -> Case:
    """A line from the times of all calls; the first tenth warms up."""
    kept = spent[len(spent) // 10 :]
    best, median = round(min(kept), 4), round(statistics.median(kept), 4)
    return Case(what, args.rows, args.dim, args.dtype, threads, protocol, prefetch, best, median)


def show(cases: list[Case]) -> None:
    """Print the table."""
    head = f"{'':24}{'rows':>8}{'dim':>6}{'dtype':>9}{'threads':>9}{'protocol':>10}{'prefetch':>10}"
    print(f"{head}{'best ms':>10}{'median':>10}")
    for c in cases:
        flags = f"{'yes' if c.protocol else '-':>10}{'yes' if c.prefetch else '-':>10}"
        print(
            f"{c.what:24}{c.rows:>8}{c.dim:>6}{c.dtype:>9}{c.threads:>9}{flags}"
            f"{c.best_ms:>10.3f}{c.median_ms:>10.3f}"
        )


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Time the fused sparse_adam kernel.")
    parser.add_argument("--rows", type=int, default=10_000, help="distinct rows a call")
    parser.add_argument("--dim", type=int, default=128, help="elements a row")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--space", type=int, default=1 << 30, help="bytes of all frames")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    warm_up()
    cases = [*time_kernels(args), time_plan(args), time_overhead(args)]
    if not args.no_torch:
        cases += time_torch(args)
    show(cases)
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        result = {"machine": machine, "cases": [asdict(c) for c in cases]}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
