"""The daemon's rule beside torch.optim.SparseAdam, without client and engine in between."""

import numpy as np
import pytest
import torch

from momentd_server.jit import Pool
from momentd_server.rules import SparseAdamHyper
from tests.support.records import Memory

ROWS, WIDTH = 200, 32


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


class Twins:
    """One table stepped by torch and by the rule, with the same gradients."""

    def __init__(self, pool, *, dtype="float32", seed=0, maximize=False, rows=ROWS, width=WIDTH):
        self.pool, self.dtype = pool, getattr(torch, dtype)
        self.random = np.random.default_rng(seed)
        start = self.random.normal(0, 0.05, (rows, width)).astype(dtype)
        self.weight = start.copy()
        self.memory = Memory.zeros(rows, width, dtype)
        self.param = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self.torch = torch.optim.SparseAdam([self.param], lr=0.01, maximize=maximize)

    def step(self, number, rows, *, lr, betas=(0.9, 0.999), scale=1.0):
        grads = self.random.normal(0, scale, (len(rows), self.weight.shape[1]))
        grads = grads.astype(self.weight.dtype)
        group = self.torch.param_groups[0]
        group["lr"], group["betas"] = lr, betas
        self.param.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None], torch.from_numpy(grads), self.param.shape,
            check_invariants=False,
        )  # fmt: skip
        self.torch.step()
        hyper = SparseAdamHyper(lr, *betas, group["eps"], group["maximize"])
        unique, deltas = self.memory.update(self.pool, rows, grads, hyper, number)
        self.weight[unique] += deltas
        return grads

    @property
    def torch_moments(self):
        state = self.torch.state[self.param]
        return state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()


def close_to(actual, expected, *, relative, absolute=0.0):
    excess = np.abs(actual - expected) - relative * np.abs(expected) - absolute
    assert excess.max() <= 0, f"{excess.max():g} beyond the tolerance"


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("width", [1, 3, 8, 32, 129])
def test_without_duplicates_both_moments_have_torchs_bits(pool, width, maximize):
    twins = Twins(pool, maximize=maximize, width=width)
    for number in range(1, 301):
        rows = twins.random.permutation(ROWS)[: twins.random.integers(1, ROWS)]
        scale = 10.0 ** twins.random.integers(-6, 4)
        betas = (float(twins.random.uniform(0, 0.99)), float(twins.random.uniform(0.5, 0.9999)))
        twins.step(number, rows, lr=0.003, betas=betas, scale=scale)
    avg, sq = twins.torch_moments
    assert twins.memory.field(0).tobytes() == avg.tobytes()
    assert twins.memory.field(1).tobytes() == sq.tobytes()
    close_to(twins.weight, twins.param.detach().numpy(), relative=1e-6, absolute=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fp32_stays_with_torch_over_1000_steps_with_duplicates(pool, seed):
    twins = Twins(pool, seed=seed)
    for number in range(1, 1_001):
        rows = twins.random.integers(0, ROWS, twins.random.integers(1, 150))
        lr = 0.01 * float(twins.random.uniform(0.01, 1))
        twins.step(number, rows, lr=lr)
    avg, sq = twins.torch_moments
    largest = np.abs(avg).max(axis=1, keepdims=True)
    close_to(twins.weight, twins.param.detach().numpy(), relative=1e-6, absolute=1e-6)
    close_to(twins.memory.field(1), sq, relative=2e-6)
    close_to(twins.memory.field(0), avg, relative=0.0, absolute=2e-6 * largest)


def test_fp64_stays_within_1e_12_of_torch_over_1000_steps_with_duplicates(pool):
    twins = Twins(pool, dtype="float64", seed=4)
    for number in range(1, 1_001):
        rows = twins.random.integers(0, ROWS, twins.random.integers(1, 150))
        twins.step(number, rows, lr=0.01)
    avg, sq = twins.torch_moments
    largest = np.abs(avg).max(axis=1, keepdims=True)
    close_to(twins.weight, twins.param.detach().numpy(), relative=1e-12, absolute=1e-12)
    close_to(twins.memory.field(1), sq, relative=1e-12)
    close_to(twins.memory.field(0), avg, relative=0.0, absolute=1e-12 * largest)


def test_error_against_float64_is_at_most_twice_torchs_own(pool):
    twins, exact = Twins(pool, seed=5), Twins(pool, dtype="float64", seed=5)
    exact.weight = twins.weight.astype(np.float64)
    for number in range(1, 501):
        rows = twins.random.integers(0, ROWS, 100)
        grads = twins.step(number, rows, lr=0.01)
        hyper = SparseAdamHyper(0.01)
        unique, deltas = exact.memory.update(pool, rows, grads.astype(np.float64), hyper, number)
        exact.weight[unique] += deltas
    ours = np.abs(twins.weight - exact.weight)
    torchs = np.abs(twins.param.detach().numpy() - exact.weight)
    assert ours.max() <= 2 * torchs.max()
    assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((torchs**2).mean())


def test_element_sparse_gradients_move_the_elements_that_torch_moves(pool):
    twins = Twins(pool, rows=40, width=6)
    random = np.random.default_rng(6)
    for number in range(1, 201):
        rows, columns = random.integers(0, 40, 30), random.integers(0, 6, 30)
        values = random.standard_normal(30).astype(np.float32)
        twins.param.grad = torch.sparse_coo_tensor(
            np.stack([rows, columns]), torch.from_numpy(values), twins.param.shape,
            check_invariants=False,
        )  # fmt: skip
        twins.torch.step()
        grads, mask = np.zeros((30, 6), np.float32), np.zeros((30, 6), np.uint8)
        grads[np.arange(30), columns] = values
        mask[np.arange(30), columns] = 1
        unique, deltas = twins.memory.update(
            pool, rows, grads, SparseAdamHyper(0.01), number, mask=mask
        )
        twins.weight[unique] += deltas
    close_to(twins.weight, twins.param.detach().numpy(), relative=1e-6, absolute=1e-6)
    close_to(twins.memory.field(1), twins.torch_moments[1], relative=2e-6)
