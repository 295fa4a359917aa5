"""What one `step()` is going to do, checked in full before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentd._grads import RowGrad, is_sparse, split
from momentd.errors import InvalidArgument

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One parameter of a step: its gradient's rows and its group's hyper-parameters."""

    param: Tensor
    grad: RowGrad
    group: Group
    place: Place


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in an optimizer, and what it is called."""

    group: int
    index: int
    name: str | None

    def __str__(self) -> str:
        at = f"group {self.group}, index {self.index}"
        return f"{self.name!r} ({at})" if self.name else f"at {at}"

    @property
    def label(self) -> str:
        return self.name or f"{self.group}.{self.index}"


def places(groups: list[Group]) -> Iterator[tuple[Place, Group, Tensor]]:
    """All parameters in order."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            yield Place(number, index, names[index] if names else None), group, param


def plan(groups: list[Group], state_dtype: torch.dtype | None, optimizer: str) -> list[Work]:
    """The work of a step: every parameter that has a gradient.

    Raises InvalidArgument (a RuntimeError and a ValueError) for a gradient that is not sparse or a
    parameter that stands in its group twice. Reads gradients, changes nothing.
    """
    work: list[Work] = []
    seen: set[int] = set()
    for place, group, param in places(groups):
        grad = param.grad
        if grad is None:
            continue
        if not is_sparse(grad):
            raise dense_gradient(optimizer, place, param)
        if id(param) in seen:
            raise InvalidArgument(
                f"parameter {place} stands in the optimizer twice; give each parameter once"
            )
        seen.add(id(param))
        rows = split(grad, state_dtype or state_dtype_of(param))
        work.append(Work(param, rows, group, place))
    return work


def state_dtype_of(param: Tensor) -> torch.dtype:
    """float64 for float64 parameters, else float32: 16-bit moments lose small updates."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def dense_gradient(optimizer: str, place: Place, param: Tensor) -> InvalidArgument:
    """torch's sentence first, then which parameter, why, and what to do."""
    return InvalidArgument(
        f"{optimizer} does not support dense gradients, please consider Adam instead: parameter "
        f"{place} of shape {tuple(param.shape)} got a dense gradient. Nothing was updated. "
        "Make its nn.Embedding or nn.EmbeddingBag with sparse=True, or give the parameter to a "
        "second, dense optimizer. If it is a sparse embedding, its weight is also used outside "
        "the lookup (tied output weights, or a penalty such as weight.norm() on the full table), "
        "which makes the whole gradient dense: compute that on the looked-up rows only.",
        group=place.group,
        index=place.index,
        shape=tuple(param.shape),
    )


def is_state_request(groups: list[Group]) -> bool:
    """Whether this step only asks for state to exist.

    torch.distributed.checkpoint makes the state of an optimizer that has none by a step with
    lr = 0 and dense zeros as the gradient of every parameter. There is nothing in it to apply.
    """
    if any(float(group["lr"]) != 0 for group in groups):
        return False
    grads = [param.grad for _, _, param in places(groups) if param.requires_grad]
    return bool(grads) and all(
        grad is not None and grad.layout is torch.strided and not bool(grad.any()) for grad in grads
    )
