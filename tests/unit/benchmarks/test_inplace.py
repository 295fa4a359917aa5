"""The prototype that updates weights in place computes what kernel and addition compute."""

import numpy as np
import pytest
import torch

from benchmarks.bench_inplace import World
from momentd_server.jit import Pool

NAMES = ("deltas", "deltas_huge", "in_place", "in_place_huge")


@pytest.fixture
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def test_all_sides_leave_the_same_bits(pool):
    found = {}
    for name in NAMES:
        world = World(3_000, 24, pool)
        jobs = [world.job(700, 900) for _ in range(4)]
        for step, job in enumerate(jobs, 1):
            world.sides()[name](job, step)
        found[name] = (world.weights[name], world.records.copy(), world.words.copy())

    weights, space, words = found["deltas"]
    assert (weights != 0.01).any()
    for other_weights, other_space, other_words in found.values():
        assert torch.equal(weights, other_weights)
        np.testing.assert_array_equal(space, other_space)
        np.testing.assert_array_equal(words, other_words)
