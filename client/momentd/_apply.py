"""Deltas into weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def add_rows(weight: Tensor, rows: np.ndarray, values: np.ndarray) -> None:
    """weight[rows] += values, rounded once.

    rows: distinct int64 (m,), in [0, weight.shape[0]). values: (m, width) of the state's dtype.
    `weight` has any strides, is on the CPU or a CUDA device, and may be narrower than the values:
    the sum is made in the values' dtype. One call either happens or not: nothing in it runs Python
    code that a signal could leave half done.
    """
    if not rows.size:
        return
    ids, deltas = torch.from_numpy(rows), torch.from_numpy(values)
    if weight.device.type != "cpu":
        ids, deltas = ids.to(weight.device), deltas.to(weight.device)
    if not weight.dim():
        weight.copy_(weight.to(deltas.dtype) + deltas.reshape(()))
        return
    deltas = deltas.reshape(rows.size, *weight.shape[1:])
    if weight.dtype == deltas.dtype:
        weight.index_add_(0, ids, deltas)
    else:
        # fp16 and bf16: the delta is wider than the weight, and is rounded with the sum.
        weight.index_copy_(0, ids, (weight.index_select(0, ids) + deltas).to(weight.dtype))
