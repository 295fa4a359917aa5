"""The demo's tree, sampler and judge, against slow and obvious versions of themselves."""

import numpy as np
import pytest
import torch

from examples.taxonomy import data, evaluation, model, sampling


@pytest.fixture(scope="module")
def tree():
    """A random tree of 4,000 nodes: node k hangs below one of the 40 nodes before it."""
    rng = np.random.default_rng(0)
    parent = np.array([-1] + [rng.integers(max(0, k - 40), k) for k in range(1, 4000)])
    return data.grow(np.arange(4000) * 3 + 1, parent)


def path_to_root(tree, node):
    path = [node]
    while tree.parent[path[-1]] >= 0:
        path.append(int(tree.parent[path[-1]]))
    return path


def test_depth_descendants_and_order_are_those_of_a_walk(tree):
    paths = [path_to_root(tree, node) for node in range(len(tree))]
    below = np.zeros(len(tree), int)
    for path in paths:
        below[path[1:]] += 1

    assert [len(path) - 1 for path in paths] == tree.depth.tolist()
    assert below.tolist() == tree.descendants.tolist()
    assert sorted(tree.first) == list(range(len(tree)))


def test_ancestors_are_found_by_depth(tree):
    node = int(np.argmax(tree.depth))
    path = path_to_root(tree, node)[::-1]
    depths = np.arange(tree.depth[node])

    found = tree.ancestors(np.full(len(depths), node), depths)

    assert found.tolist() == path[:-1]


def test_a_node_covers_itself_and_its_descendants_only(tree):
    upper, lower = np.arange(0, 4000, 7), np.arange(0, 4000, 13)

    covers = tree.covers(upper, lower)

    for column, node in enumerate(lower):
        assert covers[:, column].tolist() == np.isin(upper, path_to_root(tree, node)).tolist()


def test_clades_are_whole_and_keep_their_paths_to_the_root(tree):
    part = tree.clades(1000, seed=1)
    original = {int(taxon): node for node, taxon in enumerate(tree.taxon)}
    kept = {original[int(taxon)] for taxon in part.taxon}

    assert 1000 <= len(part) <= 1300
    assert all(int(tree.parent[node]) in kept for node in kept if tree.parent[node] >= 0)
    # A node with some children but not all of them lies above the clades.
    children = np.bincount(tree.parent[1:], minlength=len(tree))
    for node in kept:
        here = sum(int(tree.parent[other]) == node for other in kept)
        cut = here < children[node]
        below = np.isin(path_to_root(tree, node)[1:], sorted(kept)).all()
        assert below
        assert not cut or tree.descendants[node] + 1 > 1000 // 40


def test_parents_that_form_a_cycle_are_refused():
    with pytest.raises(ValueError, match="cycle"):
        data.grow(np.arange(4), np.array([-1, 2, 3, 1]))


def test_a_pass_visits_every_node_once_and_never_a_held_out_pair(tree):
    held_out = evaluation.hold_out(tree, pairs=60, matched=3, seed=0)
    sampler = sampling.Sampler(
        tree, held_out.forbidden, batch=128, ancestors=4, negatives=64, seed=0
    )
    seen = []
    for batch in sampler.shuffled_pass():
        nodes, ancestors = batch.rows[batch.nodes], batch.rows[batch.ancestors]
        negatives = batch.rows[batch.negatives]
        seen += nodes.tolist()
        forbidden = held_out.forbidden[nodes]
        assert ((ancestors != forbidden[:, None]) == batch.kept).all()
        assert len(set(negatives)) == 64
        for row, node in enumerate(nodes):
            path = path_to_root(tree, int(node))
            assert np.isin(ancestors[row], path[1:]).all()
            assert batch.masked[row].tolist() == np.isin(negatives, path).tolist()

    assert sorted(seen) == list(range(1, 4000))


def test_held_out_pairs_have_rivals_next_in_size_at_the_same_depth(tree):
    held_out = evaluation.hold_out(tree, pairs=60, matched=3, seed=0)

    for node, (true, *rivals) in zip(held_out.nodes, held_out.candidates, strict=True):
        depth = tree.depth[true]
        assert true in path_to_root(tree, int(node))
        assert 4 <= depth <= tree.depth[node] - 2
        assert held_out.forbidden[node] == true
        same = [a for a in tree.internal if tree.depth[a] == depth]
        sizes = sorted((tree.descendants[a], a) for a in same)
        place = sizes.index((tree.descendants[true], true))
        near = [a for _, a in sizes[place - 3 : place] + sizes[place + 1 : place + 4]]
        assert rivals == near


def test_ranks_count_ties_as_half():
    scores = np.array([[1.0, 2.0, 1.0, 0.0], [5.0, 1.0, 1.0, 1.0]])

    metrics = evaluation.rank_metrics(scores)

    assert metrics.mrr == pytest.approx((1 / 2.5 + 1) / 2)
    assert metrics.hits == 1.0


def test_goal_names_everything_that_was_missed():
    goal = evaluation.Goal(mrr=0.2, hits=0.4, baseline_mrr=0.03, before_mrr=0.07)
    good, bad = evaluation.Metrics(0.3, 0.5), evaluation.Metrics(0.02, 0.1)

    assert goal.misses(baseline=bad, before=bad, after=good) == []
    assert len(goal.misses(baseline=good, before=good, after=bad)) == 4


def test_loss_is_that_of_its_definition(tree):
    held_out = evaluation.hold_out(tree, pairs=60, matched=3, seed=0)
    sampler = sampling.Sampler(
        tree, held_out.forbidden, batch=32, ancestors=3, negatives=16, seed=3
    )
    batch = next(sampler.shuffled_pass())
    embedding = model.make_embedding(len(tree), 8, seed=0, device=torch.device("cpu"))
    weight = embedding.weight.detach().double()
    terms = []
    for i, node in enumerate(batch.rows[batch.nodes]):
        scores = weight[batch.rows[batch.negatives]] @ weight[node]
        rivals = scores[~torch.from_numpy(batch.masked[i])].exp().sum()
        for ancestor, kept in zip(batch.rows[batch.ancestors[i]], batch.kept[i], strict=True):
            true = (weight[ancestor] @ weight[node]).exp()
            terms += [-(true / (true + rivals)).log()] if kept else []

    loss = model.batch_loss(embedding, batch)
    loss.backward()

    assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)
    assert embedding.weight.grad._indices()[0].tolist() == batch.rows.tolist()
