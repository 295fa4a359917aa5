"""Gradient clipping for sparse and dense gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from momentd._grads import is_sparse
from momentd.errors import InvalidArgument


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` that also takes sparse gradients.

    The norm is that of all gradients together as if they were one vector. Entries of a sparse
    gradient for the same row (or element) are summed before the norm is taken; the gradient itself
    keeps its entries, which are scaled in place.

    Args:
        parameters: A tensor or tensors; those without a gradient are ignored.
        max_norm: The largest norm that is left as it is.
        norm_type: p of the p-norm, > 0; `float("inf")` for the largest absolute value.
        error_if_nonfinite: Raise RuntimeError, changing nothing, if the norm is nan or inf.
        foreach: Accepted for torch's signature; has no effect.

    Returns:
        The total norm before clipping, on the first gradient's device.
    """
    del foreach
    grads = _gradients(parameters)
    total = _total_norm(grads, _check_norm_type(norm_type))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise InvalidArgument(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for grad in grads:
        values = _stored_values(grad)
        values.mul_(scale.to(values.device))
    return total


def _check_norm_type(norm_type: float) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise InvalidArgument(f"norm_type must be > 0 or inf, got {norm_type}")
    return norm_type


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    return [param.grad for param in parameters if param.grad is not None]


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    norms = [
        torch.linalg.vector_norm(_vector(grad), norm_type).to(device, _wide(grad.dtype))
        for grad in grads
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _vector(grad: Tensor) -> Tensor:
    """All stored elements of a gradient, each position once, 16-bit ones widened."""
    if not is_sparse(grad):
        values = grad
    elif grad.layout is torch.sparse_coo and not grad.is_coalesced():
        values = _summed_values(grad)
    else:
        values = _stored_values(grad)
    values = values.to(_wide(values.dtype))
    # The largest absolute value of nothing is not defined; of zeros it is 0.
    return values if values.numel() else values.new_zeros(1)


def _stored_values(grad: Tensor) -> Tensor:
    if not is_sparse(grad):
        return grad
    return grad._values() if grad.layout is torch.sparse_coo else grad.values()


def _summed_values(grad: Tensor) -> Tensor:
    """The values of an uncoalesced gradient with duplicates summed, in float32 or wider."""
    indices, values = grad._indices(), grad._values()
    values = values.to(_wide(values.dtype))
    if not indices.shape[0] or not indices.shape[1]:
        return values.sum(dim=0, keepdim=True)
    place = torch.zeros_like(indices[0])
    for dim in range(indices.shape[0]):
        place = place * grad.shape[dim] + indices[dim]
    distinct, slot = torch.unique(place, return_inverse=True)
    if distinct.numel() == place.numel():
        return values
    summed = values.new_zeros(distinct.numel(), math.prod(values.shape[1:]))
    return summed.index_add_(0, slot, values.reshape(place.numel(), -1))
