"""What can be constructed, and what torch's texts say about what cannot."""

import math

import pytest
import torch
from torch import nn

import momentd
from momentd.errors import UnsupportedFeature
from tests.support.optim import embedding

PARAM = torch.nn.Parameter


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"lr": -1e-2}, "Invalid learning rate: -0.01"),
        ({"lr": 0.0}, "Invalid learning rate: 0.0"),
        ({"lr": math.nan}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element"),
        ({"eps": 0.0}, "Invalid epsilon value: 0.0"),
        ({"betas": (1.0, 0.999)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"checkpoint": "half"}, "checkpoint must be 'snapshot' or 'full', got 'half'"),
    ],
)
def test_bad_hyper_parameters_are_value_errors_in_torchs_words(fake, kwargs, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")) as caught:
        momentd.SparseAdam(embedding().parameters(), **kwargs)
    if not {"checkpoint"} & set(kwargs):
        with pytest.raises(ValueError, match=r"Invalid|Tensor lr") as theirs:
            torch.optim.SparseAdam(embedding().parameters(), **kwargs)
        assert str(caught.value) == str(theirs.value)


@pytest.mark.parametrize("kind", ["weight_decay", "amsgrad", "foreach", "fused"])
def test_arguments_that_torch_does_not_have_are_type_errors(kind):
    with pytest.raises(TypeError, match=kind):
        momentd.SparseAdam(embedding().parameters(), **{kind: 1})


@pytest.mark.parametrize(
    "kwargs", [{"keep_snapshots": 0}, {"checkpoint": "full", "keep_snapshots": 3}]
)
def test_numbers_of_snapshots_that_mean_nothing_are_refused(kwargs):
    with pytest.raises(ValueError, match=r"keep_snapshots=[03] with"):
        momentd.SparseAdam(embedding().parameters(), **kwargs)


def test_a_state_dtype_that_no_rule_has_is_refused():
    with pytest.raises(UnsupportedFeature, match=r"state_dtype=torch\.bfloat16"):
        momentd.SparseAdam(embedding().parameters(), state_dtype=torch.bfloat16)


def test_construction_reaches_no_daemon(fake):
    fake.down = True
    optimizer = momentd.SparseAdam(embedding().parameters())
    assert fake.log == []
    assert "not connected" in repr(optimizer)


def test_sparse_and_complex_parameters_are_refused_by_index(fake):
    sparse = torch.zeros(3, 2).to_sparse().requires_grad_()
    for params in ([PARAM(torch.zeros(2)), sparse], [{"params": [PARAM(torch.zeros(2)), sparse]}]):
        with pytest.raises(ValueError, match=r"Sparse params at indices \[\[0, 1\]\]"):
            momentd.SparseAdam(params)
    with pytest.raises(ValueError, match=r"Complex params at indices \[\[0, 0\]\]"):
        momentd.SparseAdam([PARAM(torch.zeros(2, dtype=torch.complex64))])
    assert fake.log == []


def test_a_dtype_without_state_dtype_is_refused():
    with pytest.raises(ValueError, match="float8"):
        momentd.SparseAdam([torch.zeros(2, dtype=torch.float8_e5m2)])


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (torch.zeros(2), TypeError, "should be an iterable of Tensors or dicts"),
        ([], ValueError, "empty parameter list"),
        ((x for x in ()), ValueError, "empty parameter list"),
        ([1], TypeError, "can only optimize Tensors"),
        ([{"params": {torch.zeros(2)}}], TypeError, "ordered collections"),
    ],
)
def test_torchs_own_checks_of_parameters(params, error, text):
    with pytest.raises(error, match=text):
        momentd.SparseAdam(params)


def test_a_parameter_in_two_groups_is_refused_and_the_group_not_added():
    one, two = embedding(seed=1).weight, embedding(seed=2).weight
    optimizer = momentd.SparseAdam([one])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [two, one]})
    assert len(optimizer.param_groups) == 1


def test_a_duplicate_in_one_group_warns_and_is_refused_at_step(fake):
    param = embedding().weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = momentd.SparseAdam([param, param])
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (10, 4))
    with pytest.raises(ValueError, match="twice"):
        optimizer.step()
    assert fake.updates == 0


def test_add_param_group_refuses_what_the_constructor_refuses():
    optimizer = momentd.SparseAdam(embedding().parameters())
    with pytest.raises(ValueError, match=r"Sparse params at indices \[\[1, 0\]\]"):
        optimizer.add_param_group({"params": torch.zeros(3, 2).to_sparse()})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([torch.zeros(2)])
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [("name", PARAM(torch.zeros(2)))]})
    assert len(optimizer.param_groups) == 1


def test_named_parameters_name_tables_and_groups(fake):
    model = nn.ModuleDict({"user": embedding(seed=1), "item": embedding(seed=2)})
    optimizer = momentd.SparseAdam(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["user.weight", "item.weight"]
    for param in model.parameters():
        param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (10, 4))
    optimizer.step()
    assert [table.label for table in fake.tables.values()] == ["user.weight", "item.weight"]


def test_groups_hold_nothing_that_belongs_to_the_machine():
    optimizer = momentd.SparseAdam(
        embedding().parameters(), address="unix:/tmp/a", run="mine", state_dtype=torch.float64
    )
    assert set(optimizer.defaults) == {"lr", "betas", "eps", "maximize"}
    assert set(optimizer.param_groups[0]) == {"params", "lr", "betas", "eps", "maximize"}
    assert "mine" in repr(optimizer)


def test_unknown_group_keys_are_carried():
    optimizer = momentd.SparseAdam([{"params": embedding().weight, "weight_decay": 0.1}])
    assert optimizer.state_dict()["param_groups"][0]["weight_decay"] == 0.1
