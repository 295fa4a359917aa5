"""SparseAdam: `torch.optim.SparseAdam` with its moments in a daemon."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from momentd import rules
from momentd.errors import InvalidArgument
from momentd.optim._options import Options
from momentd.optim.base import TableOptimizer


class SparseAdam(TableOptimizer):
    """`torch.optim.SparseAdam` whose `exp_avg` and `exp_avg_sq` are rows in a momentd daemon.

    Same arguments, same semantics: only rows (or elements) that a gradient has are updated, stored
    zeros count as present, `step` is one counter for each parameter, `eps` is added before bias
    correction. Construction connects to nothing; the first step with a gradient finds a daemon or
    starts one.

    Args:
        params: Parameters, named parameters, or groups of them; dense tensors of any shape.
        lr: Learning rate, > 0; a tensor of one element is read at every step. A scheduler may set
            0 later: moments move, weights do not.
        betas: Coefficients of the running averages of the gradient and its square.
        eps: Added to the denominator.
        maximize: Ascend instead.
        address: Of the daemon; default: see `momentd.init`.
        run: A label for people; default: the name of the script or notebook.
        state_dtype: Of the moments; default: float64 for float64 parameters, else float32.
        checkpoint: "snapshot": `state_dict()` has a small handle, and the moments stay in the
            daemon's data directory, as a snapshot that takes what changed since the last one.
            "full": `state_dict()` has the complete moments. Either kind loads into either.
        keep_snapshots: How many snapshots of `state_dict()` are kept, the newest ones; default:
            all, until `momentd snapshot delete`.

    Raises:
        ValueError: As torch does, with torch's texts.
        UnsupportedFeature: For options that this version does not implement.
    """

    _rule: ClassVar[rules.SparseAdam] = rules.SparseAdam()  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        address: str | None = None,
        run: str | None = None,
        state_dtype: torch.dtype | None = None,
        checkpoint: str = "snapshot",
        keep_snapshots: int | None = None,
    ) -> None:
        _check_hyper(lr, betas, eps)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        options = Options(address, run, state_dtype, checkpoint, keep_snapshots)
        super().__init__(params, defaults, options)

    def _hyper(self, group: dict[str, Any]) -> Any:
        return self._rule.hyper(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=float(group["eps"]),
            maximize=bool(group.get("maximize", False)),
        )


def _check_hyper(lr: float | Tensor, betas: tuple[float, float], eps: float) -> None:
    """torch's checks, in torch's words. NaN fails them all."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise InvalidArgument("Tensor lr must be 1-element")
    if not 0.0 < lr:
        raise InvalidArgument(f"Invalid learning rate: {lr}")
    if not 0.0 < eps:
        raise InvalidArgument(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise InvalidArgument(f"Invalid beta parameter at index {index}: {beta}")
