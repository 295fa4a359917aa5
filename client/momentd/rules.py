"""Update rules as the client sees them: fields of a record, hyper-parameters of an update."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike

from momentd_wire import codec
from momentd_wire.errors import InvalidArgument, UnsupportedFeature
from momentd_wire.v1 import momentd_pb2 as pb


class Rule(Protocol):
    """What the client must know of an update rule."""

    name: ClassVar[str]

    def schema(self, rows: int, width: int, dtype: DTypeLike = np.float32) -> pb.Schema:
        """The schema of a table of `rows` parameter rows of `width` elements.

        `dtype` is that of the state: float32 or float64.
        """
        ...

    def set_hyper(self, update: pb.TableUpdate, **hyper: object) -> None:
        """Write hyper-parameters into an update. Raises InvalidArgument naming the bad one."""
        ...


class SparseAdam:
    """The rule of `torch.optim.SparseAdam`; its fields `exp_avg`, `exp_avg_sq` are of dim elements.

    Stateless: hyper-parameters are given to each `Table.update`.
    """

    name: ClassVar[str] = "sparse_adam"

    def schema(self, rows: int, width: int, dtype: DTypeLike = np.float32) -> pb.Schema:
        """See `Rule.schema`."""
        if rows < 0 or width < 1:
            raise InvalidArgument(
                f"a table needs rows >= 0 and dim >= 1, got rows={rows}, dim={width}"
            )
        if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise InvalidArgument(f"state dtype must be float32 or float64, got {np.dtype(dtype)}")
        wire = codec.to_wire(dtype)
        fields = [
            pb.FieldSpec(name=name, dtype=wire, width=width, initial=0.0)
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return pb.Schema(rows=rows, width=width, fields=fields, rule=self.name)

    def set_hyper(self, update: pb.TableUpdate, **hyper: object) -> None:
        """See `Rule.set_hyper`. Takes lr, betas, eps and maximize, with torch's defaults."""
        update.sparse_adam.CopyFrom(self.hyper(**hyper))  # pyright: ignore[reportArgumentType]

    @staticmethod
    def hyper(
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> pb.SparseAdamHyper:
        """The wire form. `lr` may be 0 (moments move, weights do not); NaN is refused."""
        beta1, beta2 = (float(beta) for beta in betas)
        _check("lr", float(lr), float(lr) >= 0, ">= 0")
        _check("eps", float(eps), float(eps) > 0, "> 0")
        _check("betas[0]", beta1, 0 <= beta1 < 1, "in [0, 1)")
        _check("betas[1]", beta2, 0 <= beta2 < 1, "in [0, 1)")
        return pb.SparseAdamHyper(lr=lr, beta1=beta1, beta2=beta2, eps=eps, maximize=bool(maximize))

    def __repr__(self) -> str:
        return "SparseAdam()"


def _check(name: str, value: float, holds: bool, wanted: str) -> None:
    if not (holds and math.isfinite(value)):
        raise InvalidArgument(f"{name} must be finite and {wanted}, got {value}", name=name)


_RULES: dict[str, Rule] = {SparseAdam.name: SparseAdam()}


def by_name(name: str) -> Rule:
    """The rule of a table's schema. Raises UnsupportedFeature for one of a newer momentd."""
    try:
        return _RULES[name]
    except KeyError:
        known = ", ".join(sorted(_RULES))
        raise UnsupportedFeature(
            f"rule {name!r} is not known to this client (known: {known}): upgrade momentd"
        ) from None
