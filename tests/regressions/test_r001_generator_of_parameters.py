"""R1: a generator of parameters is read once, before any check."""

import pytest

import momentd
from tests.support.optim import embedding


def test_generators_and_iterators_construct(fake):
    module = embedding(5, 2)
    for params in (module.parameters(), iter([module.weight])):
        optimizer = momentd.SparseAdam(params)
        assert len(optimizer.param_groups[0]["params"]) == 1


def test_empty_ones_are_value_errors_and_reach_no_daemon(fake):
    for params in ([], (param for param in [])):
        with pytest.raises(ValueError, match="empty parameter list"):
            momentd.SparseAdam(params)
    assert fake.log == []
