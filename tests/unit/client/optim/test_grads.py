"""Sparse gradients of every layout become rows, values and a mask."""

import pytest
import torch

from momentd._grads import split, table_shape


def dense(shape, rows):
    """The dense gradient that a RowGrad stands for, duplicates summed."""
    out = torch.zeros(table_shape(torch.Size(shape)), dtype=rows.values.dtype)
    values = rows.values if rows.mask is None else rows.values * rows.mask
    return out.index_add_(0, rows.rows, values).reshape(shape)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2), (1, 7), (4, 1)])
@pytest.mark.parametrize("sparse_dims", [0, 1, 2, 3])
def test_every_number_of_sparse_dimensions(shape, sparse_dims):
    if sparse_dims > len(shape):
        pytest.skip("more sparse dimensions than dimensions")
    grad = torch.randn(shape)
    grad[0] = 0
    if sparse_dims:
        sparse = grad.to_sparse(sparse_dims)
    else:
        sparse = torch.sparse_coo_tensor(torch.empty(0, 1), grad[None], shape)
    rows = split(sparse, torch.float32)
    assert torch.equal(dense(shape, rows), grad)
    assert rows.rows.dtype == torch.int64
    assert rows.values.shape == (rows.count, table_shape(grad.shape)[1])


def test_rows_of_an_embedding_gradient_are_views():
    values = torch.randn(3, 4)
    grad = torch.sparse_coo_tensor([[7, 2, 7]], values, (9, 4))
    rows = split(grad, torch.float32)
    assert rows.rows.tolist() == [7, 2, 7]
    assert rows.values.data_ptr() == grad._values().data_ptr()
    assert rows.mask is None


def test_element_sparse_duplicates_are_summed_in_order_in_the_states_dtype():
    indices = [[1, 1, 1, 0], [2, 2, 0, 1]]
    values = torch.tensor([60000.0, 60000.0, 3.0, 5.0], dtype=torch.float16)
    grad = torch.sparse_coo_tensor(indices, values, (3, 4))
    rows = split(grad, torch.float32)
    assert rows.rows.tolist() == [0, 1]
    assert rows.values.tolist() == [[0, 5, 0, 0], [3, 0, 120000, 0]]
    assert rows.mask is not None
    assert rows.mask.tolist() == [[0, 1, 0, 0], [1, 0, 1, 0]]


def test_stored_zeros_are_present():
    grad = torch.sparse_coo_tensor([[1, 1], [0, 2]], [0.0, 0.0], (3, 4))
    rows = split(grad, torch.float32)
    assert rows.mask is not None
    assert rows.mask.tolist() == [[1, 0, 1, 0]]


def test_a_full_element_sparse_gradient_needs_no_mask():
    assert split(torch.ones(3, 4).to_sparse(), torch.float32).mask is None


def test_blocks_of_a_hybrid_gradient_are_masked_whole():
    grad = torch.sparse_coo_tensor([[2], [1]], torch.tensor([[5.0, 0.0]]), (3, 2, 2))
    rows = split(grad, torch.float32)
    assert rows.mask is not None
    assert rows.mask.tolist() == [[0, 0, 1, 1]]
    assert rows.values.tolist() == [[0, 0, 5, 0]]


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_layouts(layout):
    grad = torch.tensor([[0.0, 1, 0], [2, 0, 3]])
    rows = split(grad.to_sparse(layout=layout), torch.float32)
    assert torch.equal(dense((2, 3), rows), grad)


@pytest.mark.parametrize(
    ("shape", "values"),
    [((5, 1), (0, 1)), ((5, 0), (2, 0)), ((0, 3), (0, 3)), ((5,), (0,))],
)
def test_empty_gradients_send_nothing(shape, values):
    ids = torch.zeros(1, values[0], dtype=torch.int64)
    grad = torch.sparse_coo_tensor(ids, torch.zeros(values), shape)
    assert split(grad, torch.float32).count == 0


def test_an_empty_element_sparse_gradient_sends_nothing():
    assert split(torch.zeros(3, 4).to_sparse(), torch.float32).count == 0


def test_a_gradient_without_dimensions_is_one_row():
    rows = split(torch.tensor(3.0).to_sparse(), torch.float32)
    assert (rows.rows.tolist(), rows.values.tolist()) == ([0], [[3.0]])


def test_values_that_are_not_contiguous():
    values = torch.randn(4, 6).t()[:3]
    rows = split(torch.sparse_coo_tensor([[0, 2, 1]], values, (5, 4)), torch.float32)
    assert torch.equal(rows.values, values)
