"""R55: parameters are never hashed or compared by what a subclass says."""

import copy

import pytest
import torch
from torch import nn

import momentd
from tests.support.optim import embedding, moments, step_rows


class Unhashable(nn.Parameter):
    def __hash__(self):
        raise TypeError("not hashable")


def made():
    return Unhashable(embedding().weight.detach().clone())


def test_construct_step_save_load_and_copy(backend):
    param, plain = made(), nn.Parameter(embedding().weight.detach().clone())
    ours, theirs = momentd.SparseAdam([param], lr=0.1), torch.optim.SparseAdam([plain], lr=0.1)
    for each, optimizer in ((param, ours), (plain, theirs)):
        step_rows(optimizer, each, [1, 3], [1.0, 2.0])
    torch.testing.assert_close(param.detach().as_subclass(torch.Tensor), plain.detach())
    other = momentd.SparseAdam([made()], lr=0.1)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert torch.equal(moments(other)[0], theirs.state[plain]["exp_avg"])
    assert ours.param_groups[0]["params"][0] is param


def test_they_stand_beside_others_and_are_still_told_apart(fake):
    one, two = made(), made()
    optimizer = momentd.SparseAdam([one, embedding().weight])
    optimizer.add_param_group({"params": two})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": one})
    with pytest.warns(UserWarning, match="duplicate"):
        momentd.SparseAdam([one, one])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def test_named_ones(fake):
    param = made()
    optimizer = momentd.SparseAdam([("table", param)])
    assert optimizer.param_groups[0]["params"][0] is param
    assert optimizer.param_groups[0]["param_names"] == ["table"]
