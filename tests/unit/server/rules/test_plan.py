"""The order of a batch: every answer is compared with numpy's sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from momentd_server.rules import Scratch, batch, plan
from momentd_wire.errors import InvalidArgument, RowOutOfRange


def check(rows, table_rows, scratch=None):
    rows = np.asarray(rows, np.int64)
    made = plan(rows, table_rows, scratch or Scratch())
    order = np.argsort(rows, kind="stable")
    unique, starts = np.unique(rows[order], return_index=True)
    np.testing.assert_array_equal(made.unique, unique)
    np.testing.assert_array_equal(made.order, order)
    np.testing.assert_array_equal(made.starts, [*starts, len(rows)])
    assert (made.sent, made.distinct) == (len(rows), len(unique))


@settings(deadline=None)
@given(st.data(), st.integers(1, 2**62))
def test_plan_equals_a_stable_sort(data, table_rows):
    rows = data.draw(st.lists(st.integers(0, table_rows - 1), max_size=60))
    check(rows, table_rows)


@pytest.mark.parametrize("count", [1, 255, 1_024, 1_025, 5_000, 70_000])
@pytest.mark.parametrize("table_rows", [1, 2, 300, 65_536, 10_000_000, 2**40, 2**62])
def test_plan_of_every_size_equals_a_stable_sort(count, table_rows):
    random = np.random.default_rng(count)
    check(random.integers(0, table_rows, count), table_rows)
    check(np.sort(random.integers(0, table_rows, count)), table_rows)
    check(np.unique(random.integers(0, table_rows, count)), table_rows)


def test_scratch_serves_batches_of_growing_and_shrinking_size():
    scratch = Scratch()
    random = np.random.default_rng(0)
    for count in (3, 5_000, 10, 0, 2_000, 5_001):
        check(random.integers(0, 1_000, count), 1_000, scratch)


def test_rows_that_ascend_strictly_are_not_sorted():
    scratch = Scratch()
    made = plan(np.array([2, 5, 9]), 10, scratch)
    assert np.shares_memory(made.unique, scratch.private)
    assert np.shares_memory(made.order, scratch.identity)


def test_plan_keeps_a_private_copy():
    rows = np.array([4, 1, 4])
    made = plan(rows, 5, Scratch())
    rows[:] = 99
    assert made.unique.tolist() == [1, 4]
    ascending = np.array([1, 2])
    made = plan(ascending, 5, Scratch())
    ascending[:] = 99
    assert made.unique.tolist() == [1, 2]


def test_rows_may_be_read_only():
    rows = np.frombuffer(np.array([3, 1, 3]).tobytes(), np.int64)
    assert plan(rows, 4, Scratch()).unique.tolist() == [1, 3]


@pytest.mark.parametrize("bad", [-1, 10, 2**62, -(2**63)])
def test_error_names_the_first_row_outside_and_its_position(bad):
    with pytest.raises(RowOutOfRange, match=rf"row id {bad} at position 2 .*\[0, 10\)") as caught:
        plan(np.array([9, 0, bad, 3, -7]), 10, Scratch())
    assert caught.value.details == {"row": str(bad), "position": "2", "rows": "10"}


def test_table_without_rows_takes_only_empty_batches():
    assert plan(np.empty(0, np.int64), 0, Scratch()).distinct == 0
    with pytest.raises(RowOutOfRange):
        plan(np.array([0]), 0, Scratch())


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros(3, np.int32),
        np.zeros((3, 1), np.int64),
        np.zeros(6, np.int64)[::2],
        np.frombuffer(bytes(25), np.uint8)[1:].view(np.int64),
        np.zeros(3, ">i8"),
    ],
    ids=["int32", "two-dimensional", "strided", "unaligned", "big-endian"],
)
def test_other_arrays_are_refused(rows):
    with pytest.raises(InvalidArgument, match="int64 vector"):
        plan(rows, 10, Scratch())


def test_ids_and_positions_beyond_one_word_are_sorted_as_well():
    scratch = Scratch()
    rows = np.array([2**62, 5, 2**62, 7] * 2)
    scratch.private[:8] = rows
    distinct = batch._arrange_wide(8, scratch)
    assert scratch.unique[:distinct].tolist() == [5, 7, 2**62]
    assert scratch.order[:8].tolist() == [1, 5, 3, 7, 0, 2, 4, 6]
    assert scratch.starts[: distinct + 1].tolist() == [0, 2, 4, 8]
