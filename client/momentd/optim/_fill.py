"""Gradients into the memory that the daemon reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from momentd._grads import RowGrad
from momentd._stream import UpdateInput


def fill(inputs: Sequence[UpdateInput], grads: Sequence[RowGrad]) -> None:
    """Copy rows, values and masks, cast to the state's dtype. Returns when the bytes are there."""
    for target, grad in zip(inputs, grads, strict=True):
        torch.from_numpy(target.rows).copy_(grad.rows)
        torch.from_numpy(target.grads).copy_(grad.values)
        if target.mask is not None and grad.mask is not None:
            torch.from_numpy(target.mask).copy_(grad.mask)
