"""R26: state is not lost by copies of an optimizer or of its groups."""

import copy

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments, step_rows


def trained():
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    step_rows(optimizer, module.weight, [1], [1.0])
    return module, optimizer


def test_deepcopy_forks_the_table(backend):
    _, optimizer = trained()
    other = copy.deepcopy(optimizer)
    step_rows(other, other.param_groups[0]["params"][0], [1], [5.0])
    assert moments(optimizer)[0][1, 0].item() == pytest.approx(0.1)
    assert moments(other)[0][1, 0].item() == pytest.approx(0.59)
    assert backend.tables() == 2


def test_copied_groups_and_replaced_data_change_nothing(backend):
    module, optimizer = trained()
    module.weight.data = torch.zeros_like(module.weight)
    copy.deepcopy(optimizer.param_groups)
    assert moments(optimizer)[0][1, 0].item() == pytest.approx(0.1)
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_groups_put_in_place_of_the_old_are_an_error_that_says_what_to_do(backend):
    _, optimizer = trained()
    optimizer.param_groups = copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match=r"in no group.*state\.pop"):
        optimizer.state_dict()
