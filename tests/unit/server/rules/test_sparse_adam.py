"""The rule against a float64 loop, and what its bits may not depend on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from momentd_server import rules
from momentd_server.jit import Pool
from momentd_server.jit.row_protocol import USE_STEP
from momentd_server.rules import SparseAdamHyper
from momentd_server.schema import FieldSpec, Schema
from momentd_wire.errors import InvalidArgument, UnsupportedFeature
from tests.support.records import DIRTY, Memory, reference

HYPER = SparseAdamHyper(lr=0.01)
TOLERANCE = {"float32": {"rtol": 2e-5, "atol": 1e-7}, "float64": {"rtol": 1e-12, "atol": 1e-15}}
WIDTHS = [1, 2, 3, 7, 8, 9, 31, 64, 100, 128, 129, 513, 2048, 2050]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def three():
    pool = Pool(3)
    yield pool
    pool.close()


def random_batch(seed, *, rows, count, width, dtype):
    random = np.random.default_rng(seed)
    return random.integers(0, rows, count), random.standard_normal((count, width)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_equals_the_float64_loop(pool, width, dtype):
    memory = Memory.zeros(6, width, dtype)
    avg, sq = np.zeros((6, width)), np.zeros((6, width))
    for step in (1, 2, 3):
        rows, grads = random_batch(step, rows=6, count=9, width=width, dtype=dtype)
        unique, deltas = memory.update(pool, rows, grads, HYPER, step)
        expected = reference(avg, sq, rows, grads, HYPER, step)
        np.testing.assert_allclose(deltas, [expected[row] for row in unique], **TOLERANCE[dtype])
    np.testing.assert_allclose(memory.field(0), avg, **TOLERANCE[dtype])
    np.testing.assert_allclose(memory.field(1), sq, **TOLERANCE[dtype])


@st.composite
def updates(draw):
    width = draw(st.integers(1, 12))
    count = draw(st.integers(0, 12))
    rows = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    values = st.floats(-100, 100, width=32)
    grads = draw(st.lists(values, min_size=count * width, max_size=count * width))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(grads), max_size=len(grads)))
    hyper = SparseAdamHyper(
        lr=draw(st.floats(0, 1)), beta1=draw(st.floats(0, 0.99)),
        beta2=draw(st.floats(0, 0.9999)), eps=draw(st.floats(1e-10, 1)),
        maximize=draw(st.booleans()),
    )  # fmt: skip
    shape = (count, width)
    mask = None if mask is None else np.array(mask, np.uint8).reshape(shape)
    return np.array(rows, np.int64), np.array(grads).reshape(shape), mask, hyper


@settings(max_examples=60, deadline=None)
@given(updates(), st.integers(1, 100_000))
def test_any_update_equals_the_float64_loop(update, step):
    rows, grads, mask, hyper = update
    pool, memory = Pool(1), Memory.zeros(5, grads.shape[1], "float64")
    avg, sq = np.zeros((5, grads.shape[1])), np.zeros((5, grads.shape[1]))
    for later in range(2):
        unique, deltas = memory.update(pool, rows, grads, hyper, step + later, mask=mask)
        expected = reference(avg, sq, rows, grads, hyper, step + later, mask)
        wanted = np.array([expected[row] for row in unique]).reshape(deltas.shape)
        np.testing.assert_allclose(deltas, wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(memory.field(0), avg, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(memory.field(1), sq, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [1, 24, 129])
def test_bits_depend_neither_on_threads_nor_on_chunks(pool, three, masked, width, dtype):
    results = []
    for threads, chunk in ((pool, None), (three, None), (pool, 7), (three, 1_000)):
        memory = Memory.zeros(4_000, width, dtype)
        for step in (1, 2):
            rows, grads = random_batch(step, rows=4_000, count=6_000, width=width, dtype=dtype)
            mask = (grads > 0.3).astype(np.uint8) if masked else None
            _, deltas = memory.update(threads, rows, grads, HYPER, step, chunk=chunk, mask=mask)
        results.append((memory.space.tobytes(), deltas.tobytes()))
    assert results.count(results[0]) == len(results)


def test_large_batches_are_shared_between_threads(three):
    memory = Memory.zeros(9_000, 64, workers=3)
    rows, grads = random_batch(0, rows=9_000, count=9_000, width=64, dtype="float32")
    memory.update(three, rows, grads, HYPER, 1)
    assert (memory.progress[:, 1] == memory.progress[:, 3]).all()
    assert (np.diff(memory.progress[:, 2]) > 0).all()


def test_masked_with_all_elements_present_has_the_bits_of_dense(pool):
    dense, masked = Memory.zeros(50, 20), Memory.zeros(50, 20)
    for step in (1, 2, 3):
        rows, grads = random_batch(step, rows=50, count=80, width=20, dtype="float32")
        one = dense.update(pool, rows, grads, HYPER, step)[1]
        mask = np.full((80, 20), 255, np.uint8)
        other = masked.update(pool, rows, grads, HYPER, step, mask=mask)[1]
        assert one.tobytes() == other.tobytes()
    assert dense.space.tobytes() == masked.space.tobytes()


def test_absent_elements_keep_their_bits_even_next_to_nan(pool):
    memory = Memory.zeros(1, 4)
    memory.space.view(np.float32)[:] = np.array([1, 2, 3, np.nan] * 2)
    grads = np.array([[5, np.nan, 7, 8]], np.float32)
    mask = np.array([[1, 0, 0, 0]], np.uint8)
    before = memory.space.view(np.uint32).copy()
    _, deltas = memory.update(pool, [0], grads, HYPER, 1, mask=mask)
    changed = np.flatnonzero(memory.space.view(np.uint32) != before)
    assert changed.tolist() == [0, 4]
    assert deltas[0, 1:].tolist() == [0, 0, 0]
    assert deltas[0, 0] < 0


def test_duplicates_are_summed_in_order_of_position(pool):
    big = np.float32(2**24)
    orders = {"late": [big, -big, 1.0], "early": [1.0, big, -big]}
    averages = {}
    for name, values in orders.items():
        memory = Memory.zeros(1, 1)
        memory.update(pool, [0, 0, 0], np.array(values, np.float32)[:, None], HYPER, 1)
        averages[name] = memory.field(0)[0, 0]
    assert averages["late"] == np.float32(1 - 0.9)
    assert averages["early"] == 0


def test_value_is_weight_plus_delta_in_the_state_dtype(pool):
    one, other = Memory.zeros(8, 5), Memory.zeros(8, 5)
    rows, grads = random_batch(1, rows=8, count=12, width=5, dtype="float32")
    weight = np.random.default_rng(2).standard_normal((8, 5)).astype(np.float32)
    unique, deltas = one.update(pool, rows, grads, HYPER, 1)
    _, values = other.update(pool, rows, grads, HYPER, 1, weights=weight[rows], result="value")
    assert values.tobytes() == (weight[unique] + deltas).tobytes()


def test_result_none_advances_the_moments_and_writes_nothing(pool):
    one, other = Memory.zeros(8, 5), Memory.zeros(8, 5)
    rows, grads = random_batch(1, rows=8, count=12, width=5, dtype="float32")
    one.update(pool, rows, grads, HYPER, 1)
    _, out = other.update(pool, rows, grads, HYPER, 1, result="none")
    assert np.isnan(out).all()
    assert one.space.tobytes() == other.space.tobytes()


def test_factors_are_one(pool):
    memory, factors = Memory.zeros(8, 5), np.zeros(8, np.float32)
    rows, grads = random_batch(1, rows=8, count=12, width=5, dtype="float32")
    unique, _ = memory.update(pool, rows, grads, HYPER, 1, out_factors=factors)
    assert factors.tolist() == [1.0] * len(unique) + [0.0] * (8 - len(unique))


def test_inputs_may_be_read_only(pool):
    writeable, frozen = Memory.zeros(8, 5), Memory.zeros(8, 5)
    rows, grads = random_batch(1, rows=8, count=12, width=5, dtype="float32")
    _, expected = writeable.update(pool, rows, grads, HYPER, 1)
    signatures = len(rules.sparse_adam.kernels.apply_dense.signatures)
    grads.flags.writeable = False
    _, deltas = frozen.update(pool, rows, grads, HYPER, 1)
    assert deltas.tobytes() == expected.tobytes()
    assert len(rules.sparse_adam.kernels.apply_dense.signatures) == signatures


def test_maximize_mirrors_the_step(pool):
    up, down = Memory.zeros(8, 5), Memory.zeros(8, 5)
    rows, grads = random_batch(1, rows=8, count=12, width=5, dtype="float32")
    _, rise = up.update(pool, rows, grads, SparseAdamHyper(0.01, maximize=True), 1)
    _, fall = down.update(pool, rows, grads, HYPER, 1)
    np.testing.assert_array_equal(rise, -fall)


def test_lr_of_zero_moves_moments_only(pool):
    memory = Memory.zeros(1, 2)
    _, deltas = memory.update(pool, [0], np.ones((1, 2), np.float32), SparseAdamHyper(0.0), 1)
    assert not deltas.any()
    np.testing.assert_allclose(memory.field(0), 0.1, rtol=1e-6)


def test_eps_is_added_before_the_bias_correction(pool):
    memory, eps = Memory.zeros(1, 1, "float64"), 0.5
    hyper = SparseAdamHyper(1.0, 0.9, 0.999, eps)
    _, deltas = memory.update(pool, [0], np.array([[2.0]]), hyper, 1)
    root = math.sqrt(0.001 * 4)
    expected = -math.sqrt(1 - 0.999) / (1 - 0.9) * 0.2 / (root + eps)
    assert deltas[0, 0] == pytest.approx(expected, rel=1e-12)


def test_touched_frames_are_marked_and_no_other(pool):
    memory = Memory.zeros(10, 3)
    memory.update(pool, [7, 2, 7], np.ones((3, 3), np.float32), HYPER, 5)
    marked = np.flatnonzero(memory.words)
    assert sorted(marked) == sorted(memory.frame_of[[2, 7]])
    assert set(memory.words[marked].tolist()) == {5 << 8 | USE_STEP | DIRTY}


@pytest.mark.parametrize(
    ("argument", "value"),
    [("lr", -1e-9), ("lr", math.nan), ("lr", math.inf), ("beta1", 1.0), ("beta1", -0.1),
     ("beta2", 1.0), ("beta2", math.nan), ("eps", -1.0), ("eps", math.nan)],
)  # fmt: skip
def test_hyper_parameters_out_of_range_are_refused(argument, value):
    with pytest.raises(InvalidArgument, match=argument):
        SparseAdamHyper(**{"lr": 0.1, argument: value})


def test_schema_must_have_the_fields_of_the_rule():
    rule = rules.get("sparse_adam")
    good = rule.field_specs(4, "float32")
    rule.check_schema(Schema(5, 4, good, rule.name))
    for width, fields in (
        (3, good),
        (4, good[::-1]),
        (4, good[:1]),
        (4, (good[0], FieldSpec("exp_avg_sq", "float64", 4))),
        (0, rule.field_specs(0, "float32")),
    ):
        with pytest.raises(InvalidArgument, match="needs the fields"):
            rule.check_schema(Schema(5, width, fields, rule.name))
    with pytest.raises(UnsupportedFeature, match="float16"):
        rule.check_schema(Schema(5, 4, rule.field_specs(4, "float16"), rule.name))


def test_unknown_rule_names_the_known_ones():
    with pytest.raises(UnsupportedFeature, match=r"'adamax'.*sparse_adam"):
        rules.get("adamax")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": np.zeros((2, 3), np.float32)}, "grads must be float32 of shape"),
        ({"grads": np.zeros((2, 4))}, "not float64"),
        ({"grads": np.zeros((4, 2), np.float32).T}, "C-contiguous"),
        ({"mask": np.zeros((2, 3), np.uint8)}, "mask"),
        ({"result": "value"}, "weight"),
        ({"result": "value", "weights": np.zeros((1, 4), np.float32)}, "weights"),
        ({"out_values": None}, "a place"),
        ({"out_values": np.zeros((1, 4), np.float32)}, "out_values"),
        ({"out_values": np.frombuffer(bytes(32), np.float32).reshape(2, 4)}, "writeable"),
        ({"out_factors": np.zeros(1, np.float32)}, "out_factors"),
    ],
)
def test_batches_of_another_shape_are_refused(change, message):
    rule = rules.get("sparse_adam")
    schema = Schema(5, 4, rule.field_specs(4, "float32"), rule.name)
    plan = rules.plan(np.array([3, 1]), 5, rules.Scratch())
    good = {"grads": np.zeros((2, 4), np.float32), "out_values": np.zeros((3, 4), np.float32)}
    rule.check_batch(schema, rules.Batch(plan, **good), HYPER, 1)
    with pytest.raises(InvalidArgument, match=message):
        rule.check_batch(schema, rules.Batch(plan, **(good | change)), HYPER, 1)


def test_steps_count_from_one():
    rule = rules.get("sparse_adam")
    schema = Schema(5, 4, rule.field_specs(4, "float32"), rule.name)
    plan = rules.plan(np.array([3]), 5, rules.Scratch())
    batch = rules.Batch(plan, np.zeros((1, 4), np.float32), result="none")
    with pytest.raises(InvalidArgument, match="from 1"):
        rule.check_batch(schema, batch, HYPER, 0)
    with pytest.raises(InvalidArgument, match="hyper-parameters"):
        rule.check_batch(schema, batch, object(), 1)
