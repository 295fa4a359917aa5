"""Gradients as an embedding's backward pass leaves them, and how a step is timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

# Rows of one step while state is made: large enough to be quick, below a quarter of any cache here.
FILL_ROWS = 20_000


@dataclass(frozen=True)
class Shape:
    """A table and the gradients of a step.

    `distinct` rows are touched by `entries` gradient rows; more entries than distinct rows means
    duplicates, as a batch has that looks a row up more than once.
    """

    rows: int
    dim: int
    distinct: int
    entries: int

    @property
    def grad_bytes(self) -> int:
        """Bytes of the values of one gradient."""
        return self.entries * self.dim * 4

    @property
    def state_bytes(self) -> int:
        return 2 * self.rows * self.dim * 4


class GradientSource(Protocol):
    """Hands out the gradient of one step after the other."""

    def next(self) -> Tensor: ...


class Gradients:
    """An endless supply of random sparse gradients of a parameter."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self._shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        # The values hardly matter; drawing them anew for each step would take longer than the step.
        self._values = torch.randn(shape.entries, shape.dim, generator=self._generator)

    def next(self) -> Tensor:
        """A fresh uncoalesced COO gradient, its values just written, as by `backward()`."""
        shape = self._shape
        rows = self._distinct()
        extra = shape.entries - shape.distinct
        if extra:
            again = torch.randint(shape.distinct, (extra,), generator=self._generator)
            rows = torch.cat([rows, rows[again]])
            rows = rows[torch.randperm(shape.entries, generator=self._generator)]
        return sparse_rows(rows, self._values.clone(), (shape.rows, shape.dim))

    def _distinct(self) -> Tensor:
        """Distinct uniform rows in random order."""
        drawn = torch.randint(
            self._shape.rows, (self._shape.distinct * 2,), generator=self._generator
        ).unique()
        if drawn.numel() < self._shape.distinct:
            drawn = torch.arange(self._shape.rows)
        order = torch.randperm(drawn.numel(), generator=self._generator)
        return drawn[order[: self._shape.distinct]]


def sparse_rows(rows: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """What `F.embedding(..., sparse=True)` leaves in `weight.grad`."""
    return torch.sparse_coo_tensor(rows[None], values, size, check_invariants=False)


def make_parameter(shape: Shape) -> nn.Parameter:
    """Weights with every page touched."""
    return nn.Parameter(torch.full((shape.rows, shape.dim), 0.01))


def fill_state(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, fill_rows: int = FILL_ROWS
) -> None:
    """Touch the state of every row by ordinary steps, in sequence."""
    rows, dim = parameter.shape
    values = torch.full((min(fill_rows, rows), dim), 1e-3, device=parameter.device)
    for start in range(0, rows, fill_rows):
        ids = torch.arange(start, min(start + fill_rows, rows), device=parameter.device)
        parameter.grad = sparse_rows(ids, values[: ids.numel()], (rows, dim))
        optimizer.step()
    parameter.grad = None


def timed_steps(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: GradientSource, steps: int
) -> list[float]:
    """Seconds of each of `steps` whole calls of `optimizer.step()`."""
    seconds = []
    for _ in range(steps):
        parameter.grad = gradients.next()
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    parameter.grad = None
    return seconds
