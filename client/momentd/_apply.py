"""Deltas into weights."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from momentd import _cuda
from momentd._threads import SingleThreaded

# Waking a second thread costs about 0.1 ms: what it takes to add so many elements.
_WORTH_THREADS = 1 << 17


def add_rows(weight: Tensor, rows: np.ndarray, values: np.ndarray) -> None:
    """weight[rows] += values, rounded once.

    rows: distinct int64 (m,), in [0, weight.shape[0]). values: (m, width) of the state's dtype.
    `weight` has any strides, is on the CPU or a CUDA device, and may be narrower than the values:
    the sum is made in the values' dtype. One call either happens or not: nothing in it runs Python
    code that a signal could leave half done.
    """
    if not rows.size:
        return
    if weight.is_cuda:
        # The arrays must stay as they are until `_cuda.drain`.
        ids, deltas = (_cuda.upload(array, weight.device) for array in (rows, values))
    else:
        ids, deltas = (torch.from_numpy(array).to(weight.device) for array in (rows, values))
    if not weight.dim():
        weight.copy_(weight.to(deltas.dtype) + deltas.reshape(()))
        return
    deltas = deltas.reshape(rows.size, *weight.shape[1:])
    if weight.dtype == deltas.dtype:
        with SingleThreaded() if deltas.numel() < _WORTH_THREADS else nullcontext():
            weight.index_add_(0, ids, deltas)
    else:
        # fp16 and bf16: the delta is wider than the weight, and is rounded with the sum.
        weight.index_copy_(0, ids, (weight.index_select(0, ids) + deltas).to(weight.dtype))
