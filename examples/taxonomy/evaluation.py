"""Held-out pairs and the two numbers by which the embedding is judged.

A held-out pair is a node u and one of its ancestors a that training never uses for u. The question
is whether u scores a above internal nodes of the same depth that have about as many descendants.
Uniform negatives would prove nothing: a node near the root is a good guess for anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .data import Ints, Tree

# Ancestors nearer to the root than this are too easy; the parent is too: training sees siblings.
MIN_DEPTH = 4
MIN_DISTANCE = 2


@dataclass(frozen=True)
class Metrics:
    """`mrr` is the mean of 1 / rank, `hits` the share of ranks up to 10."""

    mrr: float
    hits: float


@dataclass(frozen=True)
class Goal:
    """What a run must reach; the baseline and the untrained embedding must not reach it."""

    mrr: float
    hits: float = 0.0
    baseline_mrr: float = 1.0
    before_mrr: float = 1.0

    def misses(self, *, baseline: Metrics, before: Metrics, after: Metrics) -> list[str]:
        """What is not as it should be, in words; empty if all is."""
        checks = [
            (baseline.mrr <= self.baseline_mrr, "baseline MRR", baseline.mrr, self.baseline_mrr),
            (before.mrr <= self.before_mrr, "MRR before training", before.mrr, self.before_mrr),
            (after.mrr >= self.mrr, "MRR after training", after.mrr, self.mrr),
            (after.hits >= self.hits, "Hits@10 after training", after.hits, self.hits),
        ]
        return [f"{name} is {is_:.3f}, not {want}" for good, name, is_, want in checks if not good]


@dataclass(frozen=True)
class HeldOut:
    """k pairs; candidates[i, 0] is the true ancestor of nodes[i], the rest are its rivals."""

    nodes: Ints
    candidates: NDArray[np.int64]  # (k, 1 + 2 * matched)
    # (n) the ancestor that training must not use for a node, -1 for most
    forbidden: Ints


def hold_out(tree: Tree, *, pairs: int, matched: int, seed: int) -> HeldOut:
    """Draw pairs of distinct nodes; `matched` rivals are larger and as many smaller than a.

    Rivals are the next internal nodes of a's depth in order of their number of descendants. Raises
    ValueError if the tree has too few nodes that qualify.
    """
    order, rank, count = _rank_by_size(tree)
    rng = np.random.default_rng(seed)
    deep = np.flatnonzero(tree.depth >= MIN_DEPTH + MIN_DISTANCE)
    nodes = rng.permutation(deep)
    span = tree.depth[nodes] - MIN_DISTANCE - MIN_DEPTH + 1
    depth = MIN_DEPTH + (rng.random(len(nodes)) * span).astype(np.int64)
    upper = tree.ancestors(nodes, depth)
    inside = (rank[upper] >= matched) & (rank[upper] < count[depth] - matched)
    nodes, upper = nodes[inside][:pairs], upper[inside][:pairs]
    if len(nodes) < pairs:
        raise ValueError(f"only {len(nodes)} of {pairs} pairs have 2 x {matched} rivals here")
    steps = np.concatenate([[0], np.arange(-matched, 0), np.arange(1, matched + 1)])
    start = np.searchsorted(tree.depth[order], np.arange(tree.depth.max() + 2))
    place = start[tree.depth[upper]] + rank[upper]
    forbidden = np.full(len(tree), -1)
    forbidden[nodes] = upper
    return HeldOut(nodes, order[place[:, None] + steps], forbidden)


def evaluate(weight: torch.Tensor, held_out: HeldOut) -> Metrics:
    """Rank each true ancestor by the inner product with its node. `weight` is (n, dim)."""
    nodes = torch.from_numpy(held_out.nodes).to(weight.device)
    candidates = torch.from_numpy(held_out.candidates).to(weight.device)
    with torch.no_grad():
        scores = torch.einsum("kd,kcd->kc", weight[nodes], weight[candidates])
    return rank_metrics(scores.cpu().numpy())


def baseline(tree: Tree, held_out: HeldOut) -> Metrics:
    """What "more descendants first" reaches without learning anything."""
    return rank_metrics(tree.descendants[held_out.candidates])


def rank_metrics(scores: NDArray[np.floating] | Ints) -> Metrics:
    """Metrics of column 0 of (k, c) scores against the other columns; ties count half."""
    true, rivals = scores[:, :1], scores[:, 1:]
    rank = 1 + (rivals > true).sum(axis=1) + 0.5 * (rivals == true).sum(axis=1)
    return Metrics(mrr=float((1 / rank).mean()), hits=float((rank <= 10).mean()))


def _rank_by_size(tree: Tree) -> tuple[Ints, Ints, Ints]:
    """Internal nodes by depth and size, each one's rank in its depth, how many each depth has."""
    internal = tree.internal
    order = internal[np.lexsort((tree.descendants[internal], tree.depth[internal]))]
    count = np.bincount(tree.depth[internal], minlength=tree.depth.max() + 1)
    rank = np.zeros(len(tree), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    return order, rank, count
