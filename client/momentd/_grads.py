"""Sparse gradients as what an update needs: row ids, one row of values each, and maybe a mask.

A table has `shape[0]` rows of `prod(shape[1:])` elements; a parameter without dimensions is one row
of one element. Nothing here coalesces: the daemon sums a row's duplicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Sparse layouts other than COO; torch converts them without summing anything.
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


@dataclass(frozen=True, slots=True)
class RowGrad:
    """The gradient of one table.

    rows: int64 (n,), any order, duplicates allowed. values: (n, width), floating. mask: uint8
    (n, width), 1 where the gradient has an element; None: everywhere. Views of the gradient where
    that is possible; on its device.
    """

    rows: Tensor
    values: Tensor
    mask: Tensor | None

    @property
    def count(self) -> int:
        """Rows to send: 0 for an empty gradient or a parameter without elements."""
        return self.rows.numel() if self.values.numel() else 0


def table_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, width) of the table of a parameter of this shape."""
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def is_sparse(grad: Tensor) -> bool:
    """Whether a gradient has one of torch's sparse layouts."""
    return grad.layout is torch.sparse_coo or grad.layout in _COMPRESSED


def split(grad: Tensor, state_dtype: torch.dtype) -> RowGrad:
    """Row ids, values and mask of a sparse gradient.

    `state_dtype` is the type in which duplicate elements of an element-sparse gradient are summed.
    """
    if grad.layout in _COMPRESSED:
        grad = grad.to_sparse_coo()
    sparse_dims = grad.sparse_dim()
    indices, values = grad._indices(), grad._values()
    if sparse_dims == 1:
        return RowGrad(indices[0], values.reshape(values.shape[0], _width(grad.shape)), None)
    if sparse_dims == 0:
        return _split_whole(grad.shape, values)
    return _split_elements(grad.shape, indices, values, state_dtype)


def _width(shape: torch.Size) -> int:
    return table_shape(shape)[1]


def _split_whole(shape: torch.Size, values: Tensor) -> RowGrad:
    """No sparse dimension: each entry is a gradient of the whole parameter."""
    rows, width = table_shape(shape)
    ids = torch.arange(rows, device=values.device).repeat(values.shape[0])
    return RowGrad(ids, values.reshape(values.shape[0] * rows, width), None)


def _split_elements(
    shape: torch.Size, indices: Tensor, values: Tensor, state_dtype: torch.dtype
) -> RowGrad:
    """Two or more sparse dimensions: entries are blocks within rows.

    Entries of one row are laid side by side, and duplicates of a block are summed here, in the
    order in which they stand (the CPU kernel of index_add_ is sequential, CUDA's is not).
    """
    device = values.device
    indices, values = indices.cpu(), values.cpu()
    sparse_dims = indices.shape[0]
    block = math.prod(shape[sparse_dims:])
    blocks = math.prod(shape[1:sparse_dims])
    column = torch.zeros_like(indices[0])
    for dim in range(1, sparse_dims):
        column = column * shape[dim] + indices[dim]
    rows, place = torch.unique(indices[0], return_inverse=True)
    where = place * blocks + column
    summed = torch.zeros(rows.numel() * blocks, block, dtype=state_dtype)
    summed.index_add_(0, where, values.reshape(where.numel(), block).to(state_dtype))
    present = torch.zeros(rows.numel() * blocks, dtype=torch.uint8)
    present[where] = 1
    mask: Tensor | None = None
    if not bool(present.all()):
        mask = present[:, None].expand(-1, block).reshape(rows.numel(), blocks * block).to(device)
    return RowGrad(rows.to(device), summed.reshape(rows.numel(), blocks * block).to(device), mask)
