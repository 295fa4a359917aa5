"""What the baselines share: the step counter, the gradient, scratch memory of the fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from momentd_server.rules.sparse_adam import SparseAdamHyper

# What `fill` leaves in both moments: the state of a row that was touched long ago.
FILLED = 1e-6
# Rows written at a time by `fill`.
FILL_ROWS = 100_000


class Baseline(torch.optim.Optimizer):
    """State in files of `folder`, which is the caller's. Nothing is synced, as in our steps."""

    def __init__(self, parameter: nn.Parameter, folder: Path, lr: float = 1e-3) -> None:
        super().__init__([parameter], {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.parameter = parameter
        self.folder = folder
        self.rows, self.dim = parameter.shape
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            raise ValueError("a baseline takes no closure: call it before step()")
        gradient = self.parameter.grad
        if gradient is None:
            return
        self.steps += 1
        self.update(gradient)

    def update(self, gradient: Tensor) -> None:
        """Apply a sparse gradient, uncoalesced, as update number `self.steps`."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write the state of every row once."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait for what is done in the background."""

    def sync(self) -> None:
        """Have the files written back, as the kernel does by itself after half a minute."""

    def close(self) -> None:
        """End threads, close files."""

    def hyper(self) -> SparseAdamHyper:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        return SparseAdamHyper(group["lr"], beta1, beta2, group["eps"])
