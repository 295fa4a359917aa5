import math

import numpy as np
import pytest

from momentd import rules
from momentd_wire.errors import InvalidArgument, UnsupportedFeature
from momentd_wire.v1 import momentd_pb2 as pb


@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", pb.D_TYPE_FLOAT32), (np.float64, pb.D_TYPE_FLOAT64)]
)
def test_sparse_adam_has_two_moments_of_the_rows_width(dtype, wire):
    schema = rules.SparseAdam().schema(10, 3, dtype)
    assert (schema.rows, schema.width, schema.rule) == (10, 3, "sparse_adam")
    assert [(f.name, f.width, f.dtype, f.initial) for f in schema.fields] == [
        ("exp_avg", 3, wire, 0.0),
        ("exp_avg_sq", 3, wire, 0.0),
    ]


@pytest.mark.parametrize(("rows", "dim", "dtype"), [(-1, 3, "f4"), (1, 0, "f4"), (1, 1, "f2")])
def test_impossible_tables_are_refused(rows, dim, dtype):
    with pytest.raises(InvalidArgument):
        rules.SparseAdam().schema(rows, dim, dtype)


def test_hyper_parameters_have_torchs_defaults():
    hyper = rules.SparseAdam.hyper()
    assert (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.maximize) == (
        1e-3, 0.9, 0.999, 1e-8, False,
    )  # fmt: skip


def test_a_learning_rate_of_zero_is_allowed():
    assert rules.SparseAdam.hyper(lr=0).lr == 0


@pytest.mark.parametrize(
    ("hyper", "name"),
    [
        ({"lr": math.nan}, "lr"),
        ({"lr": -1}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"eps": 0}, "eps"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"betas": (0.9, math.nan)}, r"betas\[1\]"),
    ],
)
def test_a_bad_hyper_parameter_is_named(hyper, name):
    with pytest.raises(InvalidArgument, match=name):
        rules.SparseAdam.hyper(**hyper)


def test_an_unknown_rule_names_those_that_are_known():
    with pytest.raises(UnsupportedFeature, match="sparse_adam"):
        rules.by_name("adamw")
