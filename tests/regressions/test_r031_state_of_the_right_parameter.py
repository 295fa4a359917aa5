"""R31: a parameter without state shifts nobody; another order of names is refused."""

import copy

import pytest
from torch import nn

import momentd
from tests.support.optim import embedding, sparse_grad


def model_and_optimizer(order=("a", "b", "c")):
    model = nn.ModuleDict({name: embedding(seed=ord(name)) for name in "abc"})
    named = [(f"{name}.weight", model[name].weight) for name in order]
    return model, momentd.SparseAdam(named)


def test_the_middle_one_without_state(backend):
    model, optimizer = model_and_optimizer()
    for name, value in (("a", 1.0), ("c", 3.0)):
        sparse_grad(model[name].weight, [1], [value])
    optimizer.step()
    _, other = model_and_optimizer()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = other.full_state_dict()["state"]
    got = {key: entry["exp_avg"][1, 0].item() for key, entry in state.items()}
    assert got == pytest.approx({0: 0.1, 2: 0.3})


def test_a_permutation_is_refused_with_both_orders(backend):
    _, optimizer = model_and_optimizer()
    _, other = model_and_optimizer("bac")
    with pytest.raises(ValueError, match=r"'a.weight', 'b.weight'.*'b.weight', 'a.weight'"):
        other.load_state_dict(optimizer.state_dict())
