"""Gradients of rows drawn from a Zipf distribution, and what a perfect static cache would miss."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .workload import Shape, sparse_rows

EXPONENT = 1.05


class ZipfGradients:
    """As `workload.Gradients`; `shape.entries` draws a step, repeated rows included.

    Popular rows are spread over the whole table. `beyond` counts the distinct rows of each batch
    whose rank is `kept` or more: the misses of a cache that always holds the `kept` most popular.
    """

    def __init__(self, shape: Shape, *, kept: int, seed: int = 0) -> None:
        self._shape = shape
        self._random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.randn(shape.entries, shape.dim, generator=generator)
        ranks = np.arange(1, shape.rows + 1, dtype=np.float64)
        self._cumulated = np.cumsum(ranks**-EXPONENT)
        self._row_of_rank = np.random.default_rng(1).permutation(shape.rows)
        self.kept = kept
        self.beyond: list[int] = []
        self.distinct: list[int] = []

    @property
    def rows_by_rank(self) -> NDArray[np.int64]:
        """The most popular first."""
        return self._row_of_rank

    def next(self) -> Tensor:
        """A fresh uncoalesced COO gradient."""
        drawn = self._random.random(self._shape.entries) * self._cumulated[-1]
        # Rounding may put the last draw behind the last rank.
        ranks = np.minimum(np.searchsorted(self._cumulated, drawn), self._shape.rows - 1)
        distinct = np.unique(ranks)
        self.distinct.append(len(distinct))
        self.beyond.append(int(np.count_nonzero(distinct >= self.kept)))
        rows = torch.from_numpy(self._row_of_rank[ranks])
        return sparse_rows(rows, self._values.clone(), (self._shape.rows, self._shape.dim))


class Again:
    """Hands out given gradients once more, their values just written."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self._left = iter(gradients)

    def next(self) -> Tensor:
        gradient = next(self._left)
        values = gradient._values().clone()
        rows, dim = gradient.shape
        return sparse_rows(gradient._indices()[0], values, (rows, dim))
