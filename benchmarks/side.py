"""One side of a comparison in a process of its own, which takes its turns when it is told to.

    python -m benchmarks.side '{"system": "torch", "rows": ..., "dim": ..., ...}'

A process of its own, because a system changes the process that it runs in: momentd makes torch's
idle threads sleep at once, and SparseAdam is up to a fifth slower then. Only one side works at a
time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from .machine import REPOSITORY
from .workload import Gradients, Shape, fill_state, make_parameter, timed_steps

# Steps of one side before another one has its turn; fewer if they take long.
BLOCK = 10
BLOCK_SECONDS, LEAST_STEPS = 2.0, 3
LR = 1e-3


class Side:
    """The process, seen from the benchmark; a context manager. `wait` until its state is made."""

    def __init__(
        self,
        system: str,
        shape: Shape,
        *,
        address: str = "",
        folder: Path | None = None,
        group: Path | None = None,
    ) -> None:
        """`group`: a memory cgroup that the process enters before it makes its state."""
        self.system = system
        spec = {
            "system": system, "rows": shape.rows, "dim": shape.dim,
            "address": address, "folder": str(folder or ""), "group": str(group or ""),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.side", json.dumps(spec)],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            # It may be in the middle of minutes of work that nobody waits for any more.
            self._process.kill()
        # End of file is how it is told to end.
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def wait(self) -> None:
        self._answer()

    def block(self, shape: Shape, *, synced: bool = False) -> list[float]:
        """Seconds of each step of one block; `synced`: files are written back first."""
        assert self._process.stdin is not None
        order = {"distinct": shape.distinct, "entries": shape.entries, "synced": synced}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of {self.system!r} ended with {self._process.wait()}; its error is "
                "above"
            )
        return json.loads(line)


def serve(system: str, rows: int, dim: int, address: str, folder: str, group: str) -> None:
    """Make the state, say so, then answer each order with the seconds of its steps."""
    from .baselines import Baseline

    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        # What has its weights in a file: under the limit they must not be in memory before.
        # (torch.zeros would write every page.)
        parameter = torch.nn.Parameter(torch.from_numpy(np.zeros((rows, dim), np.float32)))
    else:
        parameter = make_parameter(Shape(rows, dim, 0, 0))
    supplies: dict[tuple[int, int], Gradients] = {}
    with _open(system, parameter, address, folder) as optimizer:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            shape = Shape(rows, dim, order["distinct"], order["entries"])
            gradients = supplies.setdefault((shape.distinct, shape.entries), Gradients(shape))
            if order["synced"]:
                assert isinstance(optimizer, Baseline)
                optimizer.sync()
            print(json.dumps(_block(parameter, optimizer, gradients)), flush=True)


def _block(
    parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: Gradients
) -> list[float]:
    from .baselines import Baseline

    seconds: list[float] = []
    while len(seconds) < BLOCK and (len(seconds) < LEAST_STEPS or sum(seconds) < BLOCK_SECONDS):
        seconds += timed_steps(parameter, optimizer, gradients, 1)
    if isinstance(optimizer, Baseline):
        # What goes on in the background ends before somebody else has a turn.
        optimizer.drain()
    return seconds


@contextmanager
def _open(
    system: str, parameter: torch.nn.Parameter, address: str, folder: str
) -> Generator[torch.optim.Optimizer]:
    """The optimizer of a system, the state of every row touched before."""
    if system == "torch":
        yield _filled_by_torch(parameter)
    elif system in {"momentd", "grpc"}:
        import momentd

        optimizer = momentd.SparseAdam([parameter], lr=LR, address=address, run="benchmark")
        fill_state(parameter, optimizer)
        yield optimizer
        # Its table goes before the daemon does: nothing of it has to be written at the stop.
        optimizer.close()
    else:
        from .baselines import BASELINES

        baseline = BASELINES[system](parameter, Path(folder), LR)
        try:
            baseline.fill()
            yield baseline
        finally:
            baseline.close()


def _filled_by_torch(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    from .baselines.base import FILLED

    rows, dim = parameter.shape
    optimizer = torch.optim.SparseAdam([parameter], lr=LR)
    timed_steps(parameter, optimizer, Gradients(Shape(rows, dim, 1, 1)), 1)
    for name in ("exp_avg", "exp_avg_sq"):
        # As after long training, and every page is there.
        optimizer.state[parameter][name].fill_(FILLED)
    return optimizer


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
