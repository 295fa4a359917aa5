"""Gradients into the memory that the daemon reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from momentd import _cuda
from momentd._grads import RowGrad
from momentd._stream import UpdateInput


def fill(inputs: Sequence[UpdateInput], grads: Sequence[RowGrad]) -> None:
    """Copy rows, values and masks, cast to the state's dtype. Returns when the bytes are there."""
    for target, grad in zip(inputs, grads, strict=True):
        _copy(grad.rows, target.rows)
        _copy(grad.values, target.grads)
        if target.mask is not None and grad.mask is not None:
            _copy(grad.mask, target.mask)
    _cuda.drain()


def _copy(source: Tensor, target: np.ndarray) -> None:
    if source.is_cuda:
        _cuda.download(source, torch.from_numpy(target))
    else:
        torch.from_numpy(target).copy_(source)
