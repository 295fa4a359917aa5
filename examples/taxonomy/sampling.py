"""Training batches: nodes, some of their ancestors, and shared negatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .data import Ints, Tree

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """b nodes, p ancestors of each, q negatives shared by all, and the m rows they are made of.

    rows       (m) distinct, ascending
    nodes      (b) positions in `rows`
    ancestors  (b, p) positions in `rows`
    kept       (b, p) False where the drawn pair is held out for evaluation
    negatives  (q) positions in `rows`
    masked     (b, q) True where the negative is the node itself or one of its ancestors
    """

    rows: Ints
    nodes: Positions
    ancestors: Positions
    kept: NDArray[np.bool_]
    negatives: Positions
    masked: NDArray[np.bool_]


class Sampler:
    """Draws shuffled passes over all nodes but the root, which has no ancestor.

    `held_out[u]` is the ancestor that must never be used for node u, -1 if there is none.
    """

    def __init__(
        self, tree: Tree, held_out: Ints, *, batch: int, ancestors: int, negatives: int, seed: int
    ) -> None:
        if negatives > len(tree.internal) // 2:
            raise ValueError(
                f"{negatives} distinct negatives of {len(tree.internal)} ancestors in the tree: "
                "use at most half of them"
            )
        self._tree = tree
        self._held_out = held_out
        self._nodes = np.flatnonzero(tree.depth)
        self._batch = batch
        self._ancestors = ancestors
        self._negatives = negatives
        self._rng = np.random.default_rng(seed)
        self._position = np.zeros(len(tree), np.int64)

    @property
    def batches_per_pass(self) -> int:
        return max(1, len(self._nodes) // self._batch)

    def shuffled_pass(self) -> Iterator[Batch]:
        """Every node once, in batches that differ in length by one node at most."""
        order = self._rng.permutation(self._nodes)
        for nodes in np.array_split(order, self.batches_per_pass):
            yield self._draw(nodes)

    def _draw(self, nodes: Ints) -> Batch:
        repeated = np.repeat(nodes, self._ancestors)
        ancestors = self._random_ancestors(repeated)
        kept = ancestors != self._held_out[repeated]
        negatives = self._draw_negatives()
        rows = _distinct(np.concatenate([nodes, ancestors, negatives]))
        self._position[rows] = np.arange(len(rows))
        shape = (len(nodes), self._ancestors)
        return Batch(
            rows=rows,
            nodes=self._position[nodes],
            ancestors=self._position[ancestors].reshape(shape),
            kept=kept.reshape(shape),
            negatives=self._position[negatives],
            masked=self._tree.covers(negatives, nodes).T,
        )

    def _random_ancestors(self, nodes: Ints) -> Ints:
        """One ancestor of each node, its depth drawn uniformly."""
        depth = (self._rng.random(len(nodes)) * self._tree.depth[nodes]).astype(np.int64)
        return self._tree.ancestors(nodes, depth)

    def _draw_negatives(self) -> Ints:
        """Distinct random ancestors of random nodes; those drawn first."""
        drawn = np.empty(0, np.int64)
        while True:
            nodes = self._rng.choice(self._nodes, 2 * self._negatives)
            drawn = np.concatenate([drawn, self._random_ancestors(nodes)])
            _, first = np.unique(drawn, return_index=True)
            if len(first) >= self._negatives:
                return drawn[np.sort(first)[: self._negatives]]


def _distinct(ids: Ints) -> Ints:
    """np.unique, which for plain integers is a hash table and four times as slow."""
    ordered = np.sort(ids)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]
