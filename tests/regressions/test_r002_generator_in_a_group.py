"""R2: so is a generator inside a group."""

import momentd
from tests.support.optim import embedding


def test_generators_in_groups_construct(fake):
    one, two = embedding(seed=1), embedding(seed=2)
    optimizer = momentd.SparseAdam(
        [{"params": one.parameters(), "lr": 0.1}, {"params": two.parameters()}]
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3]
    optimizer.add_param_group({"params": embedding(seed=3).parameters()})
    assert len(optimizer.param_groups[2]["params"]) == 1
