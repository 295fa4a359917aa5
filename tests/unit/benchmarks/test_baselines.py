"""Baselines are worth comparing with only if they compute the same."""

import numpy as np
import pytest
import torch

from benchmarks.baselines import BASELINES, MemmapFiles
from benchmarks.workload import Gradients, Shape, fill_state, make_parameter, timed_steps

SHAPE = Shape(rows=400, dim=12, distinct=90, entries=150)
# Larger batches cross the threshold from which two threads share them.
WIDE = Shape(rows=2_000, dim=5, distinct=900, entries=900)


@pytest.fixture(params=BASELINES)
def kind(request):
    return BASELINES[request.param]


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["duplicates", "wide"])
def test_baseline_trains_as_torch_does(kind, shape, tmp_path):
    theirs, ours = make_parameter(shape), make_parameter(shape)
    reference = torch.optim.SparseAdam([theirs], lr=0.01)
    baseline = kind(ours, tmp_path, lr=0.01)

    timed_steps(theirs, reference, Gradients(shape, seed=5), 40)
    timed_steps(ours, baseline, Gradients(shape, seed=5), 40)
    baseline.drain()

    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 0, 2e-6)
    assert (theirs - 0.01).abs().max() > 0.05
    baseline.close()


def test_filled_baseline_goes_on_from_the_filled_moments(kind, tmp_path):
    theirs, ours = make_parameter(SHAPE), make_parameter(SHAPE)
    reference = torch.optim.SparseAdam([theirs], lr=0.01)
    baseline = kind(ours, tmp_path, lr=0.01)
    fill_state(theirs, reference)
    with torch.no_grad():
        theirs.fill_(0.01)
    for name in ("exp_avg", "exp_avg_sq"):
        reference.state[theirs][name].fill_(1e-6)
    baseline.fill()
    baseline.steps = reference.state[theirs]["step"]

    timed_steps(theirs, reference, Gradients(SHAPE), 5)
    timed_steps(ours, baseline, Gradients(SHAPE), 5)
    baseline.drain()

    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), 0, 2e-6)
    baseline.close()


def test_writer_that_fails_ends_the_training(tmp_path):
    parameter = make_parameter(SHAPE)
    baseline = MemmapFiles(parameter, tmp_path)
    baseline._files[2].flags.writeable = False

    timed_steps(parameter, baseline, Gradients(SHAPE), 1)
    with pytest.raises(ValueError, match="read-only"):
        baseline.drain()

    baseline.close()
